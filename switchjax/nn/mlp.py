"""The dense feed-forward layer, its hidden dim over the model axis."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.nn.activation import gated_gelu
from switchjax.nn.init import weight
from switchjax.nn.noise import Noise, dropout
from switchjax.zero import in_use


class Mlp(nnx.Module):
    """relu(x·w_in)·w_out, or (gelu(x·w_gate) * x·w_in)·w_out.

    Source: T5, arXiv:1910.10683, section 2.1; GLU variants, arXiv:2002.05202, eq. 6.
    """

    def __init__(self, key: Array, config: ModelConfig, layout: Layout):
        D, F = config.d_model, config.d_ff
        keys = jax.random.split(key, 3)
        by_input = config.init_scale / D
        stored = partial(weight, dtype=config.param_dtype)
        self.w_in_DF = stored(keys[0], (D, F), variance=by_input, held=layout.w_in_df)
        self.w_out_FD = stored(
            keys[1], (F, D), variance=config.init_scale / F, held=layout.w_out_fd
        )
        self.w_gate_DF = (
            stored(keys[2], (D, F), variance=by_input, held=layout.w_in_df)
            if config.activation == "geglu"
            else None
        )
        self.rate = config.dropout
        self.layout = layout

    def __call__(self, x_BLD: Float[Array, "B L D"], noise: Noise | None) -> Float[Array, "B L D"]:
        h_BLF = self._project(x_BLD, self.w_in_DF)
        if self.w_gate_DF is None:
            h_BLF = jax.nn.relu(h_BLF)
        else:
            h_BLF = gated_gelu(h_BLF, self._project(x_BLD, self.w_gate_DF))
        h_BLF = dropout(h_BLF, self.rate, noise)
        w_out_FD = in_use(self.w_out_FD, x_BLD.dtype, self.layout)
        return jnp.einsum("blf,fd->bld", h_BLF, w_out_FD, out_sharding=self.layout.tokens_bld)

    def _project(self, x_BLD: Float[Array, "B L D"], w_DF: nnx.Param) -> Float[Array, "B L F"]:
        w = in_use(w_DF, x_BLD.dtype, self.layout)
        return jnp.einsum("bld,df->blf", x_BLD, w, out_sharding=self.layout.hidden_blf)
