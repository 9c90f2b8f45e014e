"""What conversions are told. Knows nothing of JAX, so that the command line answers at once."""

import math
from dataclasses import dataclass
from typing import Literal

from switchjax.config import require, require_positive


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


@dataclass(frozen=True, kw_only=True)
class UpcycleConfig:
    """A dense model's weights as those of a Switch Transformer, to be trained with --init-from."""

    dense: str
    """Run or weights directory of a dense model (model.moe_every 0)."""
    out: str
    """Directory to write."""
    step: int | None = None
    """Which checkpoint of a run; None = the newest."""
    num_experts: int = 8
    """Experts of a Switch layer."""
    moe_every: int = 2
    """Every n-th feed-forward layer becomes a Switch layer."""
    noise: float = 0.0
    """Noise added to each expert's weights, over their standard deviation; 0 = exact copies, that
    differ once their tokens do."""
    output_scale: float = 1.0
    """Factor on what experts give. With top_k 1 a Switch layer starts as output_scale * p times the
    dense one, where the chosen expert's probability p is close to 1 / num_experts."""
    seed: int = 0
    """Of the routers and the noise."""

    def __post_init__(self) -> None:
        require_positive("upcycle", self, "num_experts", "moe_every", "output_scale")
        require(0 <= self.noise < math.inf, f"upcycle.noise must be 0 or more, got {self.noise}")
        require(self.seed >= 0, f"upcycle.seed must be 0 or more, got {self.seed}")
        if self.step is not None:
            require_positive("upcycle", self, "step")
