"""The committed meshes that fit eight devices, and how a test puts arrays on them."""

import contextlib

import jax
import numpy as np
from jax.sharding import NamedSharding

from switchjax.layout import Layout
from switchjax.mesh import make_submesh, mesh_names, read_mesh

LAYOUT = Layout()
SHAPES = {name: shape for name in mesh_names() if (shape := read_mesh(name)).num_devices <= 8}
# A folder with fewer would prove less without a word.
assert {shape.sizes for shape in SHAPES.values()} >= {
    (1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (4, 1, 2), (2, 2, 2), (2, 4, 1)
}  # fmt: skip
NAMES = sorted(SHAPES)

# Two calculations of one thing in float32, summed in another order. Never loosened in a test.
VALUES = {"rtol": 1e-5, "atol": 1e-6}
GRADIENTS = {"rtol": 1e-4, "atol": 1e-6}


@contextlib.contextmanager
def use(name):
    """The mesh of this name, or of sizes such as `data=2,expert=2`, on the first devices."""
    with jax.set_mesh(make_submesh(read_mesh(name))):
        yield


def put(value, spec):
    """The array on the mesh in use."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
    return jax.device_put(value, NamedSharding(jax.sharding.get_mesh(), spec))


def copies(array):
    """What each device holds, by the part of the whole that it is."""
    found = {}
    for shard in array.addressable_shards:
        found.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return found
