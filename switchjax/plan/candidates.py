"""The layouts that a number of devices allows: mesh sizes, where experts are, how tokens travel,
what ZeRO splits, what is computed again, how many micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

from switchjax.config import Dispatcher, Experts, Offload, Remat, RunConfig
from switchjax.errors import UserError
from switchjax.mesh import Exchange, MeshShape, Storage
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
        words += [f"{name} {value}" for name, value in unusual(self.shape.storage).items()]
        words += [f"remat {self.config.model.remat}"] * (self.config.model.remat != "none")
        accumulation = self.config.optim.accumulation
        words += [f"accumulation {accumulation}"] * (accumulation > 1)
        return " ".join([sizes, *words])


def unusual(keys: Exchange | Storage) -> dict[str, object]:
    """The keys of a mesh file that differ from their defaults."""
    usual = vars(type(keys)())
    return {name: value for name, value in vars(keys).items() if value != usual[name]}


def candidates(config: RunConfig, num_devices: int, hardware: Hardware) -> list[Candidate]:
    """All that divide, those that differ in micro-batches alone next to each other, few first.

    `model` stays inside a node, since it sends the most often. What changes the numbers is not
    chosen: dtypes are as the config and the defaults of a mesh file have them.

    Raises:
        UserError: none divides; says why the first few do not.
    """
    found, refusals = [], []
    variant = cache(lambda remat, accumulation: _variant(config, remat, accumulation))
    for shape in _shapes(config, num_devices, hardware):
        divides = []
        policies = remats(config, shape.storage)
        for accumulation in _accumulations(config, shape):
            try:
                check_sizes(variant(policies[-1], accumulation), shape)
            except UserError as error:
                refusals.append(str(error))
            else:
                divides.append(accumulation)
        found += [
            Candidate(config=variant(remat, accumulation), shape=shape)
            for remat in policies
            for accumulation in divides
        ]
    if not found:
        reasons = "; ".join(list(dict.fromkeys(refusals))[:3])
        raise UserError(f"no layout of {num_devices} devices fits this config: {reasons}")
    return found


def _variant(config: RunConfig, remat: Remat, accumulation: int) -> RunConfig:
    return replace(
        config,
        model=replace(config.model, remat=remat),
        optim=replace(config.optim, accumulation=accumulation),
    )


def _shapes(config: RunConfig, num_devices: int, hardware: Hardware) -> Iterator[MeshShape]:
    for model in _divisors(min(num_devices, hardware.devices_per_node)):
        if num_devices % model:
            continue
        for expert in _divisors(num_devices // model):
            data = num_devices // (model * expert)
            for exchange in _exchanges(config, expert, model):
                sizes: dict[str, Any] = {"data": data, "expert": expert, "model": model}
                name = "".join(f"{axis}{size}_" for axis, size in sizes.items() if size > 1)
                plain = MeshShape(name=name.rstrip("_") or "single", exchange=exchange, **sizes)
                for storage in storages(plain, config, hardware):
                    yield replace(plain, storage=storage)


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


def storages(shape: MeshShape, config: RunConfig, hardware: Hardware) -> list[Storage]:
    """Where the state may be: there is nothing to split over one device, and nothing to bring from
    the host where its link is not known or the optimizer keeps next to nothing. Of experts that
    stay gathered there are none or half."""
    offloads: tuple[Offload, ...] = ("none",)
    if hardware.host_bandwidth is not None and config.optim.optimizer == "adamw":
        offloads = get_args(Offload)
    found = [
        Storage(zero=zero, offload=offload)
        for zero in range(4 if shape.data > 1 else 1)
        for offload in offloads
    ]
    if hot := half_of_the_experts(config, shape):
        found.append(Storage(zero=3, hot_experts=hot))
    return found


def half_of_the_experts(config: RunConfig, shape: MeshShape) -> int:
    """How many may stay gathered; 0 where none can, or no half."""
    half = config.model.num_experts // 2
    can = shape.data > 1 and config.model.moe_every and half % shape.expert_parts == 0
    return half if can else 0


def remats(config: RunConfig, storage: Storage) -> tuple[Remat, ...]:
    """The policies that differ for this model and storage, which keep ever less."""
    if storage.offload == "optimizer+activations":
        return ("full",)
    policies: tuple[Remat, ...] = get_args(Remat)
    return policies if config.model.moe_every else tuple(p for p in policies if p != "moe")


def _accumulations(config: RunConfig, shape: MeshShape) -> Iterator[int]:
    rows = config.data.batch_size // (shape.data * shape.expert)
    for accumulation in _divisors(max(rows, 1)):
        if not accumulation & (accumulation - 1):
            yield accumulation


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
