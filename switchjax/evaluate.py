"""Evaluation on held-out batches."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace

import jax
import numpy as np

from switchjax import cluster, ending, processes, setup
from switchjax.batch import Batch
from switchjax.config import EvalConfig, read_config
from switchjax.distributed_config import DistributedConfig
from switchjax.layout import Layout
from switchjax.loss import TargetSums
from switchjax.metrics import router_record
from switchjax.model import SwitchTransformer
from switchjax.moe.layer import RouterStats
from switchjax.saved_steps import SavedSteps, checkpoint_directory
from switchjax.state import TrainState, abstract_state
from switchjax.step import eval_step

EvalStep = Callable[
    [SwitchTransformer, jax.Array | None, Batch], tuple[TargetSums, RouterStats | None]
]


def evaluate(
    state: TrainState, batches: Iterable[Batch], compiled_eval_step: EvalStep
) -> dict[str, float]:
    """Cross-entropy (nats per target), perplexity, accuracy and router use over all batches.

    Sums of all batches are added before they are divided, so a batch of few targets weighs little
    and one of none nothing.

    Args:
        batches: on the devices of the state.
        compiled_eval_step: `step.eval_step` under `jax.jit`.
    """
    model, router_bias_XE = state.model, state.router_bias_XE
    results = jax.device_get(
        [compiled_eval_step(model, router_bias_XE, batch) for batch in batches]
    )
    nats = sum(float(target.nats) for target, _ in results)
    targets = sum(int(target.targets) for target, _ in results)
    correct = sum(int(target.correct) for target, _ in results)
    routers = [router for _, router in results if router is not None]
    ce = nats / max(targets, 1)
    return {
        "ce": ce,
        "perplexity": math.exp(ce) if ce < 700 else math.inf,
        "accuracy": correct / max(targets, 1),
        "targets": targets,
    } | router_record(jax.tree.map(lambda *x: np.sum(x, axis=0), *routers) if routers else None)


def evaluate_run(
    config: EvalConfig, distributed: DistributedConfig | None = None
) -> dict[str, float]:
    """Evaluates a checkpoint of a run, on any mesh and any number of processes.

    Raises:
        UserError: there is no such run or checkpoint, or it does not fit the mesh, or the
            processes do not fit each other.
        ElsewhereError: another process of this evaluation has failed, or is gone.
    """
    run = read_config(config.run)
    run = replace(
        run,
        mesh=config.mesh or run.mesh,
        dispatcher=config.dispatcher or (run.dispatcher if config.mesh is None else None),
        devices=config.devices,
    )
    shape = setup.check(run)
    cluster.join(distributed, {"eval": asdict(config), "run": asdict(run), "mesh": asdict(shape)})
    with ExitStack() as stack:
        stack.enter_context(ending.telling_others())
        saved = SavedSteps(checkpoint_directory(config.run))
        step = saved.newest() if config.step is None else config.step
        stack.enter_context(jax.set_mesh(setup.start_devices(run, shape)))
        layout = Layout.of(shape)
        data = setup.read_data(run, layout, eval_batches=config.batches)
        data.train.close()
        state, _ = saved.restore(step, abstract_state(run, layout))
        first = layout.place(data.eval_batches[0])
        compiled = jax.jit(eval_step).lower(state.model, state.router_bias_XE, first).compile()
        processes.meet()
        batches = (layout.place(batch) for batch in data.eval_batches)
        record = evaluate(state, batches, compiled)
    ending.finish()
    return {"step": step} | record | {"unigram_entropy": data.unigram_entropy}
