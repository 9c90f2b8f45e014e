"""What a run is: frozen dataclasses, checked when built. Knows nothing of JAX or devices.

The command line is typed from these classes, and a docstring under a field is its help text.
Checks here concern one run's own numbers; whether they fit a mesh is `layout.check`'s question.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from switchjax.errors import UserError

Experts = Literal["separate", "folded"]
Dispatcher = Literal["all_to_all", "all_gather", "ragged", "local"]
Wire = Literal["compute", "bfloat16", "float8"]
ReduceDtype = Literal["compute", "float32", "bfloat16"]
Offload = Literal["none", "optimizer", "optimizer+activations"]
RouterKind = Literal["top_k", "expert_choice"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
ParamDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "moe", "dots", "full"]


def require(condition: bool, message: str) -> None:
    """Raises UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


def require_positive(section: str, config: object, *names: str) -> None:
    """Raises UserError unless these fields of a config are positive and finite."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name} must be positive, got {value}")
        require(value < math.inf, f"{section}.{name} must be finite, got {value}")


def _require_fraction(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0 <= value < 1, f"{section}.{name} must be at least 0 and below 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Switch Transformer, or with `moe_every` 0 its dense twin."""

    architecture: Literal["encoder_decoder", "decoder_only"] = "encoder_decoder"
    """T5's encoder-decoder with relative positions, or a decoder with rotary ones."""
    vocab_size: int = 384
    """Rows of the embedding; at least the tokenizer's size."""
    d_model: int = 128
    """Width of the residual stream."""
    d_ff: int = 512
    """Hidden width of a feed-forward layer and of one expert."""
    num_heads: int = 8
    """Attention heads."""
    d_kv: int = 16
    """Width of one head."""
    num_layers: int = 2
    """Layers of the encoder and of the decoder each."""
    activation: Literal["relu", "geglu"] = "relu"
    """Of feed-forward layers and experts; geglu has a third matrix as gate."""
    tied_embeddings: bool = True
    """One table for tokens and, times d_model^-0.5, for logits; off, logits have a table of their
    own, not scaled (T5 v1.1)."""
    moe_every: int = 2
    """Every n-th feed-forward layer is a Switch layer; 0 = none."""
    num_experts: int = 8
    """Experts of a Switch layer."""
    top_k: int = 1
    """Experts that a token asks for: 1 is Switch, 2 is GShard, at most all."""
    random_second: bool = False
    """In training, send the second of two choices with a probability of twice its gate, at most 1
    (GShard); at evaluation it is always sent."""
    encoder_router: RouterKind = "top_k"
    """Who chooses in the encoder: its tokens, as in the decoder, or each expert the tokens that
    suit it best (expert choice, arXiv:2202.09368), as many as it has slots for: a token has
    capacity_factor * top_k experts on average."""
    capacity_factor: float = 1.25
    """Slots of an expert over its fair share of the tokens, in training."""
    eval_capacity_factor: float | None = None
    """The same at evaluation; None = as many slots as tokens, so that nothing drops. Under expert
    choice None is the factor of training, since slots for all would give every expert all tokens:
    another function."""
    expert_capacity: int | None = None
    """Slots of an expert in a group, in training and at evaluation alike, in place of both
    factors; None = by the factors."""
    padding_is_routed: bool = False
    """As transformers has it: padding asks for experts and takes their slots, and attends to the
    real tokens of its row. It enters no loss and no metric all the same."""
    group_size: int | None = None
    """Tokens that compete for the same slots, padding places included; None = one row."""
    jitter: float = 1e-2
    """Training noise on the router's input: a factor drawn from [1 - jitter, 1 + jitter]."""
    dropout: float = 0.0
    """Share of activations zeroed in training."""
    expert_dropout: float | None = None
    """The same inside experts; None = as `dropout`."""
    init_scale: float = 0.1
    """Weights start with variance init_scale / fan_in (Switch Transformer, section 2.4)."""
    dtype: ComputeDtype = "float32"
    """Compute dtype; router, norms, softmax and losses stay float32. float16 needs
    `optim.loss_scale`."""
    param_dtype: ParamDtype = "float32"
    """Dtype of the weights of attention, feed-forward layers, experts and embeddings; router, norms
    and relative positions stay float32. With bfloat16 the optimizer works on float32 copies, which
    its state holds."""
    remat: Remat = "none"
    """What the backward pass computes again instead of keeping it: `moe`, hidden activations of
    experts; `dots`, of each period all but products with weights and what other devices sent;
    `full`, all of each period. Never the choice of experts."""
    scan: bool = True
    """Compile one period and loop over it; off, every layer is compiled apart."""

    def __post_init__(self) -> None:
        require_positive(
            "model", self, "vocab_size", "d_model", "d_ff", "num_heads", "d_kv", "num_layers"
        )
        require_positive("model", self, "num_experts", "top_k", "capacity_factor", "init_scale")
        _require_fraction("model", self, "jitter", "dropout")
        if self.expert_dropout is not None:
            _require_fraction("model", self, "expert_dropout")
        if self.eval_capacity_factor is not None:
            require_positive("model", self, "eval_capacity_factor")
        for name in ("group_size", "expert_capacity"):
            if getattr(self, name) is not None:
                require_positive("model", self, name)
        require(
            self.expert_capacity is None or self.eval_capacity_factor is None,
            f"model.expert_capacity {self.expert_capacity} holds at evaluation too: leave out "
            f"model.eval_capacity_factor {self.eval_capacity_factor}",
        )
        require(
            not self.padding_is_routed or self.encoder_router == "top_k",
            "model.padding_is_routed is for tokens that choose their experts: leave it out with "
            f"model.encoder_router {self.encoder_router}",
        )
        require(
            self.remat in get_args(Remat),
            f"model.remat must be one of {', '.join(get_args(Remat))}, got {self.remat!r}",
        )
        require(self.moe_every >= 0, f"model.moe_every must be 0 or more, got {self.moe_every}")
        require(
            self.num_layers % max(self.moe_every, 1) == 0,
            f"model.num_layers {self.num_layers} must be a multiple of "
            f"model.moe_every {self.moe_every}",
        )
        require(
            self.top_k <= self.num_experts,
            f"model.top_k must be at most model.num_experts {self.num_experts}, got {self.top_k}",
        )
        require(
            self.top_k == 2 or not self.random_second,
            f"model.random_second needs model.top_k 2, got {self.top_k}",
        )
        if self.architecture == "decoder_only":
            require(
                self.d_kv % 2 == 0,
                f"model.d_kv must be even for rotary positions, got {self.d_kv}",
            )
            require(
                self.encoder_router == "top_k",
                f"model.encoder_router {self.encoder_router} needs model.architecture "
                "encoder_decoder: in a decoder, experts would choose by looking at later tokens",
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, how it becomes tokens, and how tokens become examples."""

    files: tuple[str, ...] = ()
    """Globs of .txt, .jsonl and .gz files; none = documentation that Python itself carries."""
    json_field: str = "text"
    """Field of a .jsonl line that holds the text."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a SentencePiece model file."""
    batch_size: int = 32
    """Rows of one optimizer step, over all devices."""
    sequence_length: int = 256
    """Tokens of an encoder row (span corruption) or of a decoder-only row."""
    noise_density: float = 0.15
    """Share of the tokens that span corruption hides (T5)."""
    mean_span_length: float = 3.0
    """Mean length of a hidden span, in tokens (T5)."""
    holdout: float = 0.05
    """Share of the examples kept for evaluation."""

    def __post_init__(self) -> None:
        require_positive("data", self, "batch_size", "sequence_length")
        for name in ("noise_density", "holdout"):
            value = getattr(self, name)
            require(0 < value < 1, f"data.{name} must be between 0 and 1, got {value}")
        require(
            self.mean_span_length >= 1,
            f"data.mean_span_length must be 1 or more, got {self.mean_span_length}",
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How gradients become parameters, and what is minimised."""

    optimizer: Literal["adafactor", "adamw", "sgd"] = "adamw"
    """Update rule."""
    learning_rate: float = 3e-3
    """Peak; falls with the inverse square root of the step after warm-up. adafactor multiplies it
    by a parameter's own size, so its peak is some ten times that of adamw."""
    warmup_steps: int = 50
    """Optimizer steps until the fall begins; adamw and sgd rise linearly before it."""
    weight_decay: float = 0.0
    """Decoupled decay a step, times the learning rate; adamw only."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient; None = no clipping."""
    accumulation: int = 1
    """Micro-batches of one optimizer step."""
    loss_scale: Literal["dynamic"] | None = None
    """What the loss is multiplied by, so that small gradients survive float16: `dynamic`, as much
    as they bear without overflow. A step that overflows is skipped: its batch is gone, and all
    else stays as it was."""
    balance_coefficient: float = 1e-2
    """Weight of the load-balancing loss (Switch Transformer, eq. 4)."""
    z_coefficient: float = 1e-3
    """Weight of the router z-loss (ST-MoE, arXiv:2202.08906, eq. 5)."""
    bias_rate: float = 0.0
    """What each step adds to the bias of an expert that got less than its share of the choices,
    and takes from the others: a bias on probabilities, for the choice alone (loss-free balancing,
    arXiv:2408.15664). 0 = no bias. It acts beside the balancing loss, and not on layers whose
    experts choose, which are balanced anyway."""

    def __post_init__(self) -> None:
        require_positive("optim", self, "learning_rate", "warmup_steps", "accumulation")
        if self.clip_norm is not None:
            require_positive("optim", self, "clip_norm")
        for name in ("weight_decay", "balance_coefficient", "z_coefficient", "bias_rate"):
            value = getattr(self, name)
            require(value >= 0, f"optim.{name} must be 0 or more, got {value}")
            require(value < math.inf, f"optim.{name} must be finite, got {value}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    mesh: str = "data2_expert2_model2"
    """Name of a mesh, path of a mesh file, or sizes such as data=2,expert=2,model=2."""
    dispatcher: Dispatcher | None = None
    """How tokens reach their experts, in place of the mesh file's dispatcher."""
    devices: int | None = None
    """CPU devices to simulate, in each process; None = as many as the mesh needs."""
    steps: int = 200
    """Optimizer steps."""
    seed: int = 0
    """Of parameters, data order and noise."""
    out: str = "runs/tiny"
    """Directory of the run: checkpoints, metrics, pictures."""
    resume: bool = False
    """Continue from the newest checkpoint in `out`."""
    init_from: str | None = None
    """Run or directory of converted weights whose model is the first step's. Steps, learning-rate
    schedule, optimizer state and data begin anew. On the command line its model and tokenizer are
    also where the options of `model` and `data.tokenizer` start from."""
    eval_every: int = 50
    """Steps between evaluations on the held-out examples; one more follows the last step."""
    eval_batches: int = 8
    """Batches of an evaluation, always the same ones; fewer if the held-out part is smaller."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Newest checkpoints to keep, beside the best."""

    def __post_init__(self) -> None:
        require_positive("run", self, "steps", "eval_every", "eval_batches")
        require_positive("run", self, "checkpoint_every", "keep")
        require(self.seed >= 0, f"run.seed must be 0 or more, got {self.seed}")
        require(self.seed < 2**32, f"run.seed must be below 2**32, got {self.seed}")
        if self.devices is not None:
            require_positive("run", self, "devices")
        require(
            self.data.batch_size % self.optim.accumulation == 0,
            f"data.batch_size {self.data.batch_size} must be a multiple of "
            f"optim.accumulation {self.optim.accumulation}",
        )
        require(
            self.model.dtype != "float16" or self.optim.loss_scale is not None,
            "model.dtype float16 loses small gradients without a loss scale: add "
            "optim.loss_scale dynamic, or compute in bfloat16, which needs none",
        )
        require(
            self.model.dtype == "float16" or self.optim.loss_scale is None,
            f"optim.loss_scale {self.optim.loss_scale} is for model.dtype float16: gradients in "
            f"{self.model.dtype} do not get too small, so leave it out",
        )


def to_dict(config: RunConfig) -> dict:
    """Nested plain values, as stored in a run's directory and beside a checkpoint."""
    return asdict(config)


def from_dict(values: dict[str, Any]) -> RunConfig:
    """The config that `to_dict` (through JSON) wrote.

    Raises:
        UserError: a field is unknown, as after a rename in a later version.
    """
    try:
        data: dict[str, Any] = dict(values["data"], files=tuple(values["data"]["files"]))
        sections = {
            "model": ModelConfig(**values["model"]),
            "data": DataConfig(**data),
            "optim": OptimConfig(**values["optim"]),
        }
        return RunConfig(**(values | sections))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"this config was written by another version of switchjax: {error}"
        ) from None


def config_file(out: str | Path) -> Path:
    """Where the run in this directory keeps its config."""
    return Path(out) / "config.json"


def write_config(config: RunConfig, out: str | Path) -> None:
    """Leaves the config in a run's directory."""
    config_file(out).write_text(json.dumps(to_dict(config), indent=1))


def read_config(out: str | Path) -> RunConfig:
    """The config of the run in this directory.

    Raises:
        UserError: there is no run, or its config is not one of this version.
    """
    path = config_file(out)
    try:
        return from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"{out} holds no run ({path.name} is missing)") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of a run's checkpoint on the run's held-out text."""

    run: str = "runs/tiny"
    """Directory of the run."""
    step: int | None = None
    """Which checkpoint; None = the newest."""
    mesh: str | None = None
    """Mesh to evaluate on; None = the one that the run was trained on."""
    dispatcher: Dispatcher | None = None
    """How tokens reach their experts; None = as the mesh file says."""
    devices: int | None = None
    """CPU devices to simulate, in each process; None = as many as the mesh needs."""
    batches: int | None = None
    """Batches to evaluate; None = all held-out examples."""

    def __post_init__(self) -> None:
        for name in ("step", "devices", "batches"):
            if getattr(self, name) is not None:
                require_positive("eval", self, name)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """A SentencePiece tokenizer made from text."""

    out: str
    """Model file to write; give it to training as --data.tokenizer."""
    vocab_size: int = 8000
    """Pieces; 100 sentinels for span corruption come on top."""
    files: tuple[str, ...] = ()
    """Globs of .txt, .jsonl and .gz files; none = documentation that Python itself carries."""
    json_field: str = "text"
    """Field of a .jsonl line that holds the text."""

    def __post_init__(self) -> None:
        require_positive("tokenizer", self, "vocab_size")
