"""Attention to what was kept of earlier tokens is attention to those tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_meshes import LAYOUT, VALUES, put, use

from switchjax.config import ModelConfig
from switchjax.nn import cache as caches
from switchjax.nn.attention import Attention, visible
from switchjax.nn.position import RelativeBias

CONFIG = ModelConfig(d_model=16, num_heads=8, d_kv=2, init_scale=1.0)
LENGTH, SLOTS = 6, 9


def whole_and_in_parts(x_BLD, segment_BL, *, rotary, parts):
    """Attention of all positions at once, and part by part over slots that fill up."""
    attention = Attention(jax.random.key(0), CONFIG, LAYOUT)
    strong = replace(CONFIG, init_scale=16.0)
    bias = RelativeBias(jax.random.key(1), strong, LAYOUT, bidirectional=False)
    position_BL = jnp.arange(LENGTH)[None] + jnp.zeros_like(segment_BL) if rotary else None
    whole_BLD = attention(
        x_BLD,
        attention.keys_values(x_BLD, position_BL),
        visible(segment_BL, segment_BL, causal=True),
        bias_HLS=None if rotary else bias(LENGTH),
        position_BL=position_BL,
    )
    shape = (1, len(x_BLD), SLOTS, CONFIG.num_heads, CONFIG.d_kv)
    kept = jax.tree.map(lambda x: x[0], caches.empty(shape, "float32", LAYOUT))
    segment_BS = jnp.pad(segment_BL, ((0, 0), (0, SLOTS - LENGTH)))
    outputs = []
    for begin, end in zip(parts, parts[1:], strict=False):
        slot, part = jnp.int32(begin), slice(begin, end)
        position = None if position_BL is None else position_BL[:, part]
        kept = caches.written(kept, attention.keys_values(x_BLD[:, part], position), slot)
        outputs.append(
            attention(
                x_BLD[:, part],
                kept,
                visible(segment_BL[:, part], segment_BS, causal=True, start=slot),
                bias_HLS=None if rotary else bias(end - begin, SLOTS, slot),
                position_BL=position,
            )
        )
    return whole_BLD, jnp.concatenate(outputs, axis=1)


@pytest.mark.parametrize("mesh", ["single", "data2_expert2_model2"])
@pytest.mark.parametrize("rotary", [False, True])
def test_in_parts_as_at_once(mesh, rotary):
    """A prompt of 3 tokens, then one by one; the last row's prompt is one token, behind a gap."""
    x_BLD = np.random.default_rng(0).standard_normal((8, LENGTH, 16)).astype(np.float32)
    segment_BL = np.ones((8, LENGTH), np.int32)
    segment_BL[-1, 1:3] = 0
    with use(mesh):
        whole_BLD, parts_BLD = jax.jit(
            lambda x_BLD, segment_BL: whole_and_in_parts(
                x_BLD, segment_BL, rotary=rotary, parts=(0, 3, 4, 5, 6)
            )
        )(put(x_BLD, LAYOUT.tokens_bld), put(segment_BL, LAYOUT.tokens_bl))
    real_BL = segment_BL > 0
    np.testing.assert_allclose(
        np.asarray(parts_BLD)[real_BL], np.asarray(whole_BLD)[real_BL], **VALUES
    )


def test_writing_leaves_the_other_slots_alone():
    with use("single"):
        kept = caches.empty((2, 1, SLOTS, 2, 3), "float32", LAYOUT)
        new = jax.tree.map(lambda x: jnp.ones_like(x[:, :, :2]), kept)
        written = caches.written(kept, new, jnp.int32(4))
    for array in written:
        slots_S = np.asarray(array).mean(axis=(0, 1, 3, 4))
        assert slots_S.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0]


def test_bias_of_some_queries_is_a_part_of_the_whole():
    with use("single"):
        bias = RelativeBias(jax.random.key(0), CONFIG, LAYOUT, bidirectional=True)
        whole_HLL, part_HLS = bias(20), bias(3, 20, jnp.int32(7))
    np.testing.assert_array_equal(part_HLS, whole_HLL[:, 7:10])
