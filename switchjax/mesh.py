"""Device meshes: read a mesh file, make the devices, line them up. The only `jax.devices()`.

A mesh file (`meshes/NAME.toml`) is three integers: `data`, `expert` and `model`.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from switchjax.axes import AXES
from switchjax.errors import UserError

# An installed package carries the mesh files inside itself, a checkout beside itself.
_FOLDERS = (Path(__file__).parent / "meshes", Path(__file__).parent.parent / "meshes")


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the three axes; size 1 is allowed, an axis is never absent."""

    name: str
    data: int
    expert: int
    model: int

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(
                    f"mesh {self.name}: {axis} must be a positive integer, got {size!r}"
                )

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (self.data, self.expert, self.model)

    @property
    def num_devices(self) -> int:
        return self.data * self.expert * self.model

    def __str__(self) -> str:
        return f"data={self.data},expert={self.expert},model={self.model}"


def mesh_names() -> list[str]:
    """Names that `read_mesh` knows."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def read_mesh(mesh: str) -> MeshShape:
    """Sizes from a name in `meshes/`, from the path of a file, or from text like `data=4,model=2`.

    Raises:
        UserError: nothing by that name, or the file is not three positive integers.
    """
    if re.fullmatch(r"\w+=[^,]*(,\w+=[^,]*)*", mesh):
        pairs = [item.split("=", 1) for item in mesh.split(",")]
        if len({axis for axis, _ in pairs}) < len(pairs):
            raise UserError(f"mesh {mesh!r} names an axis twice")
        sizes = {axis: int(size) if size.isdecimal() else size for axis, size in pairs}
        return _shape(mesh, {axis: 1 for axis in AXES} | sizes)
    path = Path(mesh)
    if path.suffix != ".toml":
        path = _folder() / f"{mesh}.toml"
        if mesh not in mesh_names():
            near = difflib.get_close_matches(mesh, mesh_names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"no mesh {mesh!r}; {hint}there are {', '.join(mesh_names())}")
    try:
        return _shape(path.stem, tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"mesh file {path}: {getattr(error, 'strerror', None) or error}") from None


def _folder() -> Path:
    return next(folder for folder in _FOLDERS if folder.is_dir())


def _shape(name: str, values: dict) -> MeshShape:
    unknown = sorted(values.keys() - set(AXES))
    missing = [axis for axis in AXES if axis not in values]
    if unknown or missing:
        raise UserError(
            f"mesh {name} must have the keys {', '.join(AXES)}; "
            + "; ".join(
                f"{what} {', '.join(keys)}"
                for what, keys in (("unknown", unknown), ("missing", missing))
                if keys
            )
        )
    return MeshShape(name=name, **values)


def simulate_devices(count: int | None, shape: MeshShape) -> None:
    """Ask for `count` CPU devices (None = as many as the mesh needs), where JAX runs on CPU.

    Works only before the first use of a device. Other XLA flags of the user stay as they are.

    Raises:
        UserError: the count is unequal to the mesh, or another count is already fixed.
    """
    wanted = shape.num_devices if count is None else count
    if wanted != shape.num_devices:
        raise UserError(
            f"mesh {shape.name} needs {shape.num_devices} devices ({shape}), "
            f"but --devices is {count}"
        )
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
        if len(jax.devices()) != wanted:
            raise UserError(
                f"JAX has already started with {len(jax.devices())} devices, "
                f"too late for {wanted}: "
                f"set JAX_NUM_CPU_DEVICES={wanted} in the environment"
            ) from None


def make_mesh(shape: MeshShape) -> jax.sharding.Mesh:
    """The mesh on this machine's devices, all of them.

    Raises:
        UserError: there are more or fewer devices than the mesh needs.
    """
    devices = jax.devices()
    if len(devices) != shape.num_devices:
        raise UserError(
            f"mesh {shape.name} needs {shape.num_devices} devices ({shape}), and JAX sees "
            f"{len(devices)} of kind {devices[0].platform}"
            + (f": set JAX_NUM_CPU_DEVICES={shape.num_devices}" * (devices[0].platform == "cpu"))
        )
    return jax.make_mesh(shape.sizes, AXES, devices=devices)


def make_submesh(shape: MeshShape) -> jax.sharding.Mesh:
    """The mesh on the first devices of this machine; the others idle."""
    return jax.make_mesh(shape.sizes, AXES, devices=jax.devices()[: shape.num_devices])


@contextmanager
def use_abstract_mesh(shape: MeshShape) -> Iterator[None]:
    """Trace against a mesh whose devices need not exist."""
    explicit = (jax.sharding.AxisType.Explicit,) * len(AXES)
    mesh = jax.sharding.AbstractMesh(shape.sizes, AXES, axis_types=explicit)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
