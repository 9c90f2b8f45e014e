"""Where the other processes of a run are, checked when built. Knows nothing of JAX."""

from dataclasses import dataclass

from switchjax.config import require, require_positive


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The other processes of the same run; not part of what a run is. Without options they are
    found where Slurm, Open MPI or an indexed Kubernetes job has started several."""

    coordinator: str | None = None
    """Address that process 0 listens at and all others reach, as host:port."""
    num_processes: int | None = None
    """How many there are; 1 = do not look for others."""
    process_id: int | None = None
    """Which of them this one is, from 0."""
    timeout: int = 300
    """Seconds to wait until all are there."""

    def __post_init__(self) -> None:
        require_positive("distributed", self, "timeout")
        given = {n: getattr(self, n) for n in ("coordinator", "num_processes", "process_id")}
        if self.num_processes is not None:
            require_positive("distributed", self, "num_processes")
        if self.num_processes != 1:
            missing = [f"--distributed.{n.replace('_', '-')}" for n in given if given[n] is None]
            require(
                len(missing) in (0, len(given)),
                f"of several processes each needs {', '.join(missing)} too",
            )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            require(
                bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
                f"distributed.coordinator must be host:port, got {self.coordinator!r}",
            )
        if self.process_id is not None and self.num_processes is not None:
            require(
                0 <= self.process_id < self.num_processes,
                f"distributed.process_id must be at least 0 and below distributed.num_processes "
                f"{self.num_processes}, got {self.process_id}",
            )
