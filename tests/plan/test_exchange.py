"""The bytes of every dispatcher, as compiled, are those of its formula."""

from dataclasses import replace

import builders
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.moe.layer import SwitchLayer
from switchjax.nn.noise import Noise
from switchjax.plan.collectives import collectives
from switchjax.plan.exchange import exchange_bytes, least_bytes
from switchjax.plan.hlo import in_scope

ROWS, LENGTH = 16, 16
MODEL = replace(builders.MODEL, d_model=64, top_k=2, capacity_factor=1.25)


def found(shape, model):
    """The collectives of the layer, forward and backward, that its slower way has not."""
    layout, mesh = Layout.of(shape), jax.sharding.get_mesh()

    def on_mesh(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(layer, x_BLD, real_BL):
        row_B = jnp.arange(ROWS, dtype=jnp.int32, out_sharding=layout.rows_b)
        y_BLD, _ = layer(x_BLD, real_BL, Noise(jax.random.key(0), row_B))
        return jnp.square(y_BLD).sum()

    layer = jax.eval_shape(lambda: SwitchLayer(jax.random.key(0), model, layout))
    layer = jax.tree.map(lambda x: on_mesh(x.shape, x.dtype, x.sharding.spec), layer)
    x_BLD = on_mesh((ROWS, LENGTH, model.d_model), "float32", layout.tokens_bld)
    real_BL = on_mesh((ROWS, LENGTH), bool, layout.tokens_bl)
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(layer, x_BLD, real_BL).compile()
    return [c for c in collectives(program.as_text(), shape) if not in_scope(c.op_name, "fallback")]


EXCHANGES = [
    "expert8",
    "expert8,wire=float8",
    "expert8,dispatcher=all_gather",
    "expert8,dispatcher=all_gather,wire=float8",
    "expert8,dispatcher=all_gather,buffer=1.5",
    "data2_expert2_model2",
    "data2_expert2_model2,chunks=2",
    "data2_expert2_model2,experts=folded",
    "data2_expert2_model2,experts=folded,dispatcher=all_gather",
    "data2_expert2_model2,experts=folded,dispatcher=all_gather,buffer=1.5,chunks=2",
    "data8",
]


@pytest.mark.parametrize("mesh", EXCHANGES)
def test_a_compiled_layer_sends_what_the_formula_says(mesh):
    """Nothing is resharded or gathered beside: what else is sent is sums."""
    shape = read_mesh(mesh)
    with jax.set_mesh(builders.mesh(mesh)):
        sent = found(shape, MODEL)
    over_experts = [c for c in sent if c.axes == ("expert",) and c.phase in ("dispatch", "combine")]
    tokens = ROWS * LENGTH // (shape.data * shape.expert)
    expected = exchange_bytes(MODEL, shape, tokens=tokens, group_size=LENGTH)
    assert sum(c.wire_bytes for c in over_experts) == expected
    assert {c.kind for c in sent if c not in over_experts} <= {"all-reduce"}


@pytest.mark.parametrize("mesh", ["expert8", "data2_expert2_model2,experts=folded"])
def test_without_room_to_spare_nothing_is_sent_that_need_not_be(mesh):
    """Padded slots are what a capacity above the fair share adds, and all that is added."""
    shape, full = read_mesh(mesh), dict(tokens=4096, group_size=512)
    tight, roomy = (replace(MODEL, capacity_factor=f) for f in (1.0, 1.25))
    least = least_bytes(MODEL, shape, tokens=4096)
    assert exchange_bytes(tight, shape, **full) == least
    assert exchange_bytes(roomy, shape, **full) == 1.25 * least


def test_a_fixed_number_of_slots_is_sent_whatever_the_factor():
    """64 experts of which each has 10 of 512 places; never more than there are places."""
    shape, full = read_mesh("expert8"), dict(tokens=4096, group_size=512)
    fair = replace(MODEL, num_experts=64, top_k=1, capacity_factor=1.0)  # 8 slots
    least = exchange_bytes(fair, shape, **full)
    ten, many = (replace(fair, expert_capacity=slots) for slots in (10, 10**6))
    assert exchange_bytes(ten, shape, **full) == least * 10 / 8
    assert exchange_bytes(many, shape, **full) == least * 512 / 8


def test_all_gather_does_not_grow_with_the_choices():
    """Each token goes to all peers once: dear for one choice, cheap for many."""
    gathered, exchanged = read_mesh("expert8,dispatcher=all_gather"), read_mesh("expert8")
    full = dict(tokens=4096, group_size=512)
    ratios = []
    for k in (1, 8):
        model = replace(MODEL, d_model=1024, num_experts=64, top_k=k, capacity_factor=1.0)
        ratios.append(
            exchange_bytes(model, gathered, **full) / exchange_bytes(model, exchanged, **full)
        )
    assert ratios == pytest.approx([8, 1], rel=0.03)
