"""Facts of accelerators that programs are compiled for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA asks about a GPU that it compiles for; sizes in bytes."""

    name: str
    cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    clock_ghz: float
    compute_capability: tuple[int, int]
    memory: int
    memory_bandwidth: int
    """Bytes a second."""
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    """The most that a kernel may ask for."""

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        major, minor = self.compute_capability
        device = {
            "name": f'"{self.name}"',
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory,
            "memory_bandwidth": self.memory_bandwidth,
            "l2_cache_size": self.l2_cache,
            "shared_memory_per_core": self.shared_memory_per_core,
            "shared_memory_per_block_optin": self.shared_memory_per_block,
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

H200 = Gpu(
    name="NVIDIA H200",
    cores=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    compute_capability=(9, 0),
    memory=151_397_597_184,
    memory_bandwidth=4_800_000_000_000,
    l2_cache=52_428_800,
    shared_memory_per_core=233_472,
    shared_memory_per_block=232_448,
)
