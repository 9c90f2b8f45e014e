"""Device meshes: read a mesh file, make the devices, line them up. The only `jax.devices()`.

A mesh file (`meshes/NAME.toml`) is three integers, `data`, `expert` and `model`, and where they
differ from the defaults the fields of `Exchange`, how tokens reach their experts on this mesh, and
of `Storage`, where the state is.
"""

import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import jax

from switchjax.axes import AXES
from switchjax.config import Dispatcher, Experts, Offload, ReduceDtype, Wire
from switchjax.errors import UserError, unknown

# An installed package carries the mesh files inside itself, a checkout beside itself.
_FOLDERS = (Path(__file__).parent / "meshes", Path(__file__).parent.parent / "meshes")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How tokens reach their experts. None of it changes the numbers, but for a narrow wire."""

    experts: Experts = "separate"
    """What splits the experts: `separate`, the axis `expert`, and `model` splits each expert's
    hidden dim; `folded`, both axes, and an expert's hidden dim stays whole."""
    dispatcher: Dispatcher = "all_to_all"
    wire: Wire = "compute"
    """Dtype of tokens under way: as computed, bfloat16, or 8 bits with a scale a token."""
    chunks: int = 1
    """Parts that a device's groups are exchanged in: one's compute beside another's exchange."""
    buffer: float | None = None
    """Rows that a device has room for, over its fair share; a step that needs more takes a slower
    way to the same numbers. None: 2 for `ragged`; `all_gather` sends each token to each peer."""

    def __post_init__(self) -> None:
        _require_known(self, experts=Experts, dispatcher=Dispatcher, wire=Wire)
        if not _is_count(self.chunks):
            raise UserError(f"chunks must be a positive integer, got {self.chunks!r}")
        if self.buffer is None:
            return
        if self.dispatcher not in ("all_gather", "ragged"):
            raise UserError(f"dispatcher {self.dispatcher} has no buffer to bound: leave it out")
        if isinstance(self.buffer, bool) or not isinstance(self.buffer, int | float):
            raise UserError(f"buffer must be a number, got {self.buffer!r}")
        if not 0 < self.buffer < float("inf"):
            raise UserError(f"buffer must be positive and finite, got {self.buffer}")

    def compiler_options(self, platform: str) -> dict[str, str | bool]:
        """For XLA, beside the user's own flags; numbers do not change.

        It joins products that share an operand, where they are small. Chunks share their weights,
        and one product for all of them would wait for the last chunk's tokens.
        """
        if platform != "gpu" or self.chunks == 1:
            return {}
        return {"xla_gpu_dot_merger_threshold_mb": "0"}


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where the parts of the state are, and how gradients are summed."""

    zero: int = 0
    """What the axis `data` splits: 1, the optimizer's state; 2, gradients too; 3, parameters too,
    which are gathered where they are used. None of it changes the numbers."""
    reduce_dtype: ReduceDtype = "compute"
    """Dtype in which weights' gradients are summed over devices: as computed, or this one. Those of
    routers, norms and relative positions are float32 all the same."""
    hot_experts: int = 0
    """With zero 3: experts of a layer, each device's busiest, that are gathered once a step. The
    others are gathered where they are used. It does not change the numbers."""
    offload: Offload = "none"
    """What is in memory of the host until it is needed: the optimizer's state, or that and what
    each period of a stack receives. It does not change the numbers."""

    def __post_init__(self) -> None:
        if self.zero not in range(4) or isinstance(self.zero, bool | float):
            raise UserError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        _require_known(self, reduce_dtype=ReduceDtype, offload=Offload)
        hot = self.hot_experts
        if not _is_count(hot) and (hot != 0 or isinstance(hot, bool | float)):
            raise UserError(f"hot_experts must be 0 or a positive integer, got {hot!r}")
        if hot and self.zero != 3:
            raise UserError(
                f"hot_experts = {hot} stay gathered where zero = 3 splits parameters, and "
                f"zero = {self.zero}"
            )


def _require_known(keys: object, **choices: object) -> None:
    """Raises UserError unless each of these fields is one of the words that its type has."""
    for name, kind in choices.items():
        value, known = getattr(keys, name), get_args(kind)
        if value not in known:
            raise UserError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the three axes; size 1 is allowed, an axis is never absent."""

    name: str
    data: int
    expert: int
    model: int
    exchange: Exchange = Exchange()
    storage: Storage = Storage()

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if not _is_count(size):
                raise UserError(
                    f"mesh {self.name}: {axis} must be a positive integer, got {size!r}"
                )
        if self.exchange.dispatcher == "local" and self.expert > 1:
            raise UserError(
                f"mesh {self.name}: dispatcher local sends nothing, so it needs expert = 1, "
                f"and expert = {self.expert}"
            )
        if self.exchange.dispatcher == "local" and self.exchange.wire != "compute":
            raise UserError(
                f"mesh {self.name}: dispatcher local has no wire for {self.exchange.wire}"
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (self.data, self.expert, self.model)

    @property
    def num_devices(self) -> int:
        return self.data * self.expert * self.model

    @property
    def expert_parts(self) -> int:
        """Parts that the experts of a layer are split into."""
        return self.expert * (self.model if self.exchange.experts == "folded" else 1)

    def __str__(self) -> str:
        return f"data={self.data},expert={self.expert},model={self.model}"


def mesh_names() -> list[str]:
    """Names that `read_mesh` knows."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def read_mesh(mesh: str, dispatcher: Dispatcher | None = None) -> MeshShape:
    """A mesh from a name in `meshes/`, from the path of a file, or from text like `data=4,model=2`.

    Keys after a name or path replace the file's own: `expert8,wire=float8`.

    Args:
        dispatcher: in place of the file's.

    Raises:
        UserError: nothing by that name, or an unknown key, or a value that its key cannot have.
    """
    name, *words = mesh.split(",")
    given: dict[str, object] = {} if dispatcher is None else {"dispatcher": dispatcher}
    if "=" in name:
        words, values = [name, *words], {axis: 1 for axis in AXES}
    else:
        values = _read_file(name)
    pairs = [word.partition("=") for word in words]
    if len({key for key, _, _ in pairs}) < len(pairs):
        raise UserError(f"mesh {mesh!r} names a key twice")
    typed = {key: _number(value) for key, _, value in pairs}
    label = mesh if words else Path(name).stem
    return _shape(label, values | typed | given)


def _read_file(mesh: str) -> dict:
    path = Path(mesh)
    if path.suffix != ".toml":
        path = _folder() / f"{mesh}.toml"
        if mesh not in mesh_names():
            raise unknown("mesh", mesh, mesh_names())
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"mesh file {path}: {getattr(error, 'strerror', None) or error}") from None


def _number(text: str) -> int | float | str:
    """A number if it is one; other text is for the key's own check to refuse."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _folder() -> Path:
    return next(folder for folder in _FOLDERS if folder.is_dir())


def _shape(name: str, values: dict) -> MeshShape:
    of_exchange, of_storage = ([f.name for f in fields(kind)] for kind in (Exchange, Storage))
    extra = [*of_exchange, *of_storage]
    unknown = sorted(values.keys() - {*AXES, *extra})
    missing = [axis for axis in AXES if axis not in values]
    if unknown or missing:
        raise UserError(
            f"mesh {name} must have the keys {', '.join(AXES)} and may have {', '.join(extra)}; "
            + "; ".join(
                f"{what} {', '.join(keys)}"
                for what, keys in (("unknown", unknown), ("missing", missing))
                if keys
            )
        )
    try:
        exchange = Exchange(**{key: values[key] for key in of_exchange if key in values})
        storage = Storage(**{key: values[key] for key in of_storage if key in values})
    except UserError as error:
        raise UserError(f"mesh {name}: {error}") from None
    sizes = {axis: values[axis] for axis in AXES}
    return MeshShape(name=name, exchange=exchange, storage=storage, **sizes)


def simulate_devices(count: int | None, shape: MeshShape, *, num_processes: int = 1) -> None:
    """Ask for `count` CPU devices in this process, where JAX runs on CPU.

    Works only before the first use of a device. Other XLA flags of the user stay as they are.

    Args:
        count: None = this process's share of the mesh.

    Raises:
        UserError: the processes together have more or fewer than the mesh, or another count is
            already fixed.
    """
    _check_processes(count, shape, num_processes)
    wanted = shape.num_devices // num_processes
    flag = re.search(
        r"--xla_force_host_platform_device_count=(\S+)", os.environ.get("XLA_FLAGS", "")
    )
    if flag:
        if flag[1] == str(wanted):
            return  # the user asked for the same thing
        raise UserError(
            f"XLA_FLAGS asks for {flag[1]} CPU devices and this run needs {wanted}: "
            f"remove --xla_force_host_platform_device_count from XLA_FLAGS"
        )
    already = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if count is None and already > 0:
        return  # JAX_NUM_CPU_DEVICES is set; make_mesh compares it with the mesh
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        if len(jax.local_devices()) != wanted:
            raise UserError(
                f"JAX has already started with {len(jax.local_devices())} devices, "
                f"too late for {wanted}: "
                f"set JAX_NUM_CPU_DEVICES={wanted} in the environment"
            ) from None


def _check_processes(count: int | None, shape: MeshShape, num_processes: int) -> None:
    if shape.num_devices % num_processes:
        raise UserError(
            f"mesh {shape.name} needs {shape.num_devices} devices ({shape}), "
            f"which {num_processes} processes cannot share evenly"
        )
    if count is not None and count * num_processes != shape.num_devices:
        raise UserError(
            f"mesh {shape.name} needs {shape.num_devices} devices ({shape}), "
            f"but --devices is {count}"
            + f" in each of {num_processes} processes"
            * (num_processes > 1)
        )


def make_mesh(shape: MeshShape) -> jax.sharding.Mesh:
    """The mesh on the devices of all processes, all of them.

    Raises:
        UserError: there are more or fewer devices than the mesh needs.
    """
    devices = jax.devices()
    if len(devices) != shape.num_devices:
        share = shape.num_devices // jax.process_count()
        raise UserError(
            f"mesh {shape.name} needs {shape.num_devices} devices ({shape}), and JAX sees "
            f"{len(devices)} of kind {devices[0].platform}"
            + (f": set JAX_NUM_CPU_DEVICES={share}" * (devices[0].platform == "cpu"))
        )
    return jax.make_mesh(shape.sizes, AXES, devices=devices)


def make_submesh(shape: MeshShape) -> jax.sharding.Mesh:
    """The mesh on the first devices of this machine; the others idle.

    Raises:
        UserError: there are fewer devices than the mesh needs.
    """
    devices = jax.devices()
    if len(devices) < shape.num_devices:
        raise UserError(
            f"mesh {shape.name} needs {shape.num_devices} devices ({shape}), and JAX sees "
            f"{len(devices)} of kind {devices[0].platform}"
        )
    return jax.make_mesh(shape.sizes, AXES, devices=devices[: shape.num_devices])


@contextmanager
def use_abstract_mesh(shape: MeshShape) -> Iterator[None]:
    """Trace against a mesh whose devices need not exist."""
    explicit = (jax.sharding.AxisType.Explicit,) * len(AXES)
    mesh = jax.sharding.AbstractMesh(shape.sizes, AXES, axis_types=explicit)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
