"""One optimizer step, and one batch of evaluation: pure functions of state and batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from switchjax import expert_cache, scaling, zero
from switchjax.batch import Batch
from switchjax.config import OptimConfig, RunConfig
from switchjax.layout import Layout
from switchjax.loss import TargetSums, target_sums
from switchjax.metrics import StepMetrics
from switchjax.model import SwitchTransformer
from switchjax.moe import hot
from switchjax.moe.layer import RouterStats
from switchjax.moe.routing import moved_bias
from switchjax.nn.noise import Noise
from switchjax.optim import learning_rate
from switchjax.state import TrainState, keys
from switchjax.update import update


class Counts(NamedTuple):
    """What means are taken over."""

    targets: Array  # real targets
    tokens_S: Array  # real tokens of the encoder, if there is one, and of the decoder

    @classmethod
    def of(cls, batch: Batch) -> "Counts":
        segments = (batch.encoder_segment_BS, batch.segment_BL)
        tokens = [(s > 0).sum(dtype=jnp.int32) for s in segments if s is not None]
        return cls(batch.target_mask_BL.sum(dtype=jnp.int32), jnp.stack(tokens))


class LossParts(NamedTuple):
    """A micro-batch's share of the step's losses: the shares add up to the whole."""

    ce: Array
    router: RouterStats | None  # [layers, ...]


def train_step(
    config: RunConfig, layout: Layout, state: TrainState, batch: Batch
) -> tuple[TrainState, StepMetrics]:
    """The state after one optimizer step on the whole batch, and what the step measured.

    With accumulation the batch is cut into micro-batches, each with its own queues; where nothing
    drops the result is that of the whole batch at once, but for the balance loss, which is the
    mean over micro-batches.
    """
    state, metrics, _ = step_with_gradient(config, layout, state, batch)
    return state, metrics


def step_with_gradient(
    config: RunConfig, layout: Layout, state: TrainState, batch: Batch
) -> tuple[TrainState, StepMetrics, SwitchTransformer]:
    """`train_step`, and the gradient before clipping, each array in the place of its parameter."""
    key = jax.random.fold_in(keys(config)[1], state.step)
    whole = Counts.of(batch)

    variables = zero.variables(state.model, layout)
    kept = expert_cache.gathered(state.model, state.load_XE, layout)

    def gradient(micro: Batch) -> tuple[SwitchTransformer, LossParts]:
        noise = Noise(key, micro.row_B)

        def loss(variables: SwitchTransformer) -> tuple[Array, LossParts]:
            model = zero.with_variables(state.model, variables, layout)
            model = expert_cache.with_gathered(model, kept)
            bias_XE = state.router_bias_XE
            total, parts = _loss(model, bias_XE, micro, noise, whole, config.optim)
            return scaling.scaled(total, state.loss_scale), parts

        return jax.grad(loss, has_aux=True)(variables)

    grads, parts = _accumulate(gradient, batch, config.optim.accumulation, layout)
    grads = scaling.unscaled(zero.split(grads, layout), state.loss_scale)
    grad_norm = optax.tree.norm(grads)  # finite only if all of the gradient is
    next_state = _next_state(config, layout, state, grads, grad_norm, parts.router)
    aux, z = _router_losses(parts.router)
    metrics = StepMetrics(
        loss=_total(parts.ce, aux, z, config.optim),
        ce=parts.ce,
        aux=aux,
        z=z,
        grad_norm=grad_norm,
        learning_rate=learning_rate(config.optim, state.updates),
        tokens=whole.tokens_S.sum(),
        router=parts.router,
        loss_scale=next_state.loss_scale,
    )
    return next_state, metrics, grads


def _next_state(
    config: RunConfig,
    layout: Layout,
    state: TrainState,
    grads: SwitchTransformer,
    grad_norm: Array,
    router: RouterStats | None,
) -> TrainState:
    """The state after a step with this gradient. Where the loss is scaled, a step whose gradient
    is not finite leaves all but its number and the scale as it was."""
    parameters = zero.split(state.model, layout)
    is_taken = None if state.loss_scale is None else jnp.isfinite(grad_norm)
    model, opt_state = update(
        config.optim, layout.storage, grads, state.opt_state, parameters, is_taken=is_taken
    )
    bias_XE, load_XE, loss_scale = state.router_bias_XE, state.load_XE, state.loss_scale
    if bias_XE is not None and router is not None:
        bias_XE = moved_bias(bias_XE, router.load_E, config.optim.bias_rate)
    if load_XE is not None and router is not None:
        load_XE = hot.counted(load_XE, router.load_E)
    if is_taken is not None and loss_scale is not None:
        old = state.router_bias_XE, state.load_XE
        bias_XE, load_XE = scaling.chosen(is_taken, (bias_XE, load_XE), old)
        loss_scale = loss_scale.after(is_taken)
    model = zero.held(model, layout)
    return TrainState(state.step + 1, model, opt_state, bias_XE, load_XE, loss_scale)


def _loss(
    model: SwitchTransformer,
    router_bias_XE: Array | None,
    micro: Batch,
    noise: Noise,
    whole: Counts,
    optim: OptimConfig,
) -> tuple[Array, LossParts]:
    """A micro-batch's share of the step's loss.

    Args:
        whole: of the whole batch, so that every target and every routed token weighs the same.
    """
    logits_BLV, router = model(micro, noise, router_bias_XE)
    ce = target_sums(logits_BLV, micro.targets_BL, micro.target_mask_BL).nats
    ce /= jnp.maximum(whole.targets, 1)
    if router is not None:
        share_S = Counts.of(micro).tokens_S / jnp.maximum(whole.tokens_S, 1)
        share_X = jnp.repeat(share_S, router.z.size // share_S.size)
        balance_X = router.balance / optim.accumulation
        cold_X = router.cold / optim.accumulation  # of the step's gathers
        router = router._replace(balance=balance_X, z=router.z * share_X, cold=cold_X)
    return _total(ce, *_router_losses(router), optim), LossParts(ce, router)


def _router_losses(router: RouterStats | None) -> tuple[Array, Array]:
    """Balance loss and z-loss, each the mean over Switch layers; 0 without any."""
    if router is None:
        return jnp.float32(0), jnp.float32(0)
    return router.balance.mean(), router.z.mean()


def _total(ce: Array, aux: Array, z: Array, optim: OptimConfig) -> Array:
    return ce + optim.balance_coefficient * aux + optim.z_coefficient * z


def _accumulate(
    compute: Callable[[Batch], tuple[SwitchTransformer, LossParts]],
    batch: Batch,
    num_micros: int,
    layout: Layout,
) -> tuple[SwitchTransformer, LossParts]:
    """Σ compute(micro-batch). Micro-batch i holds rows i, i + m, …, so no row changes device."""
    if num_micros == 1:
        return compute(batch)

    def cut(x: Array) -> Array:
        shape = (x.shape[0] // num_micros, num_micros, *x.shape[1:])
        return x.reshape(shape, out_sharding=layout.rows(len(shape))).swapaxes(0, 1)

    micros = jax.tree.map(cut, batch)
    shapes = jax.eval_shape(compute, jax.tree.map(lambda x: x[0], micros))
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding.spec), shapes
    )

    def add(sums, micro):
        return jax.tree.map(jnp.add, sums, compute(micro)), None

    return lax.scan(add, zeros, micros)[0]


def eval_step(
    model: SwitchTransformer, router_bias_XE: Array | None, batch: Batch
) -> tuple[TargetSums, RouterStats | None]:
    """Sums over one batch: no noise, and unless the config says otherwise no choice drops."""
    logits_BLV, router = model(batch, None, router_bias_XE)
    return target_sums(logits_BLV, batch.targets_BL, batch.target_mask_BL), router
