"""What planning is told. Knows nothing of JAX, so that the command line answers at once."""

from dataclasses import dataclass
from pathlib import Path

from switchjax.config import require, require_positive


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Which layout to run a config with, on hardware that need not be here."""

    hardware: str = "h200"
    """Name of an accelerator, or path of a file of its facts."""
    nodes: int | None = None
    """Nodes full of devices; None = one, or as many as the mesh takes."""
    devices_per_node: int | None = None
    """Devices that share a node's links; None = as the hardware has them."""
    batch_tokens: str | None = None
    """Tokens of a batch's encoder rows (or rows, decoder-only), such as 65536, 512K or 1M
    (2**20); None = as data.batch_size says."""
    seq: int | None = None
    """Tokens of an encoder row, or of a decoder-only row; None = as data.sequence_length says."""
    mesh: str | None = None
    """Only this mesh, with the config's own remat and accumulation; None = all that divide."""
    show: int = 12
    """Layouts to show."""
    compile: int = 4
    """How many of the best are compiled for the hardware; 0 = formulas alone."""
    write: str | None = None
    """Mesh file to write for the first."""
    json: bool = False
    """Print the rows as JSON, and the table to stderr."""
    picture: str | None = None
    """PNG to draw: time by part of each layout."""
    explain: bool = False
    """With --mesh: what fills a device, what each rung of ZeRO and remat would leave of it, and
    everything that is sent."""
    loads: str | None = None
    """Run whose measured loads say how many choices will drop."""

    def __post_init__(self) -> None:
        require_positive("plan", self, "show")
        require(self.compile >= 0, f"plan.compile must be 0 or more, got {self.compile}")
        for name, suffix in (("write", ".toml"), ("picture", ".png")):
            if (value := getattr(self, name)) is not None:
                path = Path(value)
                require(path.suffix == suffix, f"plan.{name} must end in {suffix}, got {value!r}")
                folder = path.parent
                require(folder.is_dir(), f"plan.{name} {value}: there is no directory {folder}")
        require(not self.explain or self.mesh is not None, "plan.explain needs plan.mesh")
        for name in ("nodes", "devices_per_node", "seq"):
            if getattr(self, name) is not None:
                require_positive("plan", self, name)
