"""The table for the tokens going in, and that or another one for the logits coming out."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.nn.init import weight
from switchjax.zero import in_use


class Embedding(nnx.Module):
    """T5's tied embedding: unscaled on the way in, times d_model^-0.5 on the way out.

    Untied, as in T5 v1.1, logits come from a second table and are not scaled.

    Source: mesh_tensorflow/transformer/transformer.py, shared_embedding_and_softmax_weights.
    """

    def __init__(self, key: Array, config: ModelConfig, layout: Layout):
        shape = (config.vocab_size, config.d_model)
        stored = partial(weight, dtype=config.param_dtype)
        self.embed_VD = stored(key, shape, variance=1.0, held=layout.embed_vd)
        # The key's own bits are the first table's, whether there is a second one or not.
        logits_key, variance = jax.random.fold_in(key, 1), config.init_scale / config.d_model
        self.logits_VD = (
            None
            if config.tied_embeddings
            else stored(logits_key, shape, variance=variance, held=layout.embed_vd)
        )
        self.layout = layout

    def embed(self, tokens_BL: Int[Array, "B L"], dtype: str) -> Float[Array, "B L D"]:
        embed_VD = in_use(self.embed_VD, dtype, self.layout)
        return embed_VD.at[tokens_BL].get(out_sharding=self.layout.tokens_bld)

    def logits(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L V"]:
        """Float32 whatever the dtype of x."""
        table_VD = self.logits_VD
        if table_VD is None:
            table_VD = self.embed_VD
            x_BLD = x_BLD * x_BLD.shape[-1] ** -0.5
        return jnp.einsum(
            "bld,vd->blv",
            x_BLD,
            in_use(table_VD, x_BLD.dtype, self.layout),
            out_sharding=self.layout.logits_blv,
            preferred_element_type=jnp.float32,
        )
