"""What generation is asked for, checked when built. Knows nothing of JAX or devices.

The command line is typed from this class, and a docstring under a field is its help text.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from switchjax.config import Dispatcher
from switchjax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Continuations of prompts by a trained model.

    An encoder-decoder is pre-trained on span corruption: give it text with the gaps that it shall
    fill, written <extra_id_0>, <extra_id_1>, ...; it answers with each gap's name and text, and
    knows of no other task, such as translation. A decoder-only model goes on with plain text.
    """

    checkpoint: str
    """Directory of a run, or of weights."""
    prompt: tuple[str, ...]
    """Text to continue; give the option again for more."""
    step: int | None = None
    """Which checkpoint of a run; None = the newest."""
    tokenizer: str | None = None
    """"bytes", or the path of a SentencePiece model file; None = that of the run or the weights."""
    max_new_tokens: int = 64
    """Tokens of a continuation at most, its end included."""
    prompt_length: int | None = None
    """Tokens that a prompt has room for, what starts or ends it included; None = as many as a row
    of training. One program serves all prompts that fit."""
    temperature: float = 0.0
    """Divides the logits before a token is drawn; 0 = no draw, the likeliest token each time."""
    top_k: int | None = None
    """Draw among so many likeliest tokens; None = among all."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens that have this probability together, of those that
    top_k leaves; None = among all."""
    beams: int = 1
    """Continuations of each prompt that are followed at once; the best one is printed."""
    length_penalty: float = 0.6
    """Of several beams: the logarithm of a continuation's probability is divided by
    ((5 + its tokens) / 6) to this power before they are compared (GNMT, arXiv:1609.08144; T5's)."""
    seed: int = 0
    """Of what is drawn."""
    mesh: str | None = None
    """Mesh to generate on; None = the one that the run was trained on."""
    dispatcher: Dispatcher | None = None
    """How tokens reach their experts; None = ragged, which has no empty slots, unless the run's or
    this command line has another or the encoder's experts choose. Nothing drops in any way."""
    devices: int | None = None
    """CPU devices to simulate; None = as many as the mesh needs."""

    def __post_init__(self) -> None:
        for holds, rule in self._rules():
            if not holds:
                raise UserError(f"generate.{rule}")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """What must hold, and how it is said."""
        yield bool(self.prompt), "prompt: there is nothing to continue"
        for name in ("step", "max_new_tokens", "prompt_length", "top_k", "beams", "devices"):
            value = getattr(self, name)
            yield value is None or value > 0, f"{name} must be positive, got {value}"
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            yield 0 <= value < math.inf, f"{name} must be 0 or more, and finite, got {value}"
        top_p = self.top_p
        yield (
            top_p is None or 0 < top_p <= 1,
            f"top_p must be above 0 and at most 1, got {top_p}",
        )
        for name in ("top_k", "top_p"):
            value = getattr(self, name)
            yield (
                value is None or self.temperature > 0,
                f"{name} {value} needs a temperature above 0: at 0 nothing is drawn",
            )
        yield (
            self.beams == 1 or self.temperature == 0,
            f"beams {self.beams} with temperature {self.temperature}: beam search draws nothing, "
            "so leave one of them out",
        )
        yield 0 <= self.seed < 2**32, f"seed must be 0 or more and below 2**32, got {self.seed}"
