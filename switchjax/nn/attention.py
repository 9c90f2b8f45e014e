"""Multi-head attention, heads over the model axis. Knows nothing of where its mask comes from."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.nn.activation import attention_weights
from switchjax.nn.init import weight
from switchjax.nn.position import rotate
from switchjax.zero import in_use


class KeyValues(NamedTuple):
    """What attention looks at: the keys and values of S tokens, keys turned by their positions."""

    k_BSHK: Array
    v_BSHK: Array


def visible(
    query_segment_BL: Int[Array, "B L"],
    key_segment_BS: Int[Array, "B S"],
    *,
    causal: bool,
    padding_sees_real: bool = False,
    start: int | Int[Array, ""] = 0,
) -> Bool[Array, "B L S"]:
    """Which keys each query may look at: those of its own segment, and not later ones if causal.

    Args:
        padding_sees_real: padded queries look at all that is not padding; real ones as ever.
        start: the place of the first query among the keys.
    """
    same_BLS = query_segment_BL[:, :, None] == key_segment_BS[:, None, :]
    if padding_sees_real:
        padded_BL1, real_B1S = query_segment_BL[:, :, None] == 0, key_segment_BS[:, None, :] > 0
        same_BLS = jnp.where(padded_BL1, real_B1S, same_BLS)
    if causal:
        query_L, key_S = (jnp.arange(x.shape[1]) for x in (query_segment_BL, key_segment_BS))
        same_BLS &= (key_S[None, :] <= start + query_L[:, None])[None]
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
        stored = partial(weight, dtype=config.param_dtype)
        self.w_q_DHK = stored(keys[0], (D, H, K), variance=by_input / K, held=layout.w_q_dhk)
        self.w_k_DHK = stored(keys[1], (D, H, K), variance=by_input, held=layout.w_q_dhk)
        self.w_v_DHK = stored(keys[2], (D, H, K), variance=by_input, held=layout.w_q_dhk)
        self.w_o_HKD = stored(keys[3], (H, K, D), variance=by_heads, held=layout.w_o_hkd)
        self.layout = layout

    def keys_values(
        self, context_BSD: Float[Array, "B S D"], position_BS: Int[Array, "B S"] | None = None
    ) -> KeyValues:
        """Of tokens to look at: in self-attention those that look.

        Args:
            position_BS: turns the keys by their positions; for self-attention only.
        """
        k_BSHK = self._project(context_BSD, self.w_k_DHK)
        v_BSHK = self._project(context_BSD, self.w_v_DHK)
        return KeyValues(k_BSHK if position_BS is None else rotate(k_BSHK, position_BS), v_BSHK)

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        seen: KeyValues,
        visible_BLS: Bool[Array, "B L S"],
        *,
        bias_HLS: Float[Array, "H L S"] | None = None,
        position_BL: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L D"]:
        """What each position of x takes from the tokens that it sees.

        Args:
            bias_HLS: added to the scores.
            position_BL: turns the queries by their positions.
        """
        q_BLHK = self._project(x_BLD, self.w_q_DHK)
        if position_BL is not None:
            q_BLHK = rotate(q_BLHK, position_BL)
        scores_BHLS = jnp.einsum(
            "blhk,bshk->bhls", q_BLHK, seen.k_BSHK, preferred_element_type=jnp.float32
        )
        if bias_HLS is not None:
            scores_BHLS += bias_HLS[None]
        weights_BHLS = attention_weights(scores_BHLS, visible_BLS, x_BLD.dtype)
        mixed_BLHK = jnp.einsum("bhls,bshk->blhk", weights_BHLS, seen.v_BSHK)
        w_o_HKD = in_use(self.w_o_HKD, x_BLD.dtype, self.layout)
        return jnp.einsum("blhk,hkd->bld", mixed_BLHK, w_o_HKD, out_sharding=self.layout.tokens_bld)

    def _project(self, x_BLD: Float[Array, "B L D"], w_DHK: nnx.Param) -> Float[Array, "B L H K"]:
        w = in_use(w_DHK, x_BLD.dtype, self.layout)
        return jnp.einsum("bld,dhk->blhk", x_BLD, w, out_sharding=self.layout.heads_blhk)
