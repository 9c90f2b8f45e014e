"""Which tensor of Hugging Face's T5 and Switch Transformers fills which part of which array here.

Pure names and shapes: knows nothing of files. A linear layer of theirs is stored [out, in], and
here [in..., out...] with its heads as dims of their own. Their blocks are numbered, here equal
blocks are stacked along the dim of periods; their experts are tensors of their own.

Source: transformers 5.24, models/t5 and models/switch_transformers.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from switchjax.config import ModelConfig

Family = Literal["t5", "switch_transformers"]


class Tensor(NamedTuple):
    """One of their tensors, and where it belongs."""

    name: str
    index: tuple[int, ...]  # of the part that it fills: on the leading dims of the array here
    part: tuple[int, ...]  # shape of that part
    inputs: int  # dims of the part that are the input of a linear layer; 0: stored as it is here

    @property
    def shape(self) -> tuple[int, ...]:
        """Their own."""
        if self.inputs == 0:
            return self.part
        return (math.prod(self.part[self.inputs :]), math.prod(self.part[: self.inputs]))


# By the name here: theirs, and the number of input dims.
_OF_THE_MODEL = {
    "embedding.embed_VD": ("shared.weight", 0),
    "embedding.logits_VD": ("lm_head.weight", 0),
}
_OF_A_STACK = {
    "norm.norm_D": ("final_layer_norm.weight", 0),
    "relative_bias.relative_UH": (
        "block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        0,
    ),
}
_OF_A_BLOCK = {
    "attention_norm.norm_D": ("layer.0.layer_norm.weight", 0),
    "attention.w_q_DHK": ("layer.0.SelfAttention.q.weight", 1),
    "attention.w_k_DHK": ("layer.0.SelfAttention.k.weight", 1),
    "attention.w_v_DHK": ("layer.0.SelfAttention.v.weight", 1),
    "attention.w_o_HKD": ("layer.0.SelfAttention.o.weight", 2),
    "cross_norm.norm_D": ("layer.1.layer_norm.weight", 0),
    "cross_attention.w_q_DHK": ("layer.1.EncDecAttention.q.weight", 1),
    "cross_attention.w_k_DHK": ("layer.1.EncDecAttention.k.weight", 1),
    "cross_attention.w_v_DHK": ("layer.1.EncDecAttention.v.weight", 1),
    "cross_attention.w_o_HKD": ("layer.1.EncDecAttention.o.weight", 2),
    # The feed-forward layer comes second in an encoder and third in a decoder.
    "ff_norm.norm_D": ("layer.{ff}.layer_norm.weight", 0),
    "mlp.w_in_DF": ("layer.{ff}.{mlp}.{w_in}.weight", 1),
    "mlp.w_gate_DF": ("layer.{ff}.{mlp}.wi_0.weight", 1),
    "mlp.w_out_FD": ("layer.{ff}.{mlp}.wo.weight", 1),
    "switch.router_DE": ("layer.{ff}.mlp.router.classifier.weight", 1),
    "switch.experts.w_in_EDF": ("layer.{ff}.mlp.experts.expert_{e}.{w_in}.weight", 1),
    "switch.experts.w_gate_EDF": ("layer.{ff}.mlp.experts.expert_{e}.wi_0.weight", 1),
    "switch.experts.w_out_EFD": ("layer.{ff}.mlp.experts.expert_{e}.wo.weight", 1),
}
_BLOCKS = "periods.blocks."


def tensors_of(
    name: str, shape: tuple[int, ...], model: ModelConfig, family: Family
) -> Iterator[Tensor]:
    """The tensors that fill an array of the model, in the C order of their parts."""
    if name in _OF_THE_MODEL:
        theirs, inputs = _OF_THE_MODEL[name]
        yield Tensor(theirs, (), shape, inputs)
        return
    stack, _, rest = name.partition(".")
    if rest in _OF_A_STACK:
        theirs, inputs = _OF_A_STACK[rest]
        yield Tensor(f"{stack}.{theirs}", (), shape, inputs)
        return
    place, _, part = rest.removeprefix(_BLOCKS).partition(".")
    theirs, inputs = _OF_A_BLOCK[part]
    words = {
        "ff": 1 if stack == "encoder" else 2,
        "mlp": "DenseReluDense" if family == "t5" else "mlp",
        "w_in": "wi_1" if model.activation == "geglu" else "wi",
    }
    leading = 2 if "{e}" in theirs else 1
    for index in np.ndindex(shape[:leading]):
        block = index[0] * max(model.moe_every, 1) + int(place)
        numbered = theirs.format(**words, e=index[-1])
        yield Tensor(f"{stack}.block.{block}.{numbered}", index, shape[leading:], inputs)


def to_ours(tensor: Tensor, values: np.ndarray) -> np.ndarray:
    """The part of the array here."""
    return values.T.reshape(tensor.part) if tensor.inputs else values


def to_theirs(tensor: Tensor, part: np.ndarray) -> np.ndarray:
    """The tensor [out, in], or as it is here."""
    return part.reshape(tensor.shape[::-1]).T if tensor.inputs else part


def tied_copies(model: ModelConfig) -> list[str]:
    """Tensors that a file may have besides, equal to `shared.weight`."""
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return [*names, "lm_head.weight"] if model.tied_embeddings else names


# The first releases of T5 have it, and no implementation reads it.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
