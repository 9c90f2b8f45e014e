"""Golden numbers: small inputs whose right answer is known, and what common mistakes make of them.

Every value comes out of the package's own functions.
"""

from functools import partial

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from switchjax.batch import Batch
from switchjax.config import ModelConfig, OptimConfig
from switchjax.layout import Layout
from switchjax.moe.layer import RouterStats, SwitchLayer
from switchjax.moe.routing import (
    Routing,
    balance_loss,
    capacity,
    route,
    router_sums,
    z_loss,
)
from switchjax.nn.noise import Noise
from switchjax.optim import make_optimizer

MIB = 2**20
EIGHT = np.ones(8, bool)
REAL_THEN_PADDING = np.arange(8) < 4


@partial(jax.jit, static_argnames="slots")
def routed(logits_TE, real_T, slots: int = 8) -> tuple[Routing, Array, Array]:
    """One group of tokens: where they go, balance loss, z-loss."""
    logits_1TE, real_1T = logits_TE[None], real_T[None]
    routing = route(logits_1TE, real_1T, top_k=1, capacity=slots)
    sums = router_sums(logits_1TE, real_1T, routing)
    return routing, balance_loss(sums), z_loss(sums)


def routing_of(logits_TE: ArrayLike, slots: int = 8) -> Routing:
    return routed(jnp.asarray(logits_TE, jnp.float32), np.ones(len(logits_TE), bool), slots)[0]


def aux_of(logits_TE: ArrayLike, real_T: np.ndarray = EIGHT) -> Array:
    return routed(jnp.asarray(logits_TE, jnp.float32), real_T)[1]


def z_of(logits_TE: ArrayLike, real_T: np.ndarray = EIGHT) -> Array:
    return routed(jnp.asarray(logits_TE, jnp.float32), real_T)[2]


def aux_beside_padding() -> Array:
    """Four real tokens, one for each expert; padding would all take expert 0."""
    probs_TE = np.full((8, 4), 0.1)
    probs_TE[range(4), range(4)] = 0.7
    probs_TE[4:] = [0.97, 0.01, 0.01, 0.01]
    return aux_of(np.log(probs_TE), REAL_THEN_PADDING)


def z_beside_padding() -> Array:
    return z_of([[2.0, 0, 0, 0]] * 4 + [[0.0] * 4] * 4, REAL_THEN_PADDING)


def layer_with_an_expert_of_ten() -> np.ndarray:
    """x = 1 … 5 beside a 1 that makes the logits [1, 0]; 0.8 · 5 / 2 = 2 slots."""
    config = ModelConfig(d_model=2, d_ff=1, num_experts=2, jitter=0.0, capacity_factor=0.8)
    with jax.set_mesh(builders.mesh("single")):
        layer = SwitchLayer(jax.random.key(0), config, Layout())
        layer.router_DE = nnx.Param(jnp.array([[0.0, 0.0], [1.0, 0.0]]))
        layer.experts.w_in_EDF = nnx.Param(jnp.array([[[1.0], [0.0]]] * 2))
        layer.experts.w_out_EFD = nnx.Param(jnp.array([[[10.0, 0.0]]] * 2))
        x_BLD = np.array([[[v, 1.0] for v in (1, 2, 3, 4, 5)]], np.float32)
        return np.asarray(in_training(layer, x_BLD)[0])[0, :, 0]


@jax.jit
def in_training(layer: SwitchLayer, x_BLD: ArrayLike) -> tuple[Array, RouterStats]:
    """Of one row on one device, all of it real, with the capacity of training."""
    layout = layer.layout
    noise = Noise(jax.random.key(0), jax.reshard(jnp.zeros(1, jnp.int32), layout.rows_b))
    x_BLD = jax.reshard(jnp.asarray(x_BLD), layout.tokens_bld)
    real_BL = jax.reshard(jnp.ones(x_BLD.shape[:2], bool), layout.tokens_bl)
    return layer(x_BLD, real_BL, noise)


def gate_and_slopes() -> tuple[Array, Array, Array]:
    """The gate is p itself, so its slopes are p · (1 - p), and not 0 as after a softmax of one."""

    def gate(logits_E):
        return routing_of(logits_E[None]).gate_GTQ[0, 0, 0]

    value, slope_E = jax.value_and_grad(gate)(jnp.array([1.0, 0.0]))
    return value, *slope_E


def kept_of_a_full_queue() -> int:
    """Experts asked by 5, 1, 1 and 1 of 8 tokens: 2.5 slots are 3."""
    wishes = 2 * np.eye(4)[[0, 0, 0, 0, 0, 1, 2, 3]]
    return int(routing_of(wishes, slots=capacity(8, 4, 1, 1.25)).kept_GTQ.sum())


def norm_and_clip_factor() -> tuple[float, float]:
    """Squared norms of 20 and 100 on the two devices of the expert axis, clipped to 1."""
    config = OptimConfig(optimizer="sgd", learning_rate=1.0, warmup_steps=1, clip_norm=1.0)
    gradient_EDF = np.array([[[2.0, 4.0]], [[6.0, 8.0]]], np.float32)
    optimizer = make_optimizer(config)
    with jax.set_mesh(builders.mesh("expert=2")):
        placed = jax.device_put(gradient_EDF, Layout().w_in_edf.spec)
        update = jax.jit(lambda g: optimizer.update(g, optimizer.init(g), None)[0])
        updates_EDF = -np.asarray(update(placed))
    factor = float(updates_EDF.max() / gradient_EDF.max())
    return 1 / factor, factor


def ce_of_a_step(mesh_name: str, accumulation: int, rows: list[tuple[int, float]]) -> Array:
    """Of a train step.

    Args:
        rows: for each its number of targets, and the cross-entropy of each of them.
    """
    nats = np.array([n for _, n in rows])
    length = max(count for count, _ in rows)
    model = ModelConfig(
        architecture="decoder_only",
        vocab_size=1 + len(rows),
        d_model=2,
        d_ff=1,
        num_heads=1,
        d_kv=2,
        num_layers=1,
        moe_every=0,
    )
    config = builders.run_config(model, rows=len(rows), optimizer="sgd", accumulation=accumulation)
    # Layers that add nothing; then word 0 is read as the logits in the first column.
    logits_V = np.array([3.0, *(3 - np.log(1 - np.exp(-nats).sum()) - nats)])
    targets_BL = np.broadcast_to(1 + np.arange(len(rows))[:, None], (len(rows), length))
    batch = Batch(
        row_B=np.arange(len(rows), dtype=np.int32),
        tokens_BL=np.zeros((len(rows), length), np.int32),
        segment_BL=np.ones((len(rows), length), np.int32),
        targets_BL=targets_BL.astype(np.int32),
        target_mask_BL=np.arange(length) < np.array([[count] for count, _ in rows]),
        encoder_tokens_BS=None,
        encoder_segment_BS=None,
    )
    with jax.set_mesh(builders.mesh(mesh_name)):
        state = builders.start(config)
        block = state.model.decoder.periods.blocks[0]
        for module, name in ((block.attention, "w_o_HKD"), (block.mlp, "w_out_FD")):
            setattr(module, name, nnx.Param(jnp.zeros_like(getattr(module, name)[...])))
        embed_VD = np.stack([logits_V, np.zeros_like(logits_V)], axis=1).astype(np.float32)
        placed = jax.device_put(embed_VD, Layout().embed_vd.spec)
        state.model.embedding.embed_VD = nnx.Param(placed)
        return builders.compiled_step(config)(state, Layout().place(batch))[1].ce


def mask_of_all_slots(num_experts: int, groups: int) -> float:
    """MiB in bfloat16 of a mask [tokens, experts, slots], which dispatch by index never makes."""
    group_size = 8192 // groups
    slots = capacity(group_size, num_experts, 1, 1.25)
    return groups * group_size * num_experts * slots * 2 / MIB


GOLDEN = [
    # What, the right number, and in a comment what mistakes give.
    ("aux beside padding", aux_beside_padding, 1.0),  # 1.72, 0.25
    ("aux of one favourite", lambda: aux_of([[4.0, 0, 0, 0]] * 8), 3.7916600),  # 1.8323355
    ("aux of equal logits", lambda: aux_of(np.zeros((8, 4))), 1.0),
    ("z", lambda: z_of([[2.0, 0, 0, 0]] * 8), 5.4791244),  # 0.50585, 2.80615
    ("z of 4 equal logits", lambda: z_of(np.zeros((8, 4))), 1.9218121),
    ("z of 8 equal logits", lambda: z_of(np.zeros((8, 8))), 4.3240771),
    ("z beside padding", z_beside_padding, 5.4791244),  # 3.7004685
    # 7.31, 14.62, 2.19, 2.92, 3.66: what is dropped passed on
    ("layer", layer_with_an_expert_of_ten, [7.3105858, 14.6211716, 0, 0, 0]),
    ("gate and its slopes", gate_and_slopes, [0.7310586, 0.1966119, -0.1966119]),  # 1, 0
    ("kept", kept_of_a_full_queue, 6),  # 8
    ("norm, clip factor", norm_and_clip_factor, [10.954451, 0.0912871]),  # 7.236068, 0.1381966
    ("ce of 2 devices", lambda: ce_of_a_step("data=2", 1, [(5, 1.0), (1, 7.0)]), 2.0),  # 4
    ("ce of 2 micro-batches", lambda: ce_of_a_step("single", 2, [(30, 2.0), (10, 6.0)]), 3.0),  # 4
    ("best", lambda: routing_of([[256.0, 256.5, 257.0]]).expert_GTQ[0, 0, 0], 2),  # 0
    *(
        (f"mask of {E} experts", lambda E=E: mask_of_all_slots(E, groups=1), 160)
        for E in (8, 64, 1024)
    ),
    ("mask of 8 groups", lambda: mask_of_all_slots(8, groups=8), 20),
]


@pytest.mark.parametrize(
    ("compute", "right"), [row[1:] for row in GOLDEN], ids=[r[0] for r in GOLDEN]
)
def test_golden_number(compute, right):
    """Cases 3, 4, 11, 15, 16, 17, 27, 29, 31 and 42."""
    np.testing.assert_allclose(compute(), right, rtol=1e-6)


@pytest.mark.parametrize("num_experts", [8, 64])
def test_a_layer_makes_no_mask_of_all_slots(num_experts):
    """Case 42: 8192 tokens of one group; the whole layer needs less than an eighth of the mask."""
    config = ModelConfig(d_model=2, d_ff=2, num_experts=num_experts, jitter=0.0)

    def loss(layer, x_BLD):
        y_BLD, stats = in_training(layer, x_BLD)
        return y_BLD.sum() + stats.balance

    with jax.set_mesh(builders.mesh("single")):
        layer = jax.jit(lambda: SwitchLayer(jax.random.key(0), config, Layout()))()
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
        program = gradient.lower(layer, jnp.zeros((1, 8192, 2))).compile()
    used = program.memory_analysis().temp_size_in_bytes
    assert 0 < used < mask_of_all_slots(num_experts, groups=1) * MIB / 8
