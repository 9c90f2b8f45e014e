"""Which devices a collective joins, in each of XLA's notations, and which mesh axes that is.

Devices are numbered as `mesh.devices.flat`, the last axis fastest: JAX gives XLA that order.
"""

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from switchjax.axes import AXES
from switchjax.mesh import MeshShape

Groups = Sequence[Sequence[int]]

_LISTED = re.compile(r"replica_groups=(\{(?:\{[\d,]*\},?)*\})")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh[\[<](?P<axes>[^\]>]*)[\]>]"
    r"(?:, device_ids=\((?:\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>[\d,]+))\))?"
    r" \{(?P<over>[^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def replica_groups(attributes: str, num_devices: int) -> Groups:
    """The groups of a collective, from the attributes of its instruction.

    Raises:
        ValueError: none of the notations is there.
    """
    if listed := _LISTED.search(attributes):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        return groups or [range(num_devices)]
    if iota := _IOTA.search(attributes):
        return _iota(iota[2], iota[3]).reshape(_numbers(iota[1])).tolist()
    if named := _MESH.search(attributes):
        return _over_mesh(named)
    raise ValueError(f"no replica groups that can be read: {attributes[:200]}")


def source_target_pairs(attributes: str) -> list[tuple[int, int]]:
    """Who sends to whom in a collective-permute.

    Raises:
        ValueError: the attributes name no pairs.
    """
    found = _PAIRS.search(attributes)
    if found is None:
        raise ValueError(f"no source-target pairs that can be read: {attributes[:200]}")
    numbers = _numbers(found[1].replace("{", "").replace("}", ""))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def axes_of(groups: Groups, shape: MeshShape) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ.

    Raises:
        ValueError: a device lies outside the mesh.
    """
    differ = np.zeros(len(AXES), bool)
    for group in groups:
        members = np.asarray(group)
        if members.max() >= shape.num_devices:
            raise ValueError(f"device {members.max()} is not one of mesh {shape.name} ({shape})")
        place_AM = np.stack(np.unravel_index(members, shape.sizes))
        differ |= (place_AM != place_AM[:, :1]).any(axis=1)
    return tuple(itertools.compress(AXES, differ))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _iota(dims: str, order: str | None) -> np.ndarray:
    """The numbers from 0 in an array of these dims, its dims reordered."""
    sizes = _numbers(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(order)) if order else ids


def _over_mesh(named: re.Match) -> Groups:
    """Groups over some axes, or factors of axes, of XLA's own mesh.

    A reference like 'a':(2)3 is a factor of axis a: its size is 3, and the factors before it, which
    vary more slowly, have product 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", named["axes"])}
    over = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?", named["over"])
    ]
    if named["ids"]:
        ids = np.asarray(_numbers(named["ids"]))
    else:
        ids = _iota(named["dims"] or str(math.prod(sizes.values())), named["order"])
    factors = []  # (axis, product of the factors before it, size)
    for name, size in sizes.items():
        cuts = {1, size}.union(*({b, b * s} for axis, b, s in over if axis == name))
        factors += [(name, a, b // a) for a, b in itertools.pairwise(sorted(cuts))]
    chosen = [
        i
        for name, before, size in over
        for i, (axis, a, b) in enumerate(factors)
        if axis == name and before <= a and a * b <= before * size
    ]
    others = [i for i in range(len(factors)) if i not in chosen]
    group_size = math.prod(size for _, _, size in over)
    ids = ids.reshape([size for _, _, size in factors]).transpose(others + chosen)
    return ids.reshape(-1, group_size).tolist()
