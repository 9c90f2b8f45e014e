"""How long a train step takes on given hardware: arithmetic, memory traffic, what is sent.

A step takes the longer of computing and of moving bytes through memory, and what of the sending is
not hidden behind that. None of it was measured on the hardware: it ranks layouts of one model on
one machine, and its shares say what to look at.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product

from switchjax.axes import AXES, DATA, EXPERT, MODEL
from switchjax.errors import UserError
from switchjax.mesh import MeshShape
from switchjax.plan.activations import made_again, whole_period
from switchjax.plan.hardware import Hardware
from switchjax.plan.memory import Memory, parameter_numbers, received_bytes, state_bytes
from switchjax.plan.sizes import Sizes
from switchjax.plan.wire import Send

# Shares of the peak that large programs reach: matrix products of some thousand rows, streams of
# large arrays, collectives of some megabytes.
MATMUL_SHARE = 0.6
MEMORY_SHARE = 0.8
LINK_SHARE = 0.8

_ADAM_LIKE = 3 * 4  # bytes a parameter that an update reads and writes, beside the state's own


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one step."""

    compute: float
    memory: float
    sending: dict[str, float]
    """By what joins the devices that send: "inside" a node, "between" nodes; or "host", by what
    joins a device and its host's memory."""
    hidden: float
    """Of the sending, behind arithmetic."""

    @property
    def exposed(self) -> float:
        return max(0.0, sum(self.sending.values()) - self.hidden)

    @property
    def step(self) -> float:
        return max(self.compute, self.memory) + self.exposed


def cost(sizes: Sizes, memory: Memory, sends: Iterable[Send], hardware: Hardware) -> Cost:
    """By formula: nothing is hidden, since only a schedule can tell."""
    sending = {"inside": 0.0, "between": 0.0, "host": host_seconds(sizes, memory, hardware)}
    for send in sends:
        where, seconds = send_seconds(
            send.kind, send.axes, send.wire_bytes, send.runs, sizes.shape, hardware
        )
        sending[where] += seconds
    return Cost(
        compute=compute_seconds(sizes, hardware),
        memory=_traffic(sizes, memory) / (hardware.memory_bandwidth * MEMORY_SHARE),
        sending=sending,
        hidden=0.0,
    )


def host_seconds(sizes: Sizes, memory: Memory, hardware: Hardware) -> float:
    """Of what `offload` brings to the device and takes back, one after the other."""
    if not memory.on_host:
        return 0.0
    if hardware.host_bandwidth is None:
        raise UserError(
            f"{hardware.name} has no host_bandwidth in its file, which offload = "
            f"{sizes.shape.storage.offload} is planned with"
        )
    times = 2 * received_bytes(sizes) * (sizes.config.optim.accumulation - 1)
    return (2 * memory.on_host + times) / (hardware.host_bandwidth * LINK_SHARE)


def compute_seconds(sizes: Sizes, hardware: Hardware) -> float:
    """Of the matrix products of one step on one device."""
    return step_flops(sizes, hardware) / (hardware.peak[sizes.model.dtype] * MATMUL_SHARE)


def step_flops(sizes: Sizes, hardware: Hardware) -> float:
    """Of one device, what `remat` computes again and empty slots included."""
    layers = 0.0
    for stack in sizes.stacks:
        rows = sizes.expert_rows(stack)
        if sizes.shape.exchange.dispatcher == "ragged" and hardware.kind == "gpu":
            rows *= sizes.experts  # XLA applies every expert to every row
        forward = sizes.forward_flops(stack, expert_rows=rows)
        layers += 3 * forward  # a product has two in the backward pass
        match sizes.model.remat:
            case "moe":  # not the last product, which nothing asks for
                again = sizes.expert_flops(expert_rows=rows)
                layers += again * (sizes.matrices - 1) / sizes.matrices
            case "dots":
                layers += sizes.score_flops(stack)
            case "full":
                layers += forward
    return sizes.config.optim.accumulation * (layers + 3 * sizes.logits_flops())


def model_flops(sizes: Sizes) -> float:
    """What one device's share of a step needs: no empty slot, nothing computed twice."""
    shares = sizes.shape.model if sizes.folded else 1
    layers = 0.0
    for stack in sizes.stacks:
        rows = stack.tokens * sizes.model.top_k / shares
        layers += sizes.forward_flops(stack, expert_rows=rows)
    return sizes.config.optim.accumulation * 3 * (layers + sizes.logits_flops())


def _traffic(sizes: Sizes, memory: Memory) -> float:
    """Bytes through one device's memory in a step."""
    micros, zero = sizes.config.optim.accumulation, sizes.shape.storage.zero
    whole, part = (
        parameter_numbers(sizes.config, sizes.shape, split=split) for split in (False, True)
    )
    # A micro-batch reads the parameters, writes them in the dtype of compute, reads that in each
    # pass and writes the gradient. With `zero` 3 it writes them twice, and reads a part.
    passes = 4 if sizes.model.remat == "full" else 3
    read = memory.parameters * (2 if zero == 3 else 1)
    written = whole * sizes.itemsize * (2 if zero == 3 else 1)
    gradients = whole * sizes.itemsize + part * 4 if zero >= 2 else whole * 4
    of_weights = micros * (read + written + passes * whole * sizes.itemsize + gradients)
    _, optimizer = state_bytes(sizes.config, sizes.shape)
    of_update = (part if zero else whole) * _ADAM_LIKE + 2 * optimizer
    if zero in (1, 2):  # what is gathered, and its move
        of_update += 2 * memory.parameters
    kept = sum(sizes.periods * whole_period(sizes, stack) for stack in sizes.stacks)
    again = sum(sizes.periods * made_again(sizes, stack) for stack in sizes.stacks)
    return of_weights + of_update + micros * (2 * kept + again)


def send_seconds(
    kind: str,
    axes: tuple[str, ...],
    wire_bytes: float,
    runs: float,
    shape: MeshShape,
    hardware: Hardware,
) -> tuple[str, float]:
    """Which link limits a device's collectives over these axes, and their seconds.

    A group of devices that spans nodes has a port to the network for each device. Sums and gathers
    go around a ring, which crosses between two nodes once for all devices that it has there; what
    each device sends to each other one crosses as often as it must.
    """
    group, here = group_sizes(axes, shape.sizes, hardware.devices_per_node)
    inside, between = hardware.inside, hardware.between
    if group == here:
        seconds = wire_bytes / (inside.bandwidth * LINK_SHARE) + runs * inside.latency
        return "inside", seconds
    if kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
        away = (group - here) / (group - 1)
        at_home = wire_bytes * (1 - away) / inside.bandwidth
        crossing = wire_bytes * away / between.bandwidth
    else:
        at_home = wire_bytes / inside.bandwidth
        crossing = wire_bytes / (between.bandwidth * here)
    return "between", max(at_home, crossing) / LINK_SHARE + runs * between.latency


@cache
def group_sizes(
    axes: tuple[str, ...], sizes: tuple[int, int, int], devices_per_node: int
) -> tuple[int, int]:
    """Devices that differ along these axes alone, and how many of them share a node.

    Devices are numbered with `model` fastest and `data` slowest, node by node.

    Args:
        sizes: of the mesh axes.
    """
    size_of: dict[str, int] = dict(zip(AXES, sizes, strict=True))
    strides: dict[str, int] = {
        DATA: size_of[EXPERT] * size_of[MODEL],
        EXPERT: size_of[MODEL],
        MODEL: 1,
    }
    steps = [range(size_of[axis]) for axis in axes]
    numbers = [
        sum(place * strides[axis] for axis, place in zip(axes, places, strict=True))
        for places in product(*steps)
    ]
    here = sum(number < devices_per_node for number in numbers)
    return math.prod(map(len, steps)), here
