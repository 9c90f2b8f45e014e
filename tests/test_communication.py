"""What goes over the wire, counted in the compiled program."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import builders
import jax
import jax.numpy as jnp
import pytest
from jax import Array

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.moe.layer import SwitchLayer
from switchjax.nn.noise import Noise

ROWS, LENGTH = 8, 16
LAYER = replace(builders.MODEL, capacity_factor=1.25)
CAPACITY = 3  # ceil(1.25 · 16 tokens / 8 experts)

_DEFINITION = re.compile(
    r"= (?P<type>\([^)]*\)|\S+) (?P<kind>all-to-all|ragged-all-to-all|all-reduce|all-gather|"
    r"reduce-scatter|collective-permute|collective-broadcast)(-start)?\(.*"
)
_ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}


class Collective(NamedTuple):
    kind: str
    group: int  # devices that exchange
    elements: int  # of the result on one device
    bytes: int
    scope: str  # of the layer's phases


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program that reach another device."""
    found = []
    for line in text.splitlines():
        match = _DEFINITION.search(line)
        if match is None:
            continue
        size = _group_size(line)
        if size == 1:
            continue
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", match["type"])
        counts = [math.prod(int(n) for n in dims.split(",") if n) for _, dims in arrays]
        scope = re.search(r"/\(?(route|dispatch|experts|combine)/", line)
        found.append(
            Collective(
                match["kind"],
                size,
                sum(counts),
                sum(n * _ITEM_BYTES[t] for n, (t, _) in zip(counts, arrays, strict=True)),
                scope[1] if scope else "",
            )
        )
    return found


def _group_size(line: str) -> int:
    """XLA writes groups as {{0,1},{2,3}}, [number,size]<=…, mesh['a'=4,'b'=2] {'a'}, or pairs."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[([^]]*)\][^{]*\{([^}]*)\}", line):
        axes = dict(re.findall(r"('\w+')=(\d+)", named[1]))
        return math.prod(int(axes[axis]) for axis in named[2].split(",") if axis)
    assert "source_target_pairs=" in line, line
    return 2


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
        found = collectives(lowered(forward, LAYER).compile().as_text())
    exchanges = [c for c in found if c.kind == "all-to-all"]
    assert [(c.scope, c.group) for c in exchanges] == (
        [("dispatch", expert), ("combine", expert)] if expert > 1 else []
    )
    for exchange in exchanges:
        assert exchange.bytes == exchanged_elements(mesh_name) * 4
    sums = Counter((c.kind, c.scope, c.group) for c in found if c.kind != "all-to-all")
    of_router = ("all-reduce", "route", data * expert)
    of_outputs = ("all-reduce", "combine", model)
    assert sums.keys() == {key for key in (of_router, of_outputs) if key[2] > 1}
    assert sums[of_router] <= 2 and sums[of_outputs] <= 1
    tokens = ROWS * LENGTH // (data * expert)
    for c in found:
        if c.kind == "all-reduce" and c.scope == "combine":
            assert c.elements == tokens * LAYER.d_model
        if c.kind == "all-reduce" and c.scope == "route":
            assert c.elements <= 2 * LAYER.num_experts + 3


@pytest.mark.parametrize("mesh_name", builders.small_meshes())
def test_backward_is_two_more(mesh_name):
    """The gradients of the two exchanges; everything else is a sum, nothing is gathered."""
    _, expert, _ = builders.read_mesh(mesh_name).sizes
    with jax.set_mesh(builders.mesh(mesh_name)):
        found = collectives(lowered(backward, LAYER).compile().as_text())
    exchanges = [c for c in found if c.kind == "all-to-all"]
    assert sorted(c.scope for c in exchanges) == sorted(
        2 * ["dispatch", "combine"] if expert > 1 else []
    )
    for exchange in exchanges:
        assert exchange.group == expert
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
    config = builders.run_config(LAYER)
    with jax.set_mesh(builders.mesh("data2_expert2_model2")):
        batch = Layout().place(builders.random_batch(LAYER))
        step = builders.compiled_step(config).lower(builders.start(config), batch).compile()
    kinds = Counter(c.kind for c in collectives(step.as_text()))
    assert kinds.keys() == {"all-to-all", "all-reduce"}
    assert kinds["all-to-all"] == 2 * 4
