"""Directories as Hugging Face leaves them, and models of the sizes that several tests use."""

import json
from dataclasses import replace

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from switchjax.config import ModelConfig, RunConfig
from switchjax.interop.convert import from_hugging_face, to_hugging_face
from switchjax.interop.options import FromHuggingFace, ToHuggingFace
from switchjax.layout import Layout
from switchjax.state import abstract_state, model_shapes
from switchjax.weights import load_model, open_weights, write_weights

SMALL = ModelConfig(
    vocab_size=24,
    d_model=12,
    d_ff=20,
    num_heads=2,
    d_kv=4,
    num_layers=2,
    moe_every=0,
    num_experts=12,
)
VARIANTS = {
    "T5 1.0": SMALL,
    "T5 1.1": replace(SMALL, activation="geglu", tied_embeddings=False),
    "Switch": replace(SMALL, moe_every=2),
    "Switch, gated, in every layer": replace(SMALL, moe_every=1, activation="geglu"),
}


def random_weights(model, out, *, seed=0):
    """A weights directory of numbers of any size, none the same."""
    rng = np.random.default_rng(seed)

    def pieces(name):
        shape = shapes[name].shape
        fan_in = shape[-1] if name.startswith("embedding") else max(model.d_model, 1)
        yield (rng.standard_normal(shape) / np.sqrt(fan_in)).astype(shapes[name].dtype)

    shapes = model_shapes(model)
    write_weights(out, RunConfig(model=model, mesh="single"), shapes, pieces)
    return out


def arrays(directory):
    """All arrays of a weights directory."""
    weights = open_weights(directory)
    return {name: weights.read(name) for name in weights.shapes}


def take_over(directory, out, **options):
    """Converts to a weights directory; gives what was said."""
    said = []
    options = FromHuggingFace(directory=str(directory), out=str(out), **options)
    from_hugging_face(options, said.append)
    return said


def give(directory, out, *, shard_bytes=2 * 10**9, **options):
    """Converts to a Hugging Face directory; gives what was said."""
    said = []
    options = ToHuggingFace(directory=str(directory), out=str(out), **options)
    to_hugging_face(options, said.append, shard_bytes=shard_bytes)
    return said


def rewrite(source, out, *, tensors=None, **config):
    """A copy of a Hugging Face directory of one file, with other tensors or config values."""
    out.mkdir()
    theirs = json.loads((source / "config.json").read_text()) | config
    theirs = {name: value for name, value in theirs.items() if value is not ...}
    (out / "config.json").write_text(json.dumps(theirs))
    whole = load_file(source / "model.safetensors") | (tensors or {})
    whole = {name: array for name, array in whole.items() if array is not ...}
    save_file(whole, out / "model.safetensors", {"format": "pt"})
    return out


def loaded(directory, layout=None, **changes):
    """The model of a weights directory on the mesh in use, with some of its config changed."""
    weights, layout = open_weights(directory), layout or Layout()
    config = replace(weights.config, model=replace(weights.config.model, **changes))
    return load_model(weights, abstract_state(config, layout).model)


forward = jax.jit(lambda model, batch: model(batch, None))
