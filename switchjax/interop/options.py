"""What a conversion is told. Knows nothing of JAX, so that the command line answers at once."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class FromHuggingFace:
    """Weights of Hugging Face's Switch Transformers or T5, for this program."""

    directory: str
    """Directory with config.json and model.safetensors, or model.safetensors.index.json."""
    out: str
    """Directory to make; train with --init-from, evaluate and generate with it."""
    hf_semantics: bool = False
    """Keep the fixed number of slots an expert has in each row, and padding that takes them, as
    transformers computes; without it padding takes none, and evaluation drops nothing."""


@dataclass(frozen=True, kw_only=True)
class ToHuggingFace:
    """Weights of a run, or of a converted directory, for Hugging Face's transformers."""

    directory: str
    """Directory of the run, or of converted weights."""
    out: str
    """Directory to make."""
    step: int | None = None
    """Which checkpoint of a run; None = the newest."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the tensors; in float32 nothing is rounded."""
