"""Compiles candidates for absent GPUs, each in a process of its own, and remembers the answers.

XLA's plugin for CUDA must not look for GPUs, and a compile may take a process down with it. Answers
are kept in the user's cache folder under what they depend on, this package's own code included.

Run as a program it is such a process: a folder and a question in JSON on stdin, the answer on
stdout.
"""

import gc
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from switchjax.config import from_dict, to_dict
from switchjax.errors import UserError
from switchjax.mesh import Exchange, MeshShape, Storage
from switchjax.plan.candidates import Candidate
from switchjax.plan.collectives import Collective
from switchjax.plan.hardware import Hardware, hardware_from

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the compiler says of a train step."""

    device_bytes: int
    """Of one device: arguments, results that replace none of them, and temporaries."""
    argument_bytes: int
    temp_bytes: int
    collectives: list[tuple[Collective, int]]
    """Each with the FLOPs of the matrix products that run between its start and its done."""
    largest: list[tuple[int, str, str]]
    """Bytes, type and origin of the largest temporaries, each kind once."""
    flops: int
    """Of the matrix products of one run."""
    seconds: float
    """That compiling took."""


@dataclass(frozen=True)
class Failure:
    """What the compiler said where it failed."""

    message: str


Answer = Program | Failure
_NUMBERS = ("device_bytes", "argument_bytes", "temp_bytes", "flops", "seconds")


def compile_all(
    candidates: Sequence[Candidate],
    hardware: Hardware,
    *,
    on_done: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """An answer for each candidate, from the cache or from a process; as many at once as CPUs.

    Raises:
        UserError: XLA's plugin for CUDA is not installed.
    """
    require_compiler()

    def answer(candidate: Candidate) -> Answer:
        found = _cached(candidate, hardware)
        on_done()
        return found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(answer, candidates))


def require_compiler() -> None:
    """Raises UserError unless XLA's plugin for CUDA is installed."""
    if not has_compiler():
        raise UserError("compiling for absent GPUs needs pip install 'switchjax[plan]'")


def has_compiler() -> bool:
    """Whether XLA's plugin for CUDA is installed."""
    try:
        importlib.metadata.version("jax-cuda13-pjrt")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def cache_folder() -> Path:
    """Where answers are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "switchjax" / "plan"


def _cached(candidate: Candidate, hardware: Hardware) -> Answer:
    question = _question(candidate, hardware)
    key = hashlib.blake2b(f"{question}{_versions()}".encode(), digest_size=16).hexdigest()
    path = cache_folder() / f"{key}.json"
    try:
        return _program(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not asked before, or cut off while writing
    with tempfile.TemporaryDirectory() as dump:
        done = subprocess.run(
            [sys.executable, "-m", "switchjax.plan.compiling"],
            input=f"{dump}\n{question}",
            env=_environment(dump),
            capture_output=True,
            text=True,
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Failure(lines[-1].strip() if lines else f"it ended with status {done.returncode}")
    said = done.stdout.splitlines()[-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(said)
    temporary.replace(path)
    return _program(json.loads(said))


def _environment(dump: str) -> dict[str, str]:
    """Of a process that compiles. XLA tells files what it has decided, before it makes kernels."""
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_train_step"
    flags += " --xla_gpu_force_compilation_parallelism=1"  # of kernels, and none is needed
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }


def _question(candidate: Candidate, hardware: Hardware) -> str:
    config = to_dict(candidate.config)
    asked = {part: config[part] for part in ("model", "data", "optim")}
    # As if all were on the device, since an absent GPU has no other memory: see `with_program`.
    on_device = replace(candidate.shape.storage, offload="none")
    shape = asdict(replace(candidate.shape, storage=on_device))
    return json.dumps({"config": asked, "shape": shape, "hardware": asdict(hardware)})


@cache
def _versions() -> str:
    """Of what else an answer depends on."""
    code = hashlib.blake2b(digest_size=16)
    for path in sorted(PACKAGE.rglob("*.py")):
        code.update(path.read_bytes())
    names = ("jax", "flax", "optax", "jax-cuda13-pjrt")
    return ",".join([code.hexdigest(), *map(importlib.metadata.version, names)])


def _program(values: dict[str, Any]) -> Program:
    def collective(fields: dict[str, Any]) -> Collective:
        lists: dict[str, Any] = {name: tuple(fields[name]) for name in ("axes", "dtypes")}
        return Collective(**(fields | lists))

    collectives = [(collective(fields), flops) for fields, flops in values["collectives"]]
    numbers: dict[str, Any] = {name: values[name] for name in _NUMBERS}
    largest = [(size, kind, origin) for size, kind, origin in values["largest"]]
    return Program(collectives=collectives, largest=largest, **numbers)


def _answer(question: dict[str, Any], dump: Path) -> dict[str, Any]:
    """In the process that compiles."""
    from switchjax.plan.collectives import KINDS
    from switchjax.plan.hlo import in_scope
    from switchjax.plan.schedule import overlaps, program_flops

    values = question["shape"]
    parts = {"exchange": Exchange(**values["exchange"]), "storage": Storage(**values["storage"])}
    shape = MeshShape(**(values | parts))
    began = time.perf_counter()
    text, device_bytes, argument_bytes = _compile(question, shape, dump)
    found = overlaps(text, shape, KINDS)
    usual = [o for o in found if not in_scope(o.collective.op_name, "fallback")]
    return {
        "device_bytes": device_bytes,
        "argument_bytes": argument_bytes,
        "temp_bytes": device_bytes - argument_bytes,
        "flops": program_flops(text),
        "largest": _largest(text),
        "collectives": [(asdict(o.collective), o.matmul_flops) for o in usual],
        "seconds": time.perf_counter() - began,
    }


def _compile(question: dict[str, Any], shape: MeshShape, dump: Path) -> tuple[str, int, int]:
    """The scheduled program, bytes of a device, and those of them that are arguments.

    More than half of a compile is making kernels that nobody will run. Once XLA has told the dump
    what it has allocated and scheduled, the rest is not waited for.
    """
    from switchjax.layout import Layout
    from switchjax.plan.absent import compile_train_step

    config, hardware = from_dict(question["config"]), hardware_from(question["hardware"])
    pool = ThreadPoolExecutor(1)
    compiled = pool.submit(compile_train_step, config, shape, Layout.of(shape), hardware)
    while not compiled.done():
        if told := _told(dump):
            return told
        time.sleep(0.1)
    program = compiled.result()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments = memory.argument_size_in_bytes
    return text, arguments + memory.temp_size_in_bytes + results, arguments


def _told(dump: Path) -> tuple[str, int, int] | None:
    """As `_compile`, from the files of a dump; None while the last of them is not complete."""
    reports = list(dump.glob("*memory-usage-report.txt"))
    total = re.search(r"^Total bytes: (\d+)", reports[0].read_text(), re.M) if reports else None
    if total is None:
        return None
    (program,) = dump.glob("*after_optimizations.txt")
    (buffers,) = dump.glob("*after_optimizations-buffer-assignment.txt")
    sizes = re.findall(r"^allocation \d+: size (\d+), parameter", buffers.read_text(), re.M)
    return program.read_text(), int(total[1]), sum(map(int, sizes))


def _largest(text: str, count: int = 12) -> list[tuple[int, str, str]]:
    """The largest arrays that the program makes, not those that it is given."""
    from switchjax.plan.hlo import array_types, parse, visits

    program = parse(text)
    found: dict[str, tuple[int, str, str]] = {}
    for visit in visits(program):
        instruction = visit.instruction
        if instruction.opcode in _MAKE_NOTHING or instruction.type.startswith("("):
            continue
        for array in array_types(instruction.type):
            kind = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            origin = program.source(instruction) or instruction.op_name
            if kind not in found or not found[kind][2]:
                found[kind] = array.bytes, kind, origin
    return sorted(found.values(), reverse=True)[:count]


_MAKE_NOTHING = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")

if __name__ == "__main__":
    gc.disable()  # tracing makes much and drops little
    folder, asked = sys.stdin.read().split("\n", 1)
    print(json.dumps(_answer(json.loads(asked), Path(folder))), flush=True)
    os._exit(0)  # XLA may still be making kernels
