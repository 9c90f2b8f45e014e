"""How long the device waits for input or Python: the training loop against its bare program.

Claim: 100 steps of `train` (text, metrics, progress) take less than 5 % longer than 100 calls of
the compiled step on one batch. Rounds of both are interleaved; the ratio is that of the medians.
Command: python experiments/bench/host_overhead.py
Expect: a ratio of 1.03 on 2 idle CPU cores (24.0 s over 23.2 s for 40 steps, 2026-11-29).
"""

import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from switchjax import setup
from switchjax.layout import Layout
from switchjax.presets import PRESETS
from switchjax.state import init_state
from switchjax.step import train_step
from switchjax.train import train

ROUNDS, WARM_UP, STEPS = 2, 10, 100
CONFIG = replace(PRESETS["tiny"], steps=WARM_UP + STEPS, eval_every=10**6, eval_batches=1)


def loop_seconds() -> float:
    """Of STEPS steps in the training loop, as its own metrics tell."""
    with tempfile.TemporaryDirectory() as out:
        train(replace(CONFIG, out=f"{out}/run"))
        lines = (Path(out) / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    return seconds[-2] - seconds[-2 - STEPS]  # the last step also waits for the evaluation


def bare_seconds() -> float:
    """Of STEPS calls of the compiled step on one batch."""
    layout = Layout()
    with jax.set_mesh(setup.start_devices(CONFIG, setup.check(CONFIG))):
        data = setup.read_data(CONFIG, layout, eval_batches=1)
        batch = layout.place(next(data.train))
        data.train.close()
        state = jax.jit(partial(init_state, CONFIG, layout))()
        step = jax.jit(partial(train_step, CONFIG, layout), donate_argnums=0)
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                jax.block_until_ready(state)
                began = time.perf_counter()
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        return time.perf_counter() - began


if __name__ == "__main__":
    rounds = [(loop_seconds(), bare_seconds()) for _ in range(ROUNDS)]
    loop, bare = (statistics.median(each) for each in zip(*rounds, strict=True))
    print(json.dumps({"loop_s": loop, "bare_s": bare, "loop_over_bare": loop / bare}))
