"""Hugging Face's `config.json` of T5 and Switch Transformers, as a config here and back.

What the model here cannot be is refused by its name and value, never approximated.

Source: transformers 5.24, configuration_t5.py and configuration_switch_transformers.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from switchjax.config import ModelConfig, OptimConfig, RunConfig
from switchjax.errors import UserError
from switchjax.interop.huggingface import Family
from switchjax.moe.routing import capacity
from switchjax.nn.norm import EPSILON
from switchjax.nn.position import MAX_DISTANCE, NUM_BUCKETS

_FAMILIES: tuple[Family, ...] = ("t5", "switch_transformers")
_SAME_NAMES = ("vocab_size", "d_model", "d_ff", "num_heads", "d_kv", "num_layers")
# What is the same in every model here; files of old versions leave some of it out.
_FIXED = {
    "layer_norm_epsilon": EPSILON,
    "relative_attention_num_buckets": NUM_BUCKETS,
    "relative_attention_max_distance": MAX_DISTANCE,
    "is_encoder_decoder": True,
    "router_bias": False,
    "router_dtype": "float32",
}
_ACTIVATIONS = {"relu": "relu", "gated-gelu_new": "geglu"}


def read_theirs(directory: Path) -> tuple[Family, dict[str, Any]]:
    """The kind of model in a directory, and its config.

    Raises:
        UserError: there is none, or it is of another kind.
    """
    path = directory / "config.json"
    try:
        theirs = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{directory} holds no Hugging Face model: {path.name} is missing"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    kind = theirs.get("model_type") if isinstance(theirs, dict) else None
    for family in _FAMILIES:
        if kind == family:
            return family, theirs
    raise UserError(f"{path}: model_type is {kind!r}; what converts is {' and '.join(_FAMILIES)}")


def model_of(family: Family, theirs: dict[str, Any], *, hf_semantics: bool) -> ModelConfig:
    """The model here that a file of theirs fits.

    Args:
        hf_semantics: with their fixed number of slots, and padding that takes them.

    Raises:
        UserError: a value is missing or wrong, or of a model that there is not here.
    """
    for name, value in _FIXED.items():
        if theirs.get(name, value) != value:
            raise UserError(f"{name} is {theirs[name]!r}, and here it is always {value!r}")
    sizes: dict[str, Any] = {name: _count(theirs, name) for name in _SAME_NAMES}
    pad_id, start_id = theirs.get("pad_token_id", 0), theirs.get("decoder_start_token_id")
    if start_id not in (None, pad_id):
        raise UserError(
            f"decoder_start_token_id is {start_id} and pad_token_id {pad_id}; here a decoder "
            "starts with padding"
        )
    layers = sizes["num_layers"]
    if (decoder_layers := theirs.get("num_decoder_layers") or layers) != layers:
        raise UserError(
            f"num_layers is {layers} and num_decoder_layers {decoder_layers}; here encoder and "
            "decoder have the same number"
        )
    model = ModelConfig(
        **sizes,
        activation=_activation(family, theirs),
        tied_embeddings=_is_tied(theirs),
        dropout=_number(theirs, "dropout_rate", 0.1),
        moe_every=0,
        padding_is_routed=hf_semantics,
    )
    if family == "t5":
        return model
    return replace(
        model,
        moe_every=_moe_every(theirs, layers),
        num_experts=_count(theirs, "num_experts"),
        jitter=_number(theirs, "router_jitter_noise", 0.01),
        expert_capacity=_count(theirs, "expert_capacity") if hf_semantics else None,
    )


def optim_of(theirs: dict[str, Any]) -> OptimConfig:
    """Their weights of the router's losses, for further training."""
    default = OptimConfig()
    return replace(
        default,
        balance_coefficient=_number(theirs, "router_aux_loss_coef", default.balance_coefficient),
        z_coefficient=_number(theirs, "router_z_loss_coef", default.z_coefficient),
    )


def _count(theirs: dict[str, Any], name: str) -> int:
    value = theirs.get(name)
    if type(value) is not int:
        raise UserError(f"config.json must have a whole number {name}, got {value!r}")
    return value


def _number(theirs: dict[str, Any], name: str, default: float) -> float:
    value = theirs.get(name, default)
    if type(value) not in (int, float):
        raise UserError(f"config.json must have a number {name}, got {value!r}")
    return float(value)


def _activation(family: Family, theirs: dict[str, Any]) -> Any:
    name = theirs.get("feed_forward_proj")
    if family == "t5" and name == "gated-gelu":
        name = "gated-gelu_new"  # which is what T5 means by it: the approximation by tanh
    elif name is None or family == "switch_transformers":
        gated = "gated-" if theirs.get("is_gated_act") else ""
        name = gated + str(theirs.get("dense_act_fn", "relu"))
    if name not in _ACTIVATIONS:
        raise UserError(f"the activation is {name!r}; here there are relu and gated-gelu_new")
    return _ACTIVATIONS[name]


def _is_tied(theirs: dict[str, Any]) -> bool:
    """Whether logits come from the scaled shared table.

    New versions tie every T5 in name and keep whether the output is scaled, which old ones took
    from `tie_word_embeddings`; models that do not scale have a table of their own in the file.
    """
    return bool(theirs.get("scale_decoder_outputs", theirs.get("tie_word_embeddings", True)))


def _moe_every(theirs: dict[str, Any], layers: int) -> int:
    """Their layer i, from 0, is a Switch layer if i % step is 1, or where step is 1."""
    counts = {
        name: _count(theirs, name)
        for name in ("num_sparse_encoder_layers", "num_sparse_decoder_layers")
    }
    steps = {name: layers // count if count > 0 else 0 for name, count in counts.items()}
    step = steps["num_sparse_encoder_layers"]
    if step in (1, 2) and set(steps.values()) == {step} and layers % step == 0:
        return step
    given = " and ".join(f"{name} {count}" for name, count in counts.items())
    raise UserError(
        f"{given} of {layers} layers; here all layers or every second one of both stacks are "
        f"Switch layers: {layers} or {layers / 2:g} of each"
    )


def theirs_of(config: RunConfig, *, pad_id: int, eos_id: int, dtype: str) -> dict[str, Any]:
    """What transformers needs to know of a model here.

    Raises:
        UserError: transformers has no such model.
    """
    model = config.model
    _require_known_to_them(config)
    gated = model.activation == "geglu"
    family: Family = "switch_transformers" if model.moe_every else "t5"
    names = {"t5": "T5", "switch_transformers": "SwitchTransformers"}
    theirs = {
        "model_type": family,
        "architectures": [f"{names[family]}ForConditionalGeneration"],
        **{name: getattr(model, name) for name in _SAME_NAMES},
        "num_decoder_layers": model.num_layers,
        "tie_word_embeddings": model.tied_embeddings,
        "dropout_rate": model.dropout,
        **{name: value for name, value in _FIXED.items() if not name.startswith("router")},
        "initializer_factor": 1.0,
        "use_cache": True,
        "pad_token_id": pad_id,
        "decoder_start_token_id": pad_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }
    if family == "t5":
        return theirs | {"feed_forward_proj": "gated-gelu" if gated else "relu"}
    sparse = model.num_layers // model.moe_every
    return theirs | {
        "dense_act_fn": "gelu_new" if gated else "relu",
        "is_gated_act": gated,
        "num_experts": model.num_experts,
        "expert_capacity": slots_of(config),
        "num_sparse_encoder_layers": sparse,
        "num_sparse_decoder_layers": sparse,
        "encoder_sparse_step": model.moe_every,
        "decoder_sparse_step": model.moe_every,
        "router_bias": _FIXED["router_bias"],
        "router_dtype": _FIXED["router_dtype"],
        "router_jitter_noise": model.jitter,
        "router_ignore_padding_tokens": False,
        "router_aux_loss_coef": config.optim.balance_coefficient,
        "router_z_loss_coef": config.optim.z_coefficient,
    }


def slots_of(config: RunConfig) -> int:
    """Slots of an expert in one row of the training length, as evaluation here has them."""
    model, length = config.model, config.data.sequence_length
    if model.expert_capacity is not None:
        return model.expert_capacity
    if model.eval_capacity_factor is None:
        return length
    return capacity(length, model.num_experts, model.top_k, model.eval_capacity_factor)


def _require_known_to_them(config: RunConfig) -> None:
    """Raises UserError of what is neither a T5 nor a Switch Transformer of theirs."""
    model, length = config.model, config.data.sequence_length
    sparse = model.moe_every > 0
    for differs, reason in (
        (
            model.architecture != "encoder_decoder",
            f"model.architecture {model.architecture}: theirs are encoder-decoders",
        ),
        (model.moe_every > 2, f"model.moe_every {model.moe_every}: theirs is 1 or 2"),
        (
            sparse and model.top_k > 1,
            f"model.top_k {model.top_k}: their tokens go to one expert",
        ),
        (
            sparse and model.encoder_router != "top_k",
            f"model.encoder_router {model.encoder_router}: their tokens choose experts",
        ),
        (
            sparse and model.group_size not in (None, length),
            f"model.group_size {model.group_size}: their slots are those of one row",
        ),
    ):
        if differs:
            raise UserError(f"Hugging Face has no such model: {reason}")
