"""The Switch layer: route, dispatch to experts and back. The package's only `shard_map`."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from switchjax.axes import AXES, DATA, MODEL, TOKENS
from switchjax.config import ModelConfig, RouterKind
from switchjax.layout import Layout, and_lone_axes
from switchjax.moe import hot, routing, varying
from switchjax.moe.dispatch import all_gather, all_to_all, local, placement, ragged
from switchjax.moe.dispatch.interface import Dispatcher, Plan, Tokens
from switchjax.moe.experts import Dropout, Experts, ExpertsHere
from switchjax.nn.init import weight
from switchjax.nn.noise import Noise
from switchjax.remat import ROUTING, named
from switchjax.zero import in_use

DISPATCHERS: dict[str, Dispatcher] = {
    "all_to_all": all_to_all.dispatch,
    "all_gather": all_gather.dispatch,
    "ragged": ragged.dispatch,
    "local": local.dispatch,
}


class RouterStats(NamedTuple):
    """What a Switch layer reports, over the whole batch and the same on every device."""

    balance: Array  # loss, float32
    z: Array  # loss, float32
    load_E: Array  # choices of each expert before drops, int32
    dropped: Array  # choices without a slot, int32; under expert choice, tokens without an expert
    asked: Array  # what `dropped` is a part of: choices or real tokens, int32
    fell_back: Array  # 1 if any device's buffer was too small and the slower way was taken, int32
    cold: Array  # share of devices that gathered cold experts, float32; 0 where none are kept


class SwitchLayer(nnx.Module):
    """A feed-forward layer of many experts, of which each token uses its best.

    Source: Switch Transformer, arXiv:2101.03961, section 2.1 and fig. 2.
    """

    def __init__(
        self,
        key: Array,
        config: ModelConfig,
        layout: Layout,
        *,
        router_kind: RouterKind = "top_k",
    ):
        router_key, experts_key = jax.random.split(key)
        self.router_DE = weight(
            router_key,
            (config.d_model, config.num_experts),
            variance=config.init_scale / config.d_model,
            held=layout.router_de,
        )
        self.experts = Experts(experts_key, config, layout)
        self.router_kind: RouterKind = router_kind
        self.config = config
        self.layout = layout

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        real_BL: Bool[Array, "B L"],
        noise: Noise | None,
        bias_E: Float[Array, "E"] | None = None,
        *,
        placement_E: Int[Array, "E"] | None = None,
    ) -> tuple[Float[Array, "B L D"], RouterStats]:
        """The experts' outputs, exactly 0 for dropped tokens and for padding that is not routed.

        Args:
            noise: of training; None at evaluation, which by default drops nothing.
            bias_E: on the choice of experts; without effect where experts choose.
            placement_E: where each expert's weights are among those of `experts`; None = in order.
        """
        layout, experts, dtype = self.layout, self.experts, x_BLD.dtype
        if isinstance(w_in_EDF := experts.w_in_EDF.get_value(), hot.Cached):
            placement_E = w_in_EDF.placement_E
        if placement_E is None:
            placement_E = jnp.arange(self.config.num_experts)

        def of_experts(w: nnx.Param) -> Array | hot.Cached:
            if isinstance(cached := w.get_value(), hot.Cached):
                return cached._replace(order_E=None)  # as `placement_E` says
            w_EXY = in_use(w, dtype, layout, over=(DATA,))
            return jax.reshard(w_EXY, and_lone_axes(jax.typeof(w_EXY).sharding.spec))

        gate = experts.w_gate_EDF
        weights = Weights(
            in_use(self.router_DE, jnp.float32, layout, reduce_dtype="float32"),
            of_experts(experts.w_in_EDF),
            None if gate is None else of_experts(gate),
            of_experts(experts.w_out_EFD),
        )
        weight_specs: Any = jax.tree.map(lambda w: jax.typeof(w).sharding.spec, weights)
        noise_specs: Any = (layout.whole, layout.rows_b)
        mapped = jax.shard_map(
            partial(_switch, self.config, self.router_kind, layout),
            in_specs=(
                layout.tokens_bld,
                layout.tokens_bl,
                None if noise is None else Noise(*noise_specs),
                None if bias_E is None else layout.whole,
                weight_specs,
                layout.whole,
            ),
            out_specs=(layout.tokens_bld, layout.whole),
        )
        return mapped(x_BLD, real_BL, noise, bias_E, weights, placement_E)


class Weights(NamedTuple):
    """The layer's weights; inside `shard_map`, this device's part of them."""

    router_DE: Array
    w_in_EDF: Array | hot.Cached
    w_gate_EDF: Array | hot.Cached | None
    w_out_EFD: Array | hot.Cached


def _switch(
    config: ModelConfig,
    router_kind: RouterKind,
    layout: Layout,
    x_bLD: Array,
    real_bL: Array,
    noise: Noise | None,
    bias_E: Array | None,
    weights: Weights,
    placement_E: Array,
) -> tuple[Array, RouterStats]:
    """The layer as one device sees it: my rows of tokens, my experts, my slice of their hidden."""
    b, L, D = x_bLD.shape
    E, group_size, exchange = config.num_experts, config.group_size or L, layout.exchange
    num_slots = _slots_of_a_group(config, router_kind, layout, group_size, noise is not None)

    with jax.named_scope("route"):
        logits_bLE = _router_logits(x_bLD, weights.router_DE, config.jitter, noise)
        logits_gTE = logits_bLE.reshape(-1, group_size, E)
        real_gT = real_bL.reshape(-1, group_size)
        experts_choose = router_kind == "expert_choice"
        if experts_choose:
            choice = routing.expert_choice(logits_gTE, real_gT, capacity=num_slots)
        else:
            choice = routing.route(
                logits_gTE,
                jnp.ones_like(real_gT) if config.padding_is_routed else real_gT,
                top_k=config.top_k,
                capacity=num_slots,
                bias_E=bias_E,
                second_GT=_second_draw(config, noise, real_gT),
            )
        of_real = routing.without_padding(choice, real_gT, E)
        mine = routing.router_sums(logits_gTE, real_gT, of_real, experts_chose=experts_choose)
        is_cached = isinstance(weights.w_in_EDF, hot.Cached)
        served_E = hot.served(choice, E) if is_cached else None
        sums, served_E = named(ROUTING, lax.psum((mine, served_E), TOKENS))
        choice = placement.to_lanes(choice, placement_E, exchange.experts)

    dropout = _expert_dropout(config, layout, noise, placement_E)
    tokens = Tokens(x_bLD.reshape(-1, D), None)
    if dropout is not None and noise is not None:
        tokens = tokens._replace(place=_places(noise, L))
    # From here to the sum over `model` below, no sum but those that dispatchers write: gradients
    # are added over other axes here, so on tokens and not on the longer buffers, once for all
    # chunks, and outside of branches that not all devices take.
    everywhere = partial(jax.tree.map, partial(varying.over, AXES))
    tokens, choice, matrices = everywhere((tokens, choice, weights[1:]))
    cold = jnp.float32(0)
    if served_E is not None:
        matrices, cold = hot.brought(matrices, layout, jnp.argsort(placement_E), served_E)
    in_eDf, gate_eDf, out_efD = matrices
    experts = ExpertsHere(
        w_in_eDf=in_eDf,
        w_gate_eDf=gate_eDf,
        w_out_efD=out_efD,
        dropout=dropout,
        keeps_hidden=config.remat != "moe",
    )
    plan = Plan(placement.num_lanes(E, exchange.experts), num_slots, exchange)
    y_TD, fell_back = _in_chunks(tokens, choice, experts, plan)
    with jax.named_scope("combine"):
        y_bLD = lax.psum(y_TD, MODEL).reshape(b, L, D)
    return y_bLD, RouterStats(
        balance=routing.balance_loss(sums),
        z=routing.z_loss(sums),
        load_E=sums.assigned_E,
        dropped=sums.dropped,
        asked=sums.tokens if experts_choose else sums.assigned_E.sum(),
        fell_back=fell_back,
        cold=cold,
    )


def _slots_of_a_group(
    config: ModelConfig, router_kind: RouterKind, layout: Layout, group_size: int, training: bool
) -> int:
    """Of one expert; as many as tokens where nothing is to drop."""
    if config.expert_capacity is not None:
        return min(group_size, config.expert_capacity)
    factor = config.capacity_factor if training else config.eval_capacity_factor
    if factor is None and router_kind == "expert_choice":
        factor = config.capacity_factor  # as `eval_capacity_factor` says
    if factor is None or layout.exchange.dispatcher == "ragged":
        return group_size
    return routing.capacity(group_size, config.num_experts, config.top_k, factor)


def _in_chunks(
    tokens: Tokens, choice: routing.Routing, experts: ExpertsHere, plan: Plan
) -> tuple[Array, Array]:
    """The dispatcher's result, of some of the groups at a time.

    Nothing joins the chunks but the sum of the weights' gradients, so that one's compute can run
    beside another's exchange.
    """
    chunks = plan.exchange.chunks
    leaves, tree = jax.tree.flatten((tokens, choice))
    parts = zip(*(jnp.split(x, chunks) for x in leaves), strict=True)
    dispatch = DISPATCHERS[plan.exchange.dispatcher]
    results = []
    for part in parts:
        some_tokens, some_choices = tree.unflatten(part)
        results.append(dispatch(some_tokens, some_choices, experts, plan))
    y_TD = jnp.concatenate([y_TD for y_TD, _ in results])
    fell_back = jnp.stack([fell_back for _, fell_back in results]).max()
    if differs := varying.axes_of(fell_back):
        fell_back = lax.pmax(fell_back, tuple(differs))
    return y_TD, fell_back


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


def _second_draw(config: ModelConfig, noise: Noise | None, real_gT: Array) -> Array | None:
    """What decides whether second choices are sent; None where all are."""
    if noise is None or not config.random_second:
        return None
    length = real_gT.size // noise.row_B.size
    return noise.at(2).uniform((length,)).reshape(real_gT.shape)


def _places(noise: Noise, length: int) -> Array:
    """Row in the whole batch and position in the row of each of my tokens, int32 [tokens, 2]."""
    row_bL, position_bL = jnp.broadcast_arrays(noise.row_B[:, None], jnp.arange(length)[None])
    return jnp.stack([row_bL.reshape(-1), position_bL.reshape(-1)], axis=-1)


def _expert_dropout(
    config: ModelConfig, layout: Layout, noise: Noise | None, placement_E: Array
) -> Dropout | None:
    """Of this device's experts."""
    rate = config.dropout if config.expert_dropout is None else config.expert_dropout
    if noise is None or rate == 0:
        return None
    folded = layout.exchange.experts == "folded"
    slice_width = config.d_ff // lax.axis_size(MODEL)
    return Dropout(
        rate=rate,
        key=noise.at(1).key,
        expert_e=placement.experts_here(placement_E, layout.exchange.experts),
        d_ff=config.d_ff,
        start=jnp.int32(0) if folded else lax.axis_index(MODEL) * slice_width,
    )
