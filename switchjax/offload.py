"""Host memory: what of the state lives there, and how it gets to the device and back.

With `offload = optimizer` in the mesh file the optimizer's arrays stay in pinned memory of the host
between steps; its counts do not, which every update reads. Nothing computes on the host: what is
needed is copied to the device, a period of a stack after another, so that the device never has all
of it. Numbers do not change.

Knows nothing of update rules; `update` decides what is needed when.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from switchjax.errors import UserError
from switchjax.mesh import MeshShape
from switchjax.model import Period
from switchjax.remat import HOST_MEMORY

Tree = TypeVar("Tree")


def check_memory(shape: MeshShape, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError where the mesh file asks for host memory that its devices cannot reach."""
    device, offload = mesh.devices.flat[0], shape.storage.offload
    if offload == "none":
        return
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST_MEMORY not in kinds:
        raise UserError(
            f"mesh {shape.name}: offload = {offload} needs memory of kind {HOST_MEMORY}, and a "
            f"{device.platform} device has {', '.join(kinds) or 'no kinds'}: leave it out"
        )


def to_host(tree: Tree) -> Tree:
    """With its arrays on the host; numbers without a dim stay where they are."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, tree)


def to_device(tree: Tree) -> Tree:
    """With all of it on the device."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def back(tree: Tree, old: Tree) -> Tree:
    """With each array in the memory of the old one."""
    return jax.tree.map(lambda x, y: jax.device_put(x, jax.typeof(y).memory_space), tree, old)


def promised(tree: Tree) -> Tree:
    """Of shapes with shardings: as `to_host`, of arrays."""

    def on_host(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x.update(sharding=x.sharding.with_memory_kind(HOST_MEMORY)) if x.ndim else x

    return jax.tree.map(on_host, tree)


def is_stack(node: Any) -> bool:
    """Whether the node is the periods of a stack: its arrays have a leading dim N, never split."""
    return isinstance(node, Period)


def period_at(tree: Tree, index: int | Array) -> Tree:
    """One period of arrays [N, ...], on the device."""
    return to_device(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, False), tree))


def with_period(tree: Tree, index: int | Array, period: Tree) -> Tree:
    """Arrays [N, ...] with another period; each stays where it is."""

    period = back(period, tree)
    return jax.tree.map(
        lambda x, part: lax.dynamic_update_index_in_dim(x, part, index, 0), tree, period
    )


def are_finite(tree: Tree) -> Tree:
    """For each array of numbers with a point, whether all of it is finite; True for others."""

    def is_finite(x: Array) -> Array:
        return jnp.isfinite(x).all()

    def of(node: Any) -> Any:
        if not is_stack(node) or not any(map(is_on_host, jax.tree.leaves(node))):
            return jax.tree.map(lambda x: is_finite(to_device(x)), node)
        num_periods = jax.tree.leaves(node)[0].shape[0]
        finite = lax.map(
            lambda i: jax.tree.map(is_finite, period_at(node, i)), jnp.arange(num_periods)
        )
        return jax.tree.map(jnp.all, finite)

    return jax.tree.map(of, tree, is_leaf=is_stack)


def is_on_host(x: Array) -> bool:
    """Of an array in a program that is being traced."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host
