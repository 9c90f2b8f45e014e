"""The Switch layer: route, dispatch, experts, combine. The package's only `shard_map`."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float

from switchjax.axes import EXPERT, MODEL, TOKENS
from switchjax.config import ModelConfig
from switchjax.layout import Layout, and_lone_axes
from switchjax.moe import routing
from switchjax.moe.dispatch import all_to_all
from switchjax.moe.experts import Experts, hidden, output
from switchjax.nn.init import weight
from switchjax.nn.noise import Noise


class RouterStats(NamedTuple):
    """What a Switch layer reports, over the whole batch and the same on every device."""

    balance: Array  # loss, float32
    z: Array  # loss, float32
    load_E: Array  # choices of each expert before drops, int32
    dropped: Array  # choices without a slot, int32


class SwitchLayer(nnx.Module):
    """A feed-forward layer of many experts, of which each token uses its best.

    Source: Switch Transformer, arXiv:2101.03961, section 2.1 and fig. 2.
    """

    def __init__(self, key: Array, config: ModelConfig, layout: Layout):
        router_key, experts_key = jax.random.split(key)
        self.router_DE = weight(
            router_key,
            (config.d_model, config.num_experts),
            variance=config.init_scale / config.d_model,
            spec=layout.router_de,
        )
        self.experts = Experts(experts_key, config, layout)
        self.config = config
        self.layout = layout

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        real_BL: Bool[Array, "B L"],
        noise: Noise | None,
    ) -> tuple[Float[Array, "B L D"], RouterStats]:
        """The experts' outputs, exactly 0 for dropped tokens and padding.

        Args:
            noise: of training; None at evaluation, which by default drops nothing.
        """
        layout, experts, dtype = self.layout, self.experts, x_BLD.dtype
        gate = experts.w_gate_EDF
        in_spec, out_spec = map(and_lone_axes, (layout.w_in_edf, layout.w_out_efd))
        weights = Weights(
            self.router_DE[...],
            jax.reshard(experts.w_in_EDF[...].astype(dtype), in_spec),
            None if gate is None else jax.reshard(gate[...].astype(dtype), in_spec),
            jax.reshard(experts.w_out_EFD[...].astype(dtype), out_spec),
        )
        noise_specs: Any = (layout.whole, layout.rows_b)
        weight_specs: Any = (layout.router_de, in_spec, in_spec, out_spec)
        mapped = jax.shard_map(
            partial(_switch, self.config),
            in_specs=(
                layout.tokens_bld,
                layout.tokens_bl,
                None if noise is None else Noise(*noise_specs),
                Weights(*weight_specs),
            ),
            out_specs=(layout.tokens_bld, layout.whole),
        )
        return mapped(x_BLD, real_BL, noise, weights)


class Weights(NamedTuple):
    """The layer's weights; inside `shard_map`, this device's part of them."""

    router_DE: Array
    w_in_EDF: Array
    w_gate_EDF: Array | None
    w_out_EFD: Array


def _switch(
    config: ModelConfig, x_bLD: Array, real_bL: Array, noise: Noise | None, weights: Weights
) -> tuple[Array, RouterStats]:
    """The layer as one device sees it: my rows of tokens, my experts, my slice of their hidden."""
    b, L, D = x_bLD.shape
    E, group_size = config.num_experts, config.group_size or L
    training = noise is not None
    factor = config.capacity_factor if training else config.eval_capacity_factor
    num_slots = group_size
    if factor is not None:
        num_slots = routing.capacity(group_size, E, config.top_k, factor)

    with jax.named_scope("route"):
        logits_bLE = _router_logits(x_bLD, weights.router_DE, config.jitter, noise)
        logits_gTE = logits_bLE.reshape(-1, group_size, E)
        real_gT = real_bL.reshape(-1, group_size)
        choice = routing.route(logits_gTE, real_gT, top_k=config.top_k, capacity=num_slots)
        sums = lax.psum(routing.router_sums(logits_gTE, real_gT, choice), TOKENS)
        stats = RouterStats(
            routing.balance_loss(sums), routing.z_loss(sums), sums.assigned_E, sums.dropped
        )
    with jax.named_scope("dispatch"):
        plan = all_to_all.plan(choice, E, num_slots)
        # Varying over `model` from here to the psum below: the sums over the model axis then run
        # on tokens, in both directions, and not on the longer exchange buffers.
        x_TD = lax.pcast(x_bLD.reshape(-1, D), MODEL, to="varying")
        x_eRD = all_to_all.dispatch(x_TD, plan, E)
    with jax.named_scope("experts"):
        h_eRf = hidden(x_eRD, weights.w_in_EDF, weights.w_gate_EDF)
        rate = config.dropout if config.expert_dropout is None else config.expert_dropout
        if training and rate > 0:
            place_eR2 = all_to_all.dispatch(_places(noise, L), plan, E)
            h_eRf = _expert_dropout(h_eRf, rate, noise, place_eR2, config.d_ff)
        y_eRD = output(h_eRf, weights.w_out_EFD)
    with jax.named_scope("combine"):
        y_TQD = all_to_all.combine(y_eRD, plan)
        gate_TQ = choice.gate_GTQ.reshape(-1, config.top_k)
        y_TD = jnp.einsum("tqd,tq->td", y_TQD.astype(jnp.float32), gate_TQ).astype(x_bLD.dtype)
        y_bLD = lax.psum(y_TD, MODEL).reshape(b, L, D)
    return y_bLD, stats


def _router_logits(
    x_bLD: Float[Array, "b L D"],
    router_DE: Float[Array, "D E"],
    jitter: float,
    noise: Noise | None,
) -> Float[Array, "b L E"]:
    """In float32 whatever the dtype of x; only the router sees the jittered input.

    Source: Switch Transformer, arXiv:2101.03961, section 2.4 (selective precision, jitter).
    """
    x_bLD = x_bLD.astype(jnp.float32)
    if noise is not None and jitter > 0:
        x_bLD *= 1 + jitter * (2 * noise.at(0).uniform(x_bLD.shape[1:]) - 1)
    return jnp.einsum("bld,de->ble", x_bLD, router_DE, precision=lax.Precision.HIGHEST)


def _places(noise: Noise, length: int) -> Array:
    """Row in the whole batch and position in the row of each of my tokens, int32 [tokens, 2]."""
    row_bL, position_bL = jnp.broadcast_arrays(noise.row_B[:, None], jnp.arange(length)[None])
    return jnp.stack([row_bL.reshape(-1), position_bL.reshape(-1)], axis=-1)


def _expert_dropout(h_eRf: Array, rate: float, noise: Noise, place_eR2: Array, d_ff: int) -> Array:
    """Dropout on the experts' hidden activations, keyed by token and expert, not by slot.

    Every device of the model axis draws the whole hidden dim and keeps its slice, so that the
    numbers do not depend on how the dim is split.
    """
    e, _, f = h_eRf.shape
    key = noise.at(1).key
    expert_e1 = (lax.axis_index(EXPERT) * e + jnp.arange(e))[:, None]
    start = lax.axis_index(MODEL) * f

    def of_slot(row: Array, position: Array, expert: Array) -> Array:
        slot_key = key
        for number in (row, position, expert):
            slot_key = jax.random.fold_in(slot_key, number)
        return lax.dynamic_slice_in_dim(jax.random.uniform(slot_key, (d_ff,)), start, f)

    of_slots = jnp.vectorize(of_slot, signature="(),(),()->(f)")
    uniform_eRf = of_slots(place_eR2[..., 0], place_eR2[..., 1], expert_e1)
    return jnp.where(uniform_eRf >= rate, h_eRf / (1 - rate), 0).astype(h_eRf.dtype)
