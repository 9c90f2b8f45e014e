"""One table: unscaled on the way in, times d_model^-0.5 on the way out; or two, both unscaled."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_meshes import GRADIENTS, LAYOUT, NAMES, VALUES, put, use

from switchjax.config import ModelConfig
from switchjax.nn.embedding import Embedding

CONFIG = ModelConfig(vocab_size=24, d_model=16)
RNG = np.random.default_rng(0)
TABLE_VD = RNG.standard_normal((24, 16)).astype(np.float32)
OTHER_VD = RNG.standard_normal((24, 16)).astype(np.float32)
TOKENS_BL = RNG.integers(0, 24, (8, 5)).astype(np.int32)
X_BLD = RNG.standard_normal((8, 5, 16)).astype(np.float32)


def embedding(*, tied=True):
    config = replace(CONFIG, tied_embeddings=tied)
    module = jax.eval_shape(lambda: Embedding(jax.random.key(0), config, LAYOUT))
    module.embed_VD = nnx.Param(put(TABLE_VD, LAYOUT.embed_vd.spec))
    if not tied:
        module.logits_VD = nnx.Param(put(OTHER_VD, LAYOUT.embed_vd.spec))
    return module


@jax.jit
def both_ways(module, tokens_BL, x_BLD):
    def objective(module, x_BLD):
        embedded_BLD = module.embed(tokens_BL, "float32")
        logits_BLV = module.logits(x_BLD)
        return jnp.sin(embedded_BLD).sum() + jnp.sin(logits_BLV).sum(), (embedded_BLD, logits_BLV)

    return jax.grad(objective, argnums=(0, 1), has_aux=True)(module, x_BLD)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", NAMES)
def test_equals_numpy_on_every_mesh(mesh):
    with use(mesh):
        (dmodule, dx_BLD), (embedded_BLD, logits_BLV) = jax.device_get(
            both_ways(embedding(), put(TOKENS_BL, LAYOUT.tokens_bl), put(X_BLD, LAYOUT.tokens_bld))
        )
    logits = X_BLD.astype(np.float64) @ TABLE_VD.T / 4
    np.testing.assert_array_equal(embedded_BLD, TABLE_VD[TOKENS_BL])
    np.testing.assert_allclose(logits_BLV, logits, **VALUES)
    slope = np.cos(logits) / 4
    np.testing.assert_allclose(dx_BLD, slope @ TABLE_VD, **GRADIENTS)
    dtable = np.einsum("blv,bld->vd", slope, X_BLD)
    np.add.at(dtable, TOKENS_BL, np.cos(TABLE_VD[TOKENS_BL]))
    np.testing.assert_allclose(dmodule.embed_VD.get_value(), dtable, **GRADIENTS)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", NAMES)
def test_untied_logits_equal_numpy_on_every_mesh(mesh):
    """The second table is not scaled, and learns from the logits alone."""
    with use(mesh):
        (dmodule, dx_BLD), (embedded_BLD, logits_BLV) = jax.device_get(
            both_ways(
                embedding(tied=False),
                put(TOKENS_BL, LAYOUT.tokens_bl),
                put(X_BLD, LAYOUT.tokens_bld),
            )
        )
    logits = X_BLD.astype(np.float64) @ OTHER_VD.T
    np.testing.assert_array_equal(embedded_BLD, TABLE_VD[TOKENS_BL])
    np.testing.assert_allclose(logits_BLV, logits, **VALUES)
    slope = np.cos(logits)
    np.testing.assert_allclose(dx_BLD, slope @ OTHER_VD, **GRADIENTS)
    dother = np.einsum("blv,bld->vd", slope, X_BLD)
    np.testing.assert_allclose(dmodule.logits_VD.get_value(), dother, **GRADIENTS)
    dtable = np.zeros_like(TABLE_VD)
    np.add.at(dtable, TOKENS_BL, np.cos(TABLE_VD[TOKENS_BL]))
    np.testing.assert_allclose(dmodule.embed_VD.get_value(), dtable, **GRADIENTS)


def test_a_second_table_leaves_the_first_as_it_was():
    """A tied model of a seed starts from the same bits, whatever there is for untied ones."""
    with use("single"):
        tied, untied = (
            Embedding(jax.random.key(3), replace(CONFIG, tied_embeddings=tied), LAYOUT)
            for tied in (True, False)
        )
    np.testing.assert_array_equal(tied.embed_VD.get_value(), untied.embed_VD.get_value())
    assert tied.logits_VD is None
    assert np.std(untied.logits_VD.get_value()) == pytest.approx((0.1 / 16) ** 0.5, rel=0.1)


def test_logits_are_float32_in_a_bfloat16_model():
    with use("single"):
        module = embedding()
        x_BLD = put(X_BLD.astype(jnp.bfloat16), LAYOUT.tokens_bld)
        logits_BLV = module.logits(x_BLD)
        embedded_BLD = module.embed(put(TOKENS_BL, LAYOUT.tokens_bl), "bfloat16")
    assert (logits_BLV.dtype, embedded_BLD.dtype) == (jnp.float32, jnp.bfloat16)
    exact = np.asarray(x_BLD, np.float64) @ TABLE_VD.astype(jnp.bfloat16).astype(np.float64).T / 4
    np.testing.assert_allclose(np.asarray(logits_BLV), exact, **VALUES)
