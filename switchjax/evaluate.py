"""Evaluation on held-out batches."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import numpy as np

from switchjax import setup
from switchjax.batch import Batch
from switchjax.config import EvalConfig, read_config
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


def evaluate_run(config: EvalConfig) -> dict[str, float]:
    """Evaluates a checkpoint of a run, on any mesh.

    Raises:
        UserError: there is no such run or checkpoint, or it does not fit the mesh.
    """
    run = read_config(config.run)
    run = replace(
        run,
        mesh=config.mesh or run.mesh,
        dispatcher=config.dispatcher or (run.dispatcher if config.mesh is None else None),
        devices=config.devices,
    )
    shape = setup.check(run)
    saved = SavedSteps(checkpoint_directory(config.run))
    step = saved.newest() if config.step is None else config.step
    mesh = setup.start_devices(run, shape)
    data = setup.read_data(run, eval_batches=config.batches)
    data.train.close()
    layout = Layout.of(shape)
    with jax.set_mesh(mesh):
        state, _ = saved.restore(step, abstract_state(run, layout))
        batches = (layout.place(batch) for batch in data.eval_batches)
        record = evaluate(state, batches, jax.jit(eval_step))
    return {"step": step} | record | {"unigram_entropy": data.unigram_entropy}
