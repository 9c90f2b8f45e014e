"""The cache of busy experts: some of a device's experts stay gathered through a step.

Where `data` splits the parameters, a layer's experts are gathered where they are used: forward and
backward, in every micro-batch. Of each device's experts the busiest, `hot_experts` in all, are
gathered once a step instead. The others, the cold ones, still come where they are used, and only if
a token has found a place at any of the device's cold experts: so it matters which are kept.

A layer then has the weights of a device in another order, hot ones first, and its choices go by
`placement_E`. Gradients are those of the parts that the state holds, so the optimizer, checkpoints
and all other programs see nothing of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from switchjax import zero
from switchjax.axes import AXES, DATA, EXPERT
from switchjax.layout import Layout, with_entry
from switchjax.moe import varying
from switchjax.moe.dispatch import placement
from switchjax.moe.routing import Routing

Arrays = tuple[Array, ...]

# Of what was counted before, when a step adds its own: half of it is of the last seven steps.
_REMEMBERED = 0.9


class Cached(NamedTuple):
    """An experts' weight as layers find it in a step; stacked ones have a leading dim."""

    value: Any  # the parts that the state holds, an array or `zero.Slotted`, in logical order
    hot_AXY: Array  # the hot experts of all devices, whole, in the dtype of compute
    order_E: Array | None  # the logical expert at each physical place; a device's hot ones first

    @property
    def placement_E(self) -> Array:
        """The physical place of each logical expert."""
        assert self.order_E is not None
        return jnp.argsort(self.order_E)


def counted(history_XE: Float[Array, "X E"], load_XE: Int[Array, "X E"]) -> Float[Array, "X E"]:
    """The loads of all steps, of which the later count more, with those of one more step."""
    return _REMEMBERED * history_XE + load_XE


def orders(history_XE: Float[Array, "X E"], layout: Layout) -> Int[Array, "X E"]:
    """Of each layer the logical expert at each physical place, each device's busiest first.

    Experts stay on their device; of those equally busy the first comes first.
    """
    (X, E), num_parts = history_XE.shape, layout.expert_parts()
    busiest_XPe = jnp.argsort(-history_XE.reshape(X, num_parts, E // num_parts), axis=-1)
    first_P = jnp.arange(num_parts) * (E // num_parts)
    return (busiest_XPe + first_P[None, :, None]).reshape(X, E)


def is_of_experts(weight: nnx.Param) -> bool:
    """What the axis `expert` splits is an experts' weight."""
    spec = jax.typeof(weight.get_value()).sharding.spec
    return any(EXPERT in (e if isinstance(e, tuple) else (e,)) for e in spec.partitions)


def gathered(
    weight: nnx.Param, order_NE: Int[Array, "N E"], layout: Layout, dtype: DTypeLike
) -> Float[Array, "N A X Y"]:
    """The hot experts of stacked layers, whole, in the dtype of compute."""
    value, width = weight.get_value(), weight.width
    held = jax.typeof(value).sharding.spec
    num_hot = layout.storage.hot_experts // layout.expert_parts()

    def of_device(part_NeXY: Array, order_NE: Array) -> Array:
        hot_Na = placement.at_device(order_NE, layout.exchange.experts)[:, :num_hot]
        hot_NaXY = jnp.take_along_axis(part_NeXY, hot_Na[..., None, None], axis=1)
        return zero.whole(hot_NaXY.astype(dtype), part_NeXY.ndim + width, to="invarying")

    specs = (held, layout.whole)
    mapped = jax.shard_map(of_device, in_specs=specs, out_specs=with_entry(held, width, None))
    return mapped(value, order_NE)


def served(choice: Routing, num_experts: int) -> Int[Array, "E"]:
    """1 for each expert that has been given a token of this device, and 0 for the others."""
    served_E = jnp.zeros(num_experts, jnp.int32)
    return served_E.at[choice.expert_GTQ].max(choice.kept_GTQ.astype(jnp.int32), mode="drop")


def brought(
    weights: tuple[Cached, Cached | None, Cached],
    layout: Layout,
    order_E: Int[Array, "E"],
    served_E: Int[Array, "E"],
) -> tuple[tuple[Array, Array | None, Array], Float[Array, ""]]:
    """A device's experts whole, in physical order, and the share of devices with cold ones in use.

    Inside `shard_map`. Where no cold one is in use they are zeros, and so are their gradients:
    neither is sent.

    Args:
        weights: into, gate and out of the hidden dim; all varying over all mesh axes.
        served_E: `served` of all devices added up.
    """
    found = [weight for weight in weights if weight is not None]
    values, slots = zip(*(zero.with_slot(weight.value) for weight in found), strict=True)
    has_slots = [slot is not None for slot in slots]
    hot = tuple(weight.hot_AXY for weight in found)
    num_hot, wire = len(hot[0]), _Wire.of(hot, layout)

    @jax.custom_vjp
    def use(values: Arrays, slots: Any, hot: Arrays, order_e: Array, is_used: Array) -> Arrays:
        cold = tuple(value[order_e[num_hot:]] for value in values)
        return _joined(hot, _if_used(is_used, wire.gathered, cold))

    def use_forward(*given: Any) -> tuple[Arrays, tuple[Array, Array]]:
        return use(*given), given[-2:]

    def use_backward(kept: tuple[Array, Array], gradients: Arrays) -> tuple:
        order_e, is_used = kept
        hot = wire.summed(tuple(gradient[:num_hot] for gradient in gradients))
        cold = tuple(gradient[num_hot:] for gradient in gradients)
        sums = _joined(hot, _if_used(is_used, wire.summed, cold))
        logical = zip((x[jnp.argsort(order_e)] for x in sums), has_slots, strict=True)
        both = [(None, x) if has_slot else (x, None) for x, has_slot in logical]
        return *zip(*both, strict=True), None, None, None

    use.defvjp(use_forward, use_backward)
    experts = layout.exchange.experts
    order_e = placement.at_device(order_E, experts)
    in_use_P = (served_E[order_E].reshape(-1, order_e.size)[:, num_hot:] > 0).any(axis=1)
    is_used = in_use_P[placement.part(experts)]
    into, *gate, out = use(values, slots, hot, order_e, is_used)
    return (into, gate[0] if gate else None, out), in_use_P.mean(dtype=jnp.float32)


class _Wire(NamedTuple):
    """How parts of some weights become whole, and their gradients parts of a sum over devices."""

    dims: list[int]  # of each, the one that `data` splits
    dtype: Any
    reduce_dtype: Any

    @classmethod
    def of(cls, hot: Arrays, layout: Layout) -> "_Wire":
        held = [layout.w_in_edf] * (len(hot) - 1) + [layout.w_out_efd]
        dims = [len(h.spec) + h.width for h in held if h.width is not None]
        dtype = hot[0].dtype
        return cls(dims, dtype, zero.dtype_of_sums(layout.storage.reduce_dtype, dtype))

    def gathered(self, parts: Arrays) -> Arrays:
        # Typed on the way as weights are, which no policy of `remat` keeps.
        narrow = zip((part.astype(self.dtype) for part in parts), self.dims, strict=True)
        whole = (zero.whole(part, dim, to="reduced") for part, dim in narrow)
        return tuple(lax.pcast(array, DATA, to="varying") for array in whole)

    def summed(self, gradients: Arrays) -> Arrays:
        """In float32."""
        wide = zip((x.astype(self.reduce_dtype) for x in gradients), self.dims, strict=True)
        return tuple(zero.part_of_sum(x, dim).astype(jnp.float32) for x, dim in wide)


def _joined(hot: Arrays, cold: Arrays) -> Arrays:
    return tuple(jnp.concatenate(pair) for pair in zip(hot, cold, strict=True))


def _if_used(is_used: Array, send: Callable[[Arrays], Arrays], arrays: Arrays) -> Arrays:
    """What is sent, or zeros in its place."""

    def zeros(arrays: Arrays) -> Arrays:
        promised = jax.eval_shape(send, arrays)
        return tuple(varying.over(AXES, jnp.zeros(x.shape, x.dtype)) for x in promised)

    return lax.cond(is_used, send, zeros, arrays)
