"""Multi-head attention, heads over the model axis. Knows nothing of where its mask comes from."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.nn.init import weight
from switchjax.nn.position import rotate


def visible(
    query_segment_BL: Int[Array, "B L"],
    key_segment_BS: Int[Array, "B S"],
    *,
    causal: bool,
    padding_sees_real: bool = False,
) -> Bool[Array, "B L S"]:
    """Which keys each query may look at: those of its own segment, and not later ones if causal.

    Args:
        padding_sees_real: padded queries look at all that is not padding; real ones as ever.
    """
    same_BLS = query_segment_BL[:, :, None] == key_segment_BS[:, None, :]
    if padding_sees_real:
        padded_BL1, real_B1S = query_segment_BL[:, :, None] == 0, key_segment_BS[:, None, :] > 0
        same_BLS = jnp.where(padded_BL1, real_B1S, same_BLS)
    if causal:
        length = query_segment_BL.shape[1]
        same_BLS &= jnp.tril(jnp.ones((length, length), bool))[None]
    return same_BLS


class Attention(nnx.Module):
    """Attention without biases and without 1/sqrt(K): T5 puts that factor into the initialiser.

    Source: T5, arXiv:1910.10683, section 2.1; mesh_tensorflow/transformer/attention.py.
    """

    def __init__(self, key: Array, config: ModelConfig, layout: Layout):
        D, H, K = config.d_model, config.num_heads, config.d_kv
        keys = jax.random.split(key, 4)
        by_input = config.init_scale / D
        by_heads = config.init_scale / (H * K)
        self.w_q_DHK = weight(keys[0], (D, H, K), variance=by_input / K, spec=layout.w_q_dhk)
        self.w_k_DHK = weight(keys[1], (D, H, K), variance=by_input, spec=layout.w_q_dhk)
        self.w_v_DHK = weight(keys[2], (D, H, K), variance=by_input, spec=layout.w_q_dhk)
        self.w_o_HKD = weight(keys[3], (H, K, D), variance=by_heads, spec=layout.w_o_hkd)
        self.layout = layout

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        context_BSD: Float[Array, "B S D"],
        visible_BLS: Bool[Array, "B L S"],
        *,
        bias_HLS: Float[Array, "H L S"] | None = None,
        position_BL: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L D"]:
        """What each position of x takes from the context (x itself in self-attention).

        Args:
            bias_HLS: added to the scores.
            position_BL: turns queries and keys by their positions; for self-attention only.
        """
        q_BLHK = self._project(x_BLD, self.w_q_DHK)
        k_BSHK = self._project(context_BSD, self.w_k_DHK)
        v_BSHK = self._project(context_BSD, self.w_v_DHK)
        if position_BL is not None:
            q_BLHK, k_BSHK = rotate(q_BLHK, position_BL), rotate(k_BSHK, position_BL)
        scores_BHLS = jnp.einsum(
            "blhk,bshk->bhls", q_BLHK, k_BSHK, preferred_element_type=jnp.float32
        )
        if bias_HLS is not None:
            scores_BHLS += bias_HLS[None]
        # Finite: a padded query sees nothing, and its row must stay free of NaN.
        masked_BHLS = jnp.where(visible_BLS[:, None], scores_BHLS, jnp.finfo(jnp.float32).min)
        weights_BHLS = jax.nn.softmax(masked_BHLS, axis=-1).astype(x_BLD.dtype)
        mixed_BLHK = jnp.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK)
        w_o_HKD = self.w_o_HKD[...].astype(x_BLD.dtype)
        return jnp.einsum("blhk,hkd->bld", mixed_BLHK, w_o_HKD, out_sharding=self.layout.tokens_bld)

    def _project(self, x_BLD: Float[Array, "B L D"], w_DHK: nnx.Param) -> Float[Array, "B L H K"]:
        w = w_DHK[...].astype(x_BLD.dtype)
        return jnp.einsum("bld,dhk->blhk", x_BLD, w, out_sharding=self.layout.heads_blhk)
