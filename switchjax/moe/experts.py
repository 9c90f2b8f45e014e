"""The experts' weights and what they compute. Knows nothing of tokens' origins or of routing."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.moe.dispatch.interface import Tokens
from switchjax.moe.grouped import grouped_ffn, run_starts
from switchjax.nn.activation import gated_gelu, relu_dropout
from switchjax.nn.init import weight
from switchjax.remat import ARRIVED, PRODUCT, named, recomputed


class Experts(nnx.Module):
    """One feed-forward layer an expert; fan-in does not count the expert dim."""

    def __init__(self, key: Array, config: ModelConfig, layout: Layout):
        E, D, F = config.num_experts, config.d_model, config.d_ff
        keys = jax.random.split(key, 3)
        by_input = config.init_scale / D
        stored = partial(weight, dtype=config.param_dtype)
        self.w_in_EDF = stored(keys[0], (E, D, F), variance=by_input, held=layout.w_in_edf)
        self.w_out_EFD = stored(
            keys[1], (E, F, D), variance=config.init_scale / F, held=layout.w_out_efd
        )
        self.w_gate_EDF = (
            stored(keys[2], (E, D, F), variance=by_input, held=layout.w_in_edf)
            if config.activation == "geglu"
            else None
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("key", "expert_e", "start"),
    meta_fields=("rate", "d_ff"),
)
@dataclass(frozen=True, kw_only=True)
class Dropout:
    """On hidden activations, keyed by token and expert, so that it moves with no buffer.

    Every device draws the whole hidden dim and keeps its slice, so that the numbers do not depend
    on how the dim is split.
    """

    rate: float
    key: Array
    expert_e: Array  # the logical number of each expert here
    d_ff: int
    start: Array  # of my slice of the hidden dim

    def factor(self, place: Array, expert: Array, width: int) -> Array:
        """0 or 1 / (1 - rate) for `width` activations of each row [..., width].

        Args:
            place: the row's token: its row in the whole batch and position in it, int32 [..., 2].
            expert: index into the experts here [...].
        """

        def of_row(row: Array, position: Array, expert: Array) -> Array:
            key = self.key
            for number in (row, position, expert):
                key = jax.random.fold_in(key, number)
            uniform_F = jax.random.uniform(key, (self.d_ff,))
            return lax.dynamic_slice_in_dim(uniform_F, self.start, width)

        of_rows = jnp.vectorize(of_row, signature="(),(),()->(f)")
        uniform = of_rows(place[..., 0], place[..., 1], self.expert_e[expert])
        return jnp.where(uniform >= self.rate, 1 / (1 - self.rate), 0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("w_in_eDf", "w_gate_eDf", "w_out_efD", "dropout"),
    meta_fields=("keeps_hidden",),
)
@dataclass(frozen=True, kw_only=True)
class ExpertsHere:
    """This device's experts, or its slice of their hidden dim, as dispatchers call them."""

    w_in_eDf: Float[Array, "e D f"]
    w_gate_eDf: Float[Array, "e D f"] | None
    w_out_efD: Float[Array, "e f D"]
    dropout: Dropout | None
    keeps_hidden: bool
    """Hidden activations for the backward pass, which else computes them again."""

    def on_slots(self, tokens: Tokens) -> Float[Array, "e R D"]:
        """Outputs for R slots of each expert [e, R, D]; a slice's part, where it has a slice."""
        tokens = tokens._replace(x=named(ARRIVED, tokens.x))
        compute = _on_slots if self.keeps_hidden else recomputed(_on_slots)
        return compute(self, tokens)

    def on_runs(self, tokens: Tokens, sizes_e: Int[Array, "e"], block: int) -> Float[Array, "N D"]:
        """Outputs for rows sorted by expert [N, D], as `grouped.grouped_ffn` has them."""
        tokens = tokens._replace(x=named(ARRIVED, tokens.x))
        compute = partial(_on_runs, block)
        compute = compute if self.keeps_hidden else recomputed(compute)
        return compute(self, tokens, sizes_e)


def _on_slots(experts: ExpertsHere, tokens: Tokens) -> Array:
    def product(w_eDf: Array) -> Array:
        return named(PRODUCT, jnp.einsum("erd,edf->erf", tokens.x, w_eDf))

    h_eRf, factor_eRf, rate = product(experts.w_in_eDf), None, 0.0
    if experts.dropout is not None and tokens.place is not None:
        (e, _, f), rate = h_eRf.shape, experts.dropout.rate
        factor_eRf = experts.dropout.factor(tokens.place, jnp.arange(e)[:, None], f)
        factor_eRf = factor_eRf.astype(h_eRf.dtype)
    if experts.w_gate_eDf is None:
        h_eRf = relu_dropout(h_eRf, factor_eRf, rate)
    else:
        h_eRf = gated_gelu(h_eRf, product(experts.w_gate_eDf))
        h_eRf = h_eRf if factor_eRf is None else h_eRf * factor_eRf
    return jnp.einsum("erf,efd->erd", h_eRf, experts.w_out_efD)


def _on_runs(block: int, experts: ExpertsHere, tokens: Tokens, sizes_e: Array) -> Array:
    factor_Nf = None
    if experts.dropout is not None and tokens.place is not None:
        N, f = tokens.x.shape[0], experts.w_in_eDf.shape[-1]
        start_e = run_starts(sizes_e, block)
        expert_N = jnp.searchsorted(start_e, jnp.arange(N), side="right") - 1
        factor_Nf = experts.dropout.factor(tokens.place, expert_N, f).astype(tokens.x.dtype)
    weights = experts.w_in_eDf, experts.w_gate_eDf, experts.w_out_efD
    return grouped_ffn(tokens.x, sizes_e, *weights, factor_Nf, block)
