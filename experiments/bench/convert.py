"""How much memory a conversion takes: a Switch Transformer of 3 GB in shards of 1 GB, in and out.

Claim: the peak of a conversion's resident memory, Python and JAX included, is at most the size of
the largest shard and 1 GB more, both ways; and what went in comes out, bit for bit.
Command: python experiments/bench/convert.py (needs 10 GB in the folder of temporary files)
Expect: a minute on 2 CPU cores. Of 3.16 GB, in: peak 1.24 GB where the largest shard has 1.00,
16 s; out: peak 0.42 GB where it has 2.00, 18 s (2026-11-30, Python 3.11, cores shared).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from switchjax.config import RunConfig
from switchjax.interop.huggingface import tensors_of
from switchjax.interop.tensors import Tensors, write_tensors
from switchjax.interop.their_config import theirs_of
from switchjax.presets import PRESETS
from switchjax.state import model_shapes

MODEL = replace(PRESETS["switch-base-8"].model, num_experts=11)
SHARD_BYTES = 10**9


def write_checkpoint(directory: Path) -> int:
    """A Hugging Face directory of random tensors; gives its bytes."""
    directory.mkdir()
    family, rng = "switch_transformers", np.random.default_rng(0)
    shapes = {
        tensor.name: tensor.shape
        for name, leaf in model_shapes(MODEL).items()
        for tensor in tensors_of(name, leaf.shape, MODEL, family)
    }

    def read(name: str) -> np.ndarray:
        return rng.standard_normal(shapes[name], np.float32)

    write_tensors(directory, shapes, np.dtype(np.float32), read, shard_bytes=SHARD_BYTES)
    theirs = theirs_of(RunConfig(model=MODEL), pad_id=0, eos_id=1, dtype="float32")
    (directory / "config.json").write_text(json.dumps(theirs))
    return sum(path.stat().st_size for path in shards(directory))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def convert(*words: object) -> dict[str, float]:
    """Seconds and peak bytes of `switchjax convert`, in a process of its own."""
    program = "from switchjax.cli import main; main()"
    command = [sys.executable, "-c", program, "convert", *map(str, words)]
    began = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return {"seconds": time.perf_counter() - began, "peak_gb": usage.ru_maxrss * 1024 / 1e9}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        total = write_checkpoint(folder / "theirs")
        into = convert("hf-to-switchjax", folder / "theirs", folder / "ours")
        back = convert("switchjax-to-hf", folder / "ours", folder / "again")
        first, second = (Tensors(folder / name) for name in ("theirs", "again"))
        assert first.stored == second.stored
        for name in first.stored:
            np.testing.assert_array_equal(first.read(name), second.read(name))
        largest = max(path.stat().st_size for path in shards(folder / "theirs"))
        largest_back = max(path.stat().st_size for path in shards(folder / "again"))
    print(json.dumps({"checkpoint_gb": total / 1e9, "largest_shard_gb": largest / 1e9} | into))
    print(json.dumps({"largest_shard_gb": largest_back / 1e9} | back))
    assert into["peak_gb"] <= largest / 1e9 + 1 and back["peak_gb"] <= largest_back / 1e9 + 1
