"""Compile a train step for GPUs that are not there.

XLA's plugin for CUDA compiles on any machine once it is told what the GPUs are like. It must not
look for GPUs of its own: run in a process whose environment has JAX_PLATFORMS=cpu.
"""

import os
from functools import partial

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding

from switchjax.axes import AXES
from switchjax.batch import Batch
from switchjax.config import RunConfig
from switchjax.data.pipeline import row_lengths
from switchjax.errors import UserError
from switchjax.layout import Layout
from switchjax.mesh import MeshShape
from switchjax.plan.hardware import Hardware, whole_nodes
from switchjax.setup import check_sizes
from switchjax.state import abstract_state
from switchjax.step import train_step

_WITHOUT_A_GPU: dict[str, str | bool] = {
    # XLA chooses the tiles of its own matmul kernels by trying them on the GPU, and without one its
    # guess does not compile for some shapes. cuBLAS takes any shape.
    "xla_gpu_enable_triton_gemm": False,
    # Nobody runs the kernels. What is allocated, sent and scheduled is decided before them.
    "xla_backend_optimization_level": "0",
    "xla_gpu_disable_gpuasm_optimizations": True,
}


def absent_mesh(hardware: Hardware, shape: MeshShape) -> jax.sharding.Mesh:
    """A mesh of GPUs to compile for: nodes full of GPUs, or one node with fewer.

    Raises:
        UserError: the GPUs do not fill whole nodes, or XLA's plugin for CUDA cannot be used.
    """
    nodes, in_node = whole_nodes(hardware, shape)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{nodes}x{in_node}",
            target_config=hardware.target_config(),
        )
    except NotImplementedError:
        raise UserError(
            f"compiling for absent GPUs needs pip install 'switchjax[plan]', and JAX_PLATFORMS=cpu "
            f"in the environment, where it is {os.environ.get('JAX_PLATFORMS', '')!r}"
        ) from None
    return jax.make_mesh(shape.sizes, AXES, devices=topology.devices)


def abstract_batch(config: RunConfig, layout: Layout) -> Batch:
    """Shapes, dtypes and shardings of a whole batch on the mesh in use."""
    mesh, rows = jax.sharding.get_mesh(), config.data.batch_size
    *encoder, length = row_lengths(config.data, config.model.architecture)

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, layout.rows(len(shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Batch(
        row_B=array("int32", rows),
        tokens_BL=array("int32", rows, length),
        segment_BL=array("int32", rows, length),
        targets_BL=array("int32", rows, length),
        target_mask_BL=array("bool", rows, length),
        encoder_tokens_BS=array("int32", rows, *encoder) if encoder else None,
        encoder_segment_BS=array("int32", rows, *encoder) if encoder else None,
    )


def compile_train_step(
    config: RunConfig, shape: MeshShape, layout: Layout, hardware: Hardware
) -> jax.stages.Compiled:
    """The train step as training runs it, compiled for absent GPUs.

    Its text lists the collectives in scheduled order, its `memory_analysis()` the bytes on one
    device; `cost_analysis()` is empty. It cannot run.

    Args:
        shape: the mesh; `config.mesh` is not read.

    Raises:
        UserError: sizes do not divide over the mesh, or as `absent_mesh`.
    """
    check_sizes(config, shape)
    with jax.set_mesh(absent_mesh(hardware, shape)):
        step = jax.jit(partial(train_step, config, layout), donate_argnums=0)
        lowered = step.lower(abstract_state(config, layout), abstract_batch(config, layout))
        options = shape.exchange.compiler_options("gpu") | _WITHOUT_A_GPU
        return lowered.compile(compiler_options=options)
