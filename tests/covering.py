"""Combinations of options of which every pair meets, and few of them."""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Combination = tuple[Any, ...]


def pairs_of(combination: Combination) -> set[tuple]:
    """((i, option i), (j, option j)) for all i < j."""
    return set(itertools.combinations(enumerate(combination), 2))


def possible(
    factors: Mapping[str, Sequence[Hashable]], allowed: Callable[[Combination], bool]
) -> list[Combination]:
    """All combinations, in the order of the factors and of their options."""
    return [c for c in itertools.product(*factors.values()) if allowed(c)]


def cover_pairs(
    combinations: Sequence[Combination], share: Callable[[Combination], Hashable]
) -> list[Combination]:
    """Some of `combinations`, such that every pair of options that is in any of them is in one.

    Greedy: each time the one with most pairs that are still missing; of those with as many, one
    that can share with an earlier one; of those, the first.

    Args:
        share: what a combination needs that others with an equal value need not have made again.
    """
    missing = set().union(*map(pairs_of, combinations))
    pairs = {c: pairs_of(c) for c in combinations}
    chosen, made = [], set()
    while missing:
        best = max(combinations, key=lambda c: (len(pairs[c] & missing), share(c) in made))
        chosen.append(best)
        made.add(share(best))
        missing -= pairs[best]
    return chosen
