"""Three layouts for 16 H200, by experts and row length: what fits, what a step takes, who is right.

Claim: with 8 experts data4_model4_folded (plan A) beats expert8_model2 (plan B) by 4 %; with 32 and
64 plan B wins by 6 and 44 %, since plan A sums gradients of experts over four devices that have
them all; TP = EP = 4 is last everywhere. The longer the rows the less it matters: at 32 K most is
attention. Formulas are within 0.1 % of the compiler for parameters, optimizer and what is sent; for
all bytes of a device within 2 % with rows of 4 K, and within 21 % with longer ones.
Command: python experiments/plans/sixteen.py
Printed (2026-11-30, Python 3.11, jax 0.10.2):

                        16 H200; state and sent: formula over compiler
     length  experts  mesh                 GB     formula  step ms  sending  state  sent
     4096    8        data4_model4_folded  16.9   0.99     422      42%      0.999  1.000
     4096    8        expert8_model2       25.3   0.98     440      44%      1.000  1.000
     4096    8        expert=4,model=4     14.0   0.98     711      66%      0.999  1.000
     4096    32       data4_model4_folded  29.0   1.00     476      49%      1.000  1.000
     4096    32       expert8_model2       28.4   0.98     447      45%      1.000  1.000
     4096    32       expert=4,model=4     17.1   0.98     711      66%      0.999  1.000
     4096    64       data4_model4_folded  45.2   1.00     646      62%      1.000  1.000
     4096    64       expert8_model2       32.4   0.99     448      45%      1.000  1.000
     4096    64       expert=4,model=4     21.1   0.99     711      65%      1.000  1.000
     16384   8        data4_model4_folded  46.3   0.85     689      26%      0.999  1.000
     16384   8        expert8_model2       83.7   0.84     707      28%      1.000  1.000
     16384   8        expert=4,model=4     43.4   0.84     978      48%      0.999  1.000
     16384   32       data4_model4_folded  58.4   0.88     678      24%      1.000  1.000
     16384   32       expert8_model2       86.7   0.84     714      28%      1.000  1.000
     16384   32       expert=4,model=4     46.5   0.85     978      48%      0.999  1.000
     16384   64       data4_model4_folded  74.5   0.91     913      44%      1.000  1.000
     16384   64       expert8_model2       90.8   0.85     714      28%      1.000  1.000
     16384   64       expert=4,model=4     50.5   0.86     978      48%      1.000  1.000
     32768   8        data4_model4_folded  57.9   1.20     1044     17%      0.999  1.000
     32768   8        expert8_model2       108.1  1.20     1064     19%      1.000  1.000
     32768   8        expert=4,model=4     55.5   1.20     1335     35%      0.999  1.000
     32768   32       data4_model4_folded  67.6   1.21     1027     16%      1.000  1.000
     32768   32       expert8_model2       110.5  1.20     1071     19%      1.000  1.000
     32768   32       expert=4,model=4     58.0   1.20     1335     35%      0.999  1.000
     32768   64       data4_model4_folded  80.5   1.21     1270     32%      1.000  1.000
     32768   64       expert8_model2       113.7  1.21     1072     19%      1.000  1.000
     32768   64       expert=4,model=4     61.2   1.20     1335     35%      1.000  1.000
"""

from dataclasses import replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from switchjax.config import DataConfig, ModelConfig, OptimConfig, RunConfig
from switchjax.mesh import read_mesh
from switchjax.plan.candidates import Candidate
from switchjax.plan.compiling import Program, compile_all
from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import estimate, with_program

MODEL = ModelConfig(
    architecture="decoder_only",
    vocab_size=32128,
    d_model=1024,
    d_ff=4096,
    num_heads=16,
    d_kv=64,
    num_layers=24,
    dtype="bfloat16",
    remat="full",
)
TOKENS = 2**19
MESHES = ("data4_model4_folded", "expert8_model2", "expert=4,model=4")
H200 = read_hardware("h200")


def candidate(mesh: str, experts: int, length: int) -> Candidate:
    """Micro-batches of 32 K tokens a device."""
    shape, rows = read_mesh(mesh), TOKENS // length
    tokens = TOKENS // (shape.data * shape.expert)
    config = RunConfig(
        model=replace(MODEL, num_experts=experts),
        data=DataConfig(batch_size=rows, sequence_length=length),
        optim=OptimConfig(accumulation=max(1, tokens // 32768)),
    )
    return Candidate(config=config, shape=shape)


if __name__ == "__main__":
    asked = [
        candidate(mesh, experts, length)
        for length in (4096, 16384, 32768)
        for experts in (8, 32, 64)
        for mesh in MESHES
    ]
    with Progress(transient=True) as progress:
        task = progress.add_task("compiling", total=len(asked))
        answers = compile_all(asked, H200, on_done=lambda: progress.advance(task))
    columns = ("length", "experts", "mesh", "GB", "formula", "step ms", "sending", "state", "sent")
    table = Table(*columns, title="16 H200; state and sent: formula over compiler", box=None)
    for candidate_, answer in zip(asked, answers, strict=True):
        model, data = candidate_.config.model, candidate_.config.data
        words = [f"{data.sequence_length}", f"{model.num_experts}", candidate_.shape.name]
        if not isinstance(answer, Program):
            table.add_row(*words, answer.message)
            continue
        formula = estimate(candidate_, H200)
        row = with_program(formula, answer, H200)
        sent = sum(s.wire_bytes for s in formula.sends) / sum(s.wire_bytes for s in row.sends)
        state = (formula.memory.parameters + formula.memory.optimizer) / answer.argument_bytes
        table.add_row(
            *words,
            f"{row.device_bytes / 1e9:.1f}{'' if row.fits else ' no'}",
            f"{formula.device_bytes / row.device_bytes:.2f}",
            f"{row.cost.step * 1e3:.0f}",
            f"{row.sending_share:.0%}",
            f"{state:.3f}",
            f"{sent:.3f}",
        )
    Console(width=98).print(table)
