"""ZeRO: what of the state the axis `data` splits, though it splits the tokens too.

With `zero` 1 in the mesh file that is the optimizer's state, with 2 gradients too, with 3 the
parameters too. A weight is split along its width (`layout.Held`). So the optimizer works on parts:
with 1 and 2 the new parameters are gathered after a step, with 3 each weight where it is used. A
gradient is added and split in one collective, where its weight was used, so that no device has all
of it; with 1 it is added everywhere, and each device goes on with its part.

Source: ZeRO, arXiv:1910.02054, section 5.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from switchjax.axes import DATA, TOKENS
from switchjax.config import ReduceDtype
from switchjax.layout import Layout, reduced_over, unreduced_over, with_entry

Tree = TypeVar("Tree")


class Slotted(NamedTuple):
    """A weight, and an array of zeros in the place of which it has its gradient.

    So a gradient can lie otherwise than its weight, and be wider.
    """

    value: Array
    slot: Array | None


def with_slot(value: Array | Slotted) -> Slotted:
    """A weight's value, and its slot if it has one."""
    return value if isinstance(value, Slotted) else Slotted(value, None)


def dtype_of_sums(reduce_dtype: ReduceDtype, dtype: DTypeLike) -> jnp.dtype:
    """In which gradients are summed that are computed in a dtype."""
    return jnp.dtype(dtype if reduce_dtype == "compute" else reduce_dtype)


def whole(part: Array, dim: int, *, to: str = "varying") -> Array:
    """What `data` splits along a dim; inside `shard_map`."""
    return lax.all_gather(part, DATA, axis=dim, tiled=True, to=to)


def part_of_sum(array: Array, dim: int) -> Array:
    """The device's part of the sum over `data`; inside `shard_map`."""
    return lax.psum_scatter(array, DATA, scatter_dimension=dim, tiled=True)


def in_use(
    weight: nnx.Param,
    dtype: DTypeLike,
    layout: Layout,
    *,
    over: tuple[str, ...] = TOKENS,
    reduce_dtype: ReduceDtype | None = None,
) -> Array:
    """The weight as products take it: in the dtype of compute, and gathered if `data` splits it.

    Args:
        over: mesh axes that split what it is multiplied with. Gradients are summed over them.
        reduce_dtype: dtype of those sums; None: as the mesh file says.
    """
    value, slot = with_slot(weight.get_value())
    width = getattr(weight, "width", None)
    sum_dtype = dtype_of_sums(reduce_dtype or layout.storage.reduce_dtype, dtype)
    sizes = jax.sharding.get_abstract_mesh().shape
    is_summed = any(sizes[axis] > 1 for axis in over)
    as_computed = sum_dtype == jnp.dtype(dtype) or not is_summed
    gathered_dim = _split_dim(value, width)
    if slot is None and as_computed and gathered_dim is None:
        return value.astype(dtype)  # JAX sums the gradient of its own accord

    held = jax.typeof(value).sharding.spec
    used = held if gathered_dim is None else with_entry(held, gathered_dim, None)
    has_gradient = value if slot is None else slot
    gradient_spec = jax.typeof(has_gradient).sharding.spec
    scattered_dim = _split_dim(has_gradient, width)
    but_data = tuple(axis for axis in over if axis != DATA)

    def gathered(part: Array) -> Array:
        part = part.astype(dtype)
        if gathered_dim is None:
            return lax.pcast(part, over, to="reduced")
        part = lax.pcast(part, but_data, to="reduced")
        return whole(part, gathered_dim, to="reduced")

    def summed(part: Array) -> Array:
        part = part.astype(sum_dtype)
        if scattered_dim is None:
            return lax.psum(part, over).astype(has_gradient.dtype)
        return lax.psum(part_of_sum(part, scattered_dim), but_data).astype(has_gradient.dtype)

    @jax.custom_vjp
    def use(value: Array, slot: Array | None) -> Array:
        if not is_summed:
            return value.astype(dtype)
        return jax.shard_map(gathered, in_specs=held, out_specs=reduced_over(used, over))(value)

    def use_forward(value: Array, slot: Array | None) -> tuple[Array, None]:
        return use(value, slot), None

    def use_backward(_: None, gradient: Array) -> tuple[Array | None, Array | None]:
        if not is_summed:
            return None, gradient.astype(has_gradient.dtype)
        unreduced = unreduced_over(used, over)
        result = jax.shard_map(summed, in_specs=unreduced, out_specs=gradient_spec)(gradient)
        return (result, None) if slot is None else (None, result)

    use.defvjp(use_forward, use_backward)
    return use(value, slot)


def _split_dim(array: Array, width: int | None) -> int | None:
    """The dim that is over `data`, if any."""
    if width is None or jax.typeof(array).sharding.spec.partitions[width] != DATA:
        return None
    return array.ndim + width


def variables(model: Tree, layout: Layout) -> Tree:
    """What the gradient of a loss is taken by, in the place of each weight: itself, or a slot.

    Gradients are float32, and each lies as its variable does.
    """

    def variable(leaf: Any) -> Any:
        value = leaf.get_value()
        if not _needs_slot(leaf, layout):
            return leaf
        spec = jax.typeof(value).sharding.spec
        if layout.storage.zero >= 2:
            spec = with_entry(spec, leaf.width, DATA)
        return leaf.replace(jnp.zeros(value.shape, jnp.float32, out_sharding=spec))

    return map_weights(variable, model)


def with_variables(model: Tree, variables: Tree, layout: Layout) -> Tree:
    """The model as a function of its variables."""

    def joined(leaf: Any, variable: Any) -> Any:
        if not _needs_slot(leaf, layout):
            return variable
        return leaf.replace(Slotted(leaf.get_value(), variable.get_value()))

    return map_weights(joined, model, variables)


def _needs_slot(leaf: Any, layout: Layout) -> bool:
    if getattr(leaf, "width", None) is None:
        return False
    return layout.storage.zero == 2 or leaf.get_value().dtype != jnp.float32


def split(tree: Tree, layout: Layout) -> Tree:
    """Weights or gradients as the optimizer works on them: with 1 and more, parts of all."""
    return _with_widths(tree, DATA) if layout.storage.zero else tree


def held(tree: Tree, layout: Layout) -> Tree:
    """What the optimizer made of weights, as the state holds it: with 1 and 2, whole again."""
    return _with_widths(tree, None) if layout.storage.zero in (1, 2) else tree


def _with_widths(tree: Tree, axis: str | None) -> Tree:
    def moved(leaf: Any) -> Any:
        width = getattr(leaf, "width", None)
        if width is None:
            return leaf
        value = leaf.get_value()
        spec = with_entry(jax.typeof(value).sharding.spec, width, axis)
        return leaf.replace(jax.reshard(value, spec))

    return map_weights(moved, tree)


def map_weights(function: Callable[..., Any], *trees: Any) -> Any:
    """Of whole weights, not of the arrays in them, so that one can be left out, or know its width.

    What is no part of a module is a weight itself.
    """
    return jax.tree.map(function, *trees, is_leaf=lambda node: isinstance(node, nnx.Variable))
