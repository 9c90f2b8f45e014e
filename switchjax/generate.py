"""Continuations of prompts by a model that was trained or converted, on any mesh."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, get_mesh

from switchjax import layout, mesh, setup
from switchjax.batch import Prompts
from switchjax.beam import search
from switchjax.config import ModelConfig, RunConfig
from switchjax.data.pipeline import row_lengths
from switchjax.data.prompts import encode_prompt, prompt_rows
from switchjax.data.tokenizer import Tokenizer, load_tokenizer
from switchjax.decode import Continuations, decode
from switchjax.errors import UserError
from switchjax.generate_config import GenerateConfig
from switchjax.layout import Layout
from switchjax.mesh import MeshShape
from switchjax.model import SwitchTransformer
from switchjax.sampling import Sampling, Vocabulary
from switchjax.state import abstract_state
from switchjax.weights import ROUTER_BIAS, Weights, config_of, load_array, load_model, open_weights

Decoder = Callable[[SwitchTransformer, jax.Array | None, Prompts, jax.Array], Continuations]


def generate(config: GenerateConfig) -> list[str]:
    """A continuation of each prompt, as text.

    Prompts do not influence each other: no choice of experts drops, whatever the run's config says
    of capacity, and what is drawn depends on the seed, the prompt's number and the place alone.

    Raises:
        UserError: there are no such weights, they do not fit the mesh, or a prompt does not fit
            its buffer.
    """
    run = config_of(config.checkpoint)
    run = replace(run, mesh=config.mesh or run.mesh, devices=config.devices)
    architecture = run.model.architecture
    length = config.prompt_length or row_lengths(run.data, architecture)[0]
    run = replace(run, model=drop_free(run.model, length))
    tokenizer = _tokenizer(config, run)
    decoder = _decoder(config, tokenizer)
    prompts = [encode_prompt(text, tokenizer, architecture) for text in config.prompt]
    _check_lengths(prompts, length)
    shape = _mesh_shape(config, run)
    # Rows that hold no prompt, up to what the devices divide; they are sent to no expert.
    num_rows = len(prompts) + -len(prompts) % (shape.data * shape.expert)
    layout.check(run.model, shape, batch_size=num_rows, accumulation=1, row_lengths=(length, 1))
    rows = prompt_rows(
        prompts,
        length=length,
        num_rows=num_rows,
        pad_id=tokenizer.pad_id,
        architecture=architecture,
    )
    with jax.set_mesh(setup.start_devices(run, shape)):
        weights = open_weights(config.checkpoint, config.step)
        of_mesh = Layout.of(shape)
        model, router_bias_XE = _load(weights, run, of_mesh)
        key = jax.random.key(config.seed)
        said = jax.jit(decoder)(model, router_bias_XE, of_mesh.place(rows), key)
        tokens_BM = np.asarray(said.tokens_BM)
    return [tokenizer.decode(tokens_BM[i]) for i in range(len(prompts))]


def drop_free(model: ModelConfig, length: int) -> ModelConfig:
    """The model as it generates: a slot for every choice of every token, none for padding, and
    a row a group.

    Experts that choose have a fixed number of slots, and keep that of evaluation.

    Args:
        length: tokens of an encoder row.

    Raises:
        UserError: experts choose among other groups than rows.
    """
    if model.encoder_router == "expert_choice" and model.group_size not in (None, length):
        raise UserError(
            f"the run's experts choose among model.group_size {model.group_size} tokens, and at "
            f"generation a group is a row of {length}: give --prompt-length {model.group_size}"
        )
    factor = model.eval_capacity_factor
    return replace(
        model,
        capacity_factor=model.capacity_factor if factor is None else factor,
        eval_capacity_factor=None,
        expert_capacity=None if model.encoder_router == "top_k" else model.expert_capacity,
        padding_is_routed=False,
        group_size=None,
    )


def _tokenizer(config: GenerateConfig, run: RunConfig) -> Tokenizer:
    tokenizer = load_tokenizer(config.tokenizer or run.data.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids, sentinels included, and the model "
            f"only model.vocab_size {run.model.vocab_size}"
        )
    return tokenizer


def _decoder(config: GenerateConfig, tokenizer: Tokenizer) -> Decoder:
    """What the config asks for, as a function of model, router bias, prompts and key."""
    sayable = tokenizer.vocab_size - 1  # all but the pad id
    for name, value in (("top_k", config.top_k), ("beams", config.beams)):
        if value is not None and value > sayable:
            raise UserError(
                f"generate.{name} {value} is more than the {sayable} tokens of the tokenizer"
            )
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id)
    shared = {"max_new_tokens": config.max_new_tokens, "vocabulary": vocabulary}
    if config.beams > 1:
        beams = {"num_beams": config.beams, "length_penalty": config.length_penalty}
        return lambda model, bias, prompts, key: search(model, bias, prompts, **shared, **beams)
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    return partial(decode, sampling=sampling, **shared)


def _check_lengths(prompts: list[np.ndarray], length: int) -> None:
    for number, ids in enumerate(prompts, start=1):
        if len(ids) > length:
            raise UserError(
                f"prompt {number} has {len(ids)} tokens, what starts or ends it included, and its "
                f"buffer room for {length}: raise --prompt-length or shorten the prompt"
            )


def _mesh_shape(config: GenerateConfig, run: RunConfig) -> MeshShape:
    """Without chunks: one token a row gives nothing to cut."""
    dispatcher = config.dispatcher
    if dispatcher is None and config.mesh is None:
        dispatcher = run.dispatcher
    typed = dispatcher is not None or "dispatcher=" in run.mesh
    if not typed and run.model.encoder_router == "top_k":
        dispatcher = "ragged"
    shape = mesh.read_mesh(run.mesh, dispatcher)
    return replace(shape, exchange=replace(shape.exchange, chunks=1))


def _load(
    weights: Weights, run: RunConfig, of_mesh: Layout
) -> tuple[SwitchTransformer, jax.Array | None]:
    """The model and the bias on its choice of experts, on the mesh in use."""
    model = load_model(weights, abstract_state(run, of_mesh).model)
    if weights.router_bias is None:
        return model, None
    (shape, dtype), mesh = (weights.router_bias.shape, weights.router_bias.dtype), get_mesh()
    sharding = NamedSharding(mesh, of_mesh.whole)
    target = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return model, load_array(weights, ROUTER_BIAS, target)
