"""Facts of accelerators and of what joins them, from `accelerators/NAME.toml` or a user's file."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from switchjax.errors import UserError, unknown
from switchjax.mesh import MeshShape

_FOLDER = Path(__file__).parent / "accelerators"


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins devices: inside a node, or between nodes."""

    bandwidth: float
    """Bytes a second that one device sends, one way."""
    latency: float
    """Seconds that one collective takes to start."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA asks about a GPU that it compiles for, beside its memory; sizes in bytes."""

    cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    clock_ghz: float
    compute_capability: tuple[int, int]
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    """The most that a kernel may ask for."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device, as many to a node as its links join."""

    kind: str
    """"gpu", which can be compiled for, or "tpu"."""
    name: str
    memory: int
    """Bytes of one device."""
    memory_bandwidth: float
    """Bytes a second."""
    devices_per_node: int
    peak: dict[str, float]
    """FLOP/s of dense matrix products, by dtype; float16 as fast as bfloat16 unless it says so."""
    inside: Link
    between: Link
    host_bandwidth: float | None = None
    """Bytes a second between one device and memory of its host, one way; None: not known, and then
    no offload is planned."""
    gpu: Gpu | None = None

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        assert self.gpu is not None, self.name
        major, minor = self.gpu.compute_capability
        device = {
            "name": f'"{self.name}"',
            "core_count": self.gpu.cores,
            "fpus_per_core": self.gpu.fpus_per_core,
            "clock_rate_ghz": self.gpu.clock_ghz,
            "device_memory_size": self.memory,
            "memory_bandwidth": int(self.memory_bandwidth),
            "l2_cache_size": self.gpu.l2_cache,
            "shared_memory_per_core": self.gpu.shared_memory_per_core,
            "shared_memory_per_block_optin": self.gpu.shared_memory_per_block,
        } | _OF_EVERY_GPU
        facts = "\n".join(f"  {name}: {value}" for name, value in device.items())
        return _TARGET_CONFIG.format(name=self.name, facts=facts, major=major, minor=minor)


_OF_EVERY_GPU = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "shared_memory_per_block": 49152,
    "driver_version": '"13.0.0"',
    "runtime_version": '"12.8.0"',
    "compile_time_toolkit_version": '"12.8.0"',
    "dnn_version": '"9.10.0"',
}

_TARGET_CONFIG = """
gpu_device_info {{
{facts}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def whole_nodes(hardware: Hardware, shape: MeshShape) -> tuple[int, int]:
    """Nodes that a mesh takes, and its devices on each.

    Raises:
        UserError: the devices fill more than one node, and not whole ones.
    """
    nodes, rest = divmod(shape.num_devices, hardware.devices_per_node)
    if nodes == 0:
        return 1, shape.num_devices
    if rest:
        raise UserError(
            f"mesh {shape.name}: {hardware.devices_per_node} devices a node must divide its "
            f"{shape.num_devices} devices ({shape})"
        )
    return nodes, hardware.devices_per_node


def hardware_names() -> list[str]:
    """Names that `read_hardware` knows."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def read_hardware(name: str) -> Hardware:
    """The facts by name, or from a file of one's own.

    Raises:
        UserError: nothing by that name, or the file lacks a fact or has one that is none.
    """
    path = Path(name)
    if path.suffix != ".toml":
        if name not in hardware_names():
            raise unknown("hardware", name, hardware_names())
        path = _FOLDER / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"hardware file {path}: {reason}") from None
    try:
        return hardware_from(values)
    except UserError as error:
        raise UserError(f"hardware file {path}: {error}") from None


def hardware_from(values: dict[str, Any]) -> Hardware:
    """The facts in the form of a file.

    Raises:
        UserError: a fact is missing, or one is none.
    """
    values = {name: value for name, value in values.items() if value is not None}
    for name in ("inside", "between"):
        values[name] = _checked(Link, name, values.get(name, {}))
    if "gpu" in values:
        gpu = dict(values["gpu"])
        gpu["compute_capability"] = tuple(gpu.get("compute_capability", ()))
        values["gpu"] = _checked(Gpu, "gpu", gpu)
    hardware = _checked(Hardware, "", values)
    if (hardware.kind == "gpu") != (hardware.gpu is not None) or hardware.kind not in _KINDS:
        raise UserError(
            f'kind must be "gpu", with a section [gpu], or "tpu", got {hardware.kind!r}'
        )
    if not {"float32", "bfloat16"} <= hardware.peak.keys():
        raise UserError("[peak] must have float32 and bfloat16")
    hardware.peak.setdefault("float16", hardware.peak["bfloat16"])
    return hardware


_KINDS = ("gpu", "tpu")


def _checked(kind: type, section: str, values: dict[str, Any]) -> Any:
    """A dataclass of these values, positive where they are numbers."""
    known = {field.name for field in fields(kind)}
    needed = known - {"gpu", "host_bandwidth"}
    where = f"[{section}] " if section else ""
    for what, names in (("unknown", values.keys() - known), ("missing", needed - values.keys())):
        if names:
            raise UserError(f"{where}{what} {', '.join(sorted(names))}")
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 < value < float("inf"):
            raise UserError(f"{where}{name} must be positive and finite, got {value}")
    return kind(**values)
