"""What goes over the wire, counted in the compiled program."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import builders
import jax
import jax.numpy as jnp
import pytest
from jax import Array

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.moe.layer import SwitchLayer
from switchjax.nn.noise import Noise
from switchjax.plan.collectives import Collective, collectives

ROWS, LENGTH = 8, 16
LAYER = replace(builders.MODEL, capacity_factor=1.25)
CAPACITY = 3  # ceil(1.25 · 16 tokens / 8 experts)


def sent(program: jax.stages.Lowered, mesh_name: str) -> list[Collective]:
    """The collectives that reach another device, as compiled."""
    return collectives(program.compile().as_text(), builders.read_mesh(mesh_name))


def lowered(function: Callable, config: ModelConfig) -> jax.stages.Lowered:
    """`function(layer, x_BLD, real_BL)` on the mesh in use."""
    layout, mesh = Layout(), jax.sharding.get_mesh()

    def put(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, layout.rows(len(shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    layer = jax.eval_shape(lambda: SwitchLayer(jax.random.key(0), config, layout))
    layer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.NamedSharding(mesh, x.sharding.spec)
        ),
        layer,
    )
    arguments = (
        layer,
        put((ROWS, LENGTH, config.d_model), config.dtype),
        put((ROWS, LENGTH), bool),
    )
    return jax.jit(function).lower(*arguments)


def forward(layer: SwitchLayer, x_BLD: Array, real_BL: Array) -> tuple:
    """In training, so that the capacity is the tight one."""
    row_B = jnp.arange(ROWS, dtype=jnp.int32, out_sharding=layer.layout.rows_b)
    return layer(x_BLD, real_BL, Noise(jax.random.key(0), row_B))


def backward(layer: SwitchLayer, x_BLD: Array, real_BL: Array) -> tuple:
    """Forward and backward."""

    def loss(layer: SwitchLayer, x_BLD: Array) -> Array:
        y_BLD, stats = forward(layer, x_BLD, real_BL)
        return jnp.square(y_BLD).sum() + stats.balance + stats.z

    return jax.grad(loss, argnums=(0, 1))(layer, x_BLD)


def exchanged_elements(mesh_name: str) -> int:
    """One way: every device has a buffer of slots for all experts from each of its groups."""
    data, expert, _ = builders.read_mesh(mesh_name).sizes
    groups = ROWS // (data * expert)
    return LAYER.num_experts * groups * CAPACITY * LAYER.d_model


@pytest.mark.parametrize("mesh_name", builders.small_meshes())
def test_forward_is_two_all_to_alls(mesh_name):
    """One to the experts and one back where `expert` is split, and none where it is not.

    Beside them: sums of the router's statistics over all token devices, in which XLA puts arrays
    of one dtype together, and one sum of the outputs over `model`, on tokens and not on slots.
    """
    data, expert, model = builders.read_mesh(mesh_name).sizes
    with jax.set_mesh(builders.mesh(mesh_name)):
        found = sent(lowered(forward, LAYER), mesh_name)
    exchanges = [c for c in found if c.kind == "all-to-all"]
    assert [(c.phase, c.group_size) for c in exchanges] == (
        [("dispatch", expert), ("combine", expert)] if expert > 1 else []
    )
    for exchange in exchanges:
        assert exchange.axes == ("expert",) and exchange.runs == 1
        assert exchange.bytes == exchanged_elements(mesh_name) * 4
    sums = Counter((c.kind, c.phase, c.group_size) for c in found if c.kind != "all-to-all")
    of_router = ("all-reduce", "route", data * expert)
    of_outputs = ("all-reduce", "combine", model)
    assert sums.keys() == {key for key in (of_router, of_outputs) if key[2] > 1}
    assert sums[of_router] <= 2 and sums[of_outputs] <= 1
    tokens = ROWS * LENGTH // (data * expert)
    for c in found:
        if c.kind == "all-reduce" and c.phase == "combine":
            assert c.elements == tokens * LAYER.d_model
        if c.kind == "all-reduce" and c.phase == "route":
            assert c.elements <= 2 * LAYER.num_experts + 3


@pytest.mark.parametrize("mesh_name", builders.small_meshes())
def test_backward_is_two_more(mesh_name):
    """The gradients of the two exchanges; everything else is a sum, nothing is gathered."""
    _, expert, _ = builders.read_mesh(mesh_name).sizes
    with jax.set_mesh(builders.mesh(mesh_name)):
        found = sent(lowered(backward, LAYER), mesh_name)
    exchanges = [c for c in found if c.kind == "all-to-all"]
    assert sorted(c.phase for c in exchanges) == sorted(
        2 * ["dispatch", "combine"] if expert > 1 else []
    )
    for exchange in exchanges:
        assert exchange.axes == ("expert",) and exchange.group_size == expert
        assert exchange.bytes == exchanged_elements(mesh_name) * 4
    assert {c.kind for c in found} <= {"all-to-all", "all-reduce"}


def test_bytes_follow_the_compute_dtype():
    """As the program was written: XLA:CPU may widen bfloat16 when it compiles."""
    with jax.set_mesh(builders.mesh("data2_expert2_model2")):
        text = lowered(forward, replace(LAYER, dtype="bfloat16")).as_text()
    sent = re.findall(r"stablehlo.all_to_all.*-> tensor<([\dx]+)x(\w+)>", text)
    assert [dtype for _, dtype in sent] == ["bf16", "bf16"]
    for dims, _ in sent:
        assert math.prod(map(int, dims.split("x"))) == exchanged_elements("data2_expert2_model2")


def test_a_whole_step_exchanges_four_times_a_layer():
    """Two Switch layers, forward and backward, each in the body of its stack's scan.

    Everything else that the step sends is a sum: of gradients over the token devices, and over
    `model` of what its devices computed in part. Nothing is gathered or resharded.
    """
    config, mesh_name = builders.run_config(LAYER), "data2_expert2_model2"
    with jax.set_mesh(builders.mesh(mesh_name)):
        batch = Layout().place(builders.random_batch(LAYER))
        found = sent(builders.compiled_step(config).lower(builders.start(config), batch), mesh_name)
    kinds = Counter(c.kind for c in found)
    assert kinds.keys() == {"all-to-all", "all-reduce"}
    assert kinds["all-to-all"] == 2 * 4
