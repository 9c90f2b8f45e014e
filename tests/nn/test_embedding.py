"""One table: unscaled on the way in, times d_model^-0.5 on the way out."""

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
TOKENS_BL = RNG.integers(0, 24, (8, 5)).astype(np.int32)
X_BLD = RNG.standard_normal((8, 5, 16)).astype(np.float32)


def embedding():
    module = jax.eval_shape(lambda: Embedding(jax.random.key(0), CONFIG, LAYOUT))
    module.embed_VD = nnx.Param(put(TABLE_VD, LAYOUT.embed_vd))
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


def test_logits_are_float32_in_a_bfloat16_model():
    with use("single"):
        module = embedding()
        x_BLD = put(X_BLD.astype(jnp.bfloat16), LAYOUT.tokens_bld)
        logits_BLV = module.logits(x_BLD)
        embedded_BLD = module.embed(put(TOKENS_BL, LAYOUT.tokens_bl), "bfloat16")
    assert (logits_BLV.dtype, embedded_BLD.dtype) == (jnp.float32, jnp.bfloat16)
    exact = np.asarray(x_BLD, np.float64) @ TABLE_VD.astype(jnp.bfloat16).astype(np.float64).T / 4
    np.testing.assert_allclose(np.asarray(logits_BLV), exact, **VALUES)
