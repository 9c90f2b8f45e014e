"""The experts' weights and what they compute. Knows nothing of tokens' origins or of routing."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.nn.init import weight


class Experts(nnx.Module):
    """One feed-forward layer an expert; fan-in does not count the expert dim."""

    def __init__(self, key: Array, config: ModelConfig, layout: Layout):
        E, D, F = config.num_experts, config.d_model, config.d_ff
        keys = jax.random.split(key, 3)
        by_input = config.init_scale / D
        self.w_in_EDF = weight(keys[0], (E, D, F), variance=by_input, spec=layout.w_in_edf)
        self.w_out_EFD = weight(
            keys[1], (E, F, D), variance=config.init_scale / F, spec=layout.w_out_efd
        )
        self.w_gate_EDF = (
            weight(keys[2], (E, D, F), variance=by_input, spec=layout.w_in_edf)
            if config.activation == "geglu"
            else None
        )


def hidden(
    x_eRD: Float[Array, "e R D"],
    w_in_eDf: Float[Array, "e D f"],
    w_gate_eDf: Float[Array, "e D f"] | None,
) -> Float[Array, "e R f"]:
    """Activations of my slice of my experts' hidden dim."""
    h_eRf = jnp.einsum("erd,edf->erf", x_eRD, w_in_eDf)
    if w_gate_eDf is None:
        return jax.nn.relu(h_eRf)
    return h_eRf * jax.nn.gelu(jnp.einsum("erd,edf->erf", x_eRD, w_gate_eDf))


def output(h_eRf: Float[Array, "e R f"], w_out_efD: Float[Array, "e f D"]) -> Float[Array, "e R D"]:
    """My slice's part of the outputs: the sum over the model axis is the whole."""
    return jnp.einsum("erf,efd->erd", h_eRf, w_out_efD)
