"""What training and evaluation do first: check a config against its mesh, get devices and data.

Cheap checks come first, so that a mistake is answered before any text is read or JAX started.
"""

import tempfile
from functools import partial
from pathlib import Path

import jax

from switchjax import layout, mesh, offload, processes
from switchjax.config import RunConfig, config_file
from switchjax.data.pipeline import Data, load_data, row_lengths
from switchjax.errors import UserError
from switchjax.layout import Layout
from switchjax.mesh import MeshShape
from switchjax.state import init_state
from switchjax.weights import Weights, in_dtypes_of, open_weights, require_fit


def check(config: RunConfig) -> MeshShape:
    """The mesh that the run asks for, once its sizes are known to divide over it.

    Raises:
        UserError: naming the numbers that do not fit.
    """
    shape = mesh.read_mesh(config.mesh, config.dispatcher)
    check_sizes(config, shape)
    return shape


def check_sizes(config: RunConfig, shape: MeshShape) -> None:
    """Raises UserError unless the config fits this mesh, not `config.mesh`."""
    if shape.storage.offload == "optimizer" and config.optim.optimizer == "sgd":
        raise UserError(
            f"mesh {shape.name}: offload = optimizer moves the optimizer's state to the host, and "
            "optim.optimizer sgd has none: it would do nothing, so leave it out"
        )
    layout.check(
        config.model,
        shape,
        batch_size=config.data.batch_size,
        accumulation=config.optim.accumulation,
        row_lengths=row_lengths(config.data, config.model.architecture),
    )


def check_directory(out: Path, *, resume: bool) -> None:
    """Checks that the run may have this directory; leaves nothing there.

    Raises:
        UserError: another run lives there, or none to resume, or it cannot be written.
    """
    try:
        occupied = config_file(out).exists()
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"cannot write to the output directory {out}: {error.strerror}") from None
    if occupied and not resume:
        raise UserError(
            f"{out} holds another run: add --resume to continue it, or choose another --out"
        )
    if resume and not occupied:
        raise UserError(f"nothing to resume: {out} holds no run")


def open_initial_weights(config: RunConfig, shape: MeshShape) -> Weights | None:
    """What the run's model starts from; None where that is the seed.

    Raises:
        UserError: there are no weights, or not those of the config's model; all are listed.
    """
    if config.init_from is None:
        return None
    weights = open_weights(config.init_from)
    with mesh.use_abstract_mesh(shape):
        state = jax.eval_shape(partial(init_state, config, layout.Layout.of(shape)))
    require_fit(in_dtypes_of(state.model, weights)[0], state.model)
    return weights


def start_devices(config: RunConfig, shape: MeshShape) -> jax.sharding.Mesh:
    """The mesh on the devices of all processes, simulated ones where JAX runs on CPU.

    Raises:
        UserError: their number does not fit, or they lack a kind of memory that the mesh asks for.
    """
    mesh.simulate_devices(config.devices, shape, num_processes=processes.count())
    made = mesh.make_mesh(shape)
    offload.check_memory(shape, made)
    return made


def read_data(config: RunConfig, layout: Layout, *, eval_batches: int | None) -> Data:
    """The run's text as batches, of them the rows that this process holds on the mesh in use.

    Args:
        eval_batches: most batches of held-out examples; None = all.

    Raises:
        UserError: it does not fit, or another process has read another text.
    """
    data = load_data(
        config.data,
        config.model.architecture,
        seed=config.seed,
        vocab_size=config.model.vocab_size,
        eval_batches=eval_batches,
        rows=layout.rows_here(config.data.batch_size),
    )
    processes.agree({"data": data.train.get_state()["stream"]})
    return data
