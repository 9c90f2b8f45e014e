"""Small configs, states and batches that several test files share."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np

from switchjax.batch import Batch
from switchjax.config import DataConfig, ModelConfig, OptimConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import MeshShape, make_submesh, mesh_names, read_mesh
from switchjax.metrics import StepMetrics
from switchjax.model import SwitchTransformer
from switchjax.state import TrainState, abstract_state, first_state, init_state
from switchjax.step import train_step

SEPARATE = Layout()
ENCODER_LENGTH = 16
DECODER_LENGTH = 8

# Sizes that eight devices divide along every axis.
MODEL = ModelConfig(
    vocab_size=32,
    d_model=16,
    d_ff=16,
    num_heads=8,
    d_kv=2,
    num_layers=2,
    moe_every=2,
    num_experts=8,
    jitter=0.0,
)

# Two periods a stack, so that the scan has something to loop over.
DEEP = replace(MODEL, num_layers=4)


def small_meshes() -> list[str]:
    """The mesh files that eight devices are enough for, the reference first."""
    names = [name for name in mesh_names() if read_mesh(name).num_devices <= jax.device_count()]
    return sorted(names, key=lambda name: (name != "single", name))


def sizes(data: int, expert: int, model: int) -> MeshShape:
    return MeshShape(name="test", data=data, expert=expert, model=model)


def run_config(model: ModelConfig, rows: int = 8, **optim) -> RunConfig:
    return RunConfig(
        model=model, data=DataConfig(batch_size=rows), optim=OptimConfig(**optim), seed=3
    )


def random_batch(
    model: ModelConfig, rows: int = 8, *, seed: int = 0, padding: float = 0.3
) -> Batch:
    """Rows of skewed random tokens: few of them are frequent, so some experts are asked by many.

    The first row has no target at all.

    Args:
        padding: share of padding; rows differ in it, and it comes at the end of a row.
    """
    rng = np.random.default_rng(seed)

    def tokens(length: int) -> np.ndarray:
        return np.minimum(rng.geometric(0.2, (rows, length)), model.vocab_size - 1).astype(np.int32)

    def segments(length: int) -> np.ndarray:
        real = rng.permutation(np.linspace(length * (1 - 2 * padding), length, rows).round())
        return (np.arange(length)[None, :] < real[:, None]).astype(np.int32)

    segment_BL = segments(DECODER_LENGTH)
    has_target_B1 = np.arange(rows)[:, None] > 0
    both = model.architecture == "encoder_decoder"
    return Batch(
        row_B=np.arange(rows, dtype=np.int32),
        tokens_BL=tokens(DECODER_LENGTH),
        segment_BL=segment_BL,
        targets_BL=tokens(DECODER_LENGTH),
        target_mask_BL=(segment_BL > 0) & has_target_B1,
        encoder_tokens_BS=tokens(ENCODER_LENGTH) if both else None,
        encoder_segment_BS=segments(ENCODER_LENGTH) if both else None,
    )


def abstract(batch: Batch) -> Batch:
    """Shapes and dtypes of a batch."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def named_leaves(tree: object) -> dict[str, jax.Array]:
    """The arrays of a pytree by their paths, as `.decoder.norm.norm_D`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path).removesuffix(".value"): leaf for path, leaf in leaves}


def mesh(name: str) -> jax.sharding.Mesh:
    """A mesh file on the first of the eight devices."""
    return make_submesh(read_mesh(name))


def layout(name: str) -> Layout:
    """Of the same mesh file."""
    return Layout.of(read_mesh(name))


def start(config: RunConfig, layout: Layout = SEPARATE) -> TrainState:
    """The state before the first step, on the mesh in use.

    The model is made once, on one device, and moved: `test_initial_parameters` shows that it is
    the same as one made on any mesh.
    """
    places, tree = jax.tree.flatten(abstract_state(config, layout).model)
    # How a model routes and computes does not decide what it is made of.
    made = ModelConfig(**{name: getattr(config.model, name) for name in _MADE_OF})
    arrays = jax.tree.leaves(_model(made, config.seed))
    model = tree.unflatten(
        jax.device_put(x, place.sharding) for x, place in zip(arrays, places, strict=True)
    )
    return jax.jit(partial(first_state, config, layout))(model)


_MADE_OF = (
    "architecture",
    "vocab_size",
    "d_model",
    "d_ff",
    "num_heads",
    "d_kv",
    "num_layers",
    "activation",
    "moe_every",
    "num_experts",
    "init_scale",
    "param_dtype",
)


@cache
def _model(config: ModelConfig, seed: int) -> SwitchTransformer:
    with jax.set_mesh(mesh("single")):
        run = RunConfig(model=config, seed=seed)
        return jax.device_get(jax.jit(partial(init_state, run, Layout()))().model)


def compiled_step(
    config: RunConfig, layout: Layout = SEPARATE
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """`train_step` as training runs it, but that the old state stays alive."""
    return jax.jit(partial(train_step, config, layout))


def one_step(config: RunConfig, batch: Batch) -> tuple[dict, dict, StepMetrics]:
    """Parameters before and after a first step on the mesh in use, and its metrics."""
    state = start(config)
    after, metrics = compiled_step(config)(state, Layout().place(batch))
    return host_leaves(state.model), host_leaves(after.model), jax.device_get(metrics)


def host_leaves(tree: object) -> dict[str, np.ndarray]:
    """`named_leaves`, on the host."""
    return jax.device_get(named_leaves(tree))
