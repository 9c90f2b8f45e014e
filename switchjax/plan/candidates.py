"""The layouts that a number of devices allows: mesh sizes, where experts are, how tokens travel."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from switchjax.config import Dispatcher, Experts, RunConfig
from switchjax.errors import UserError
from switchjax.mesh import Exchange, MeshShape
from switchjax.plan.hardware import Hardware
from switchjax.setup import check_sizes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a config: its mesh, and what of the config goes with it."""

    config: RunConfig
    """With the candidate's `model.remat` and `optim.accumulation`."""
    shape: MeshShape

    @property
    def name(self) -> str:
        """Sizes, then what differs from the defaults."""
        exchange, sizes = self.shape.exchange, f"{self.shape}"
        words = [exchange.dispatcher] if self.config.model.moe_every else []
        words += [exchange.experts] * (exchange.experts != "separate")
        words += [f"remat {self.config.model.remat}"] * (self.config.model.remat != "none")
        accumulation = self.config.optim.accumulation
        words += [f"accumulation {accumulation}"] * (accumulation > 1)
        return " ".join([sizes, *words])


def candidates(config: RunConfig, num_devices: int, hardware: Hardware) -> list[Candidate]:
    """All that divide. `model` stays inside a node, since it sends the most often.

    Raises:
        UserError: none divides; says why the first few do not.
    """
    found, refusals = [], []
    for shape in _shapes(config, num_devices, hardware):
        for changed in _configs(config, shape):
            try:
                check_sizes(changed, shape)
            except UserError as error:
                refusals.append(str(error))
            else:
                found.append(Candidate(config=changed, shape=shape))
    if not found:
        reasons = "; ".join(list(dict.fromkeys(refusals))[:3])
        raise UserError(f"no layout of {num_devices} devices fits this config: {reasons}")
    return found


def _shapes(config: RunConfig, num_devices: int, hardware: Hardware) -> Iterator[MeshShape]:
    for model in _divisors(min(num_devices, hardware.devices_per_node)):
        if num_devices % model:
            continue
        for expert in _divisors(num_devices // model):
            data = num_devices // (model * expert)
            for exchange in _exchanges(config, expert, model):
                sizes = {"data": data, "expert": expert, "model": model}
                name = "".join(f"{axis}{size}_" for axis, size in sizes.items() if size > 1)
                yield MeshShape(
                    name=name.rstrip("_") or "single",
                    exchange=exchange,
                    data=data,
                    expert=expert,
                    model=model,
                )


def _exchanges(config: RunConfig, expert: int, model: int) -> Iterator[Exchange]:
    if not config.model.moe_every:
        if expert == 1:
            yield Exchange(dispatcher="local")
        return
    for experts in get_args(Experts):
        if experts == "folded" and model == 1:
            continue  # the same as separate
        for dispatcher in get_args(Dispatcher):
            if (dispatcher == "local") == (expert == 1):
                yield Exchange(experts=experts, dispatcher=dispatcher)


def _configs(config: RunConfig, shape: MeshShape) -> Iterator[RunConfig]:
    rows = config.data.batch_size // (shape.data * shape.expert)
    for accumulation in _divisors(max(rows, 1)):
        if accumulation & (accumulation - 1):
            continue
        for remat in ("none", "full"):
            yield replace(
                config,
                model=replace(config.model, remat=remat),
                optim=replace(config.optim, accumulation=accumulation),
            )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
