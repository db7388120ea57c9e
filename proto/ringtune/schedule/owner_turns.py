"""Whose train turn comes when: each owner in its turn, or as often as its rows ask for.

With ``turns = "equal"`` the owners go round. With ``"rows"`` the next turn goes to the owner that is furthest behind
its share of the rows: an owner that has had n turns has the key (2n + 1) / rows, and the least key is next. Owners a,
b and c with 40, 20 and 10 rows ::

    turn     0    1    2    3    4    5    6
    owner    a    b    a    c    a    b    a
    key     1/40 2/40 3/40 4/40 5/40 6/40 7/40

Pure functions of owners and number of turns, so a resumed run finds its place without the turns before.

Source: the method of Webster (Sainte-Laguë), which shares seats out with the least rounding error.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final

from ringtune.schedule.extent import Owner

EQUAL: Final = "equal"
BY_ROWS: Final = "rows"
TURNS: Final = (EQUAL, BY_ROWS)

_MOST_APART: Final = 1000


def weights(owners: Sequence[Owner], turns: str) -> tuple[int, ...]:
    """How much each owner counts: its rows, or 1 where turns are equal."""
    return tuple(owner.train_rows if turns == BY_ROWS else 1 for owner in owners)


def shares(owners: Sequence[Owner], turns: str) -> tuple[float, ...]:
    """Each owner's share of the steps of a long run."""
    own = weights(owners, turns)
    return tuple(weight / sum(own) for weight in own)


def next_owner(own: Sequence[int], counts: Sequence[int]) -> int:
    """The index of the owner of the next turn; of equal keys the first.

    Args:
        own: the owners' weights.
        counts: turns that each has had.
    """
    return min(range(len(own)), key=lambda index: (Fraction(2 * counts[index] + 1, own[index]), index))


def turn_counts(own: Sequence[int], num_turns: int) -> list[int]:
    """How many of the first ``num_turns`` turns each owner has.

    All keys below a bound that is reached somewhat earlier are counted at once, the last few turns one by one.
    """
    early, total = max(0, num_turns - len(own)), sum(own)
    counts = [-(-2 * early * weight // total) // 2 for weight in own]  # odd numbers below 2 * early * weight / total
    for _ in range(num_turns - sum(counts)):
        counts[next_owner(own, counts)] += 1
    return counts


def owner_indices(own: Sequence[int], num_turns: int) -> Iterator[int]:
    """Yield the index of the owner of each turn for ever, the first ``num_turns`` turns left out."""
    counts = turn_counts(own, num_turns)
    numbered = enumerate(zip(counts, own, strict=True))
    keys = [(Fraction(2 * count + 1, weight), index) for index, (count, weight) in numbered]
    heapq.heapify(keys)
    while True:
        key, index = keys[0]
        yield index
        heapq.heapreplace(keys, (key + Fraction(2, own[index]), index))


def latest_owners(own: Sequence[int], num_turns: int) -> tuple[int, ...]:
    """The indices of the owners that have one of the first ``num_turns`` turns, in the order of their latest ones.

    Example: with 40, 20 and 10 rows and five turns (a, b, a, c, a) they are b, c and a.
    """
    counts = zip(turn_counts(own, num_turns), own, strict=True)
    keys = [(Fraction(2 * count - 1, weight), index) for index, (count, weight) in enumerate(counts) if count]
    return tuple(index for _, index in sorted(keys))


def turns_until_repeat(own: Sequence[int]) -> int:
    """Turns after which the order of the owners repeats itself: with 40, 20 and 10 rows, seven."""
    return sum(own) // math.gcd(*own)


def most_turns_apart(owners: Sequence[Owner], turns: str) -> int:
    """Turns within which every owner has one; at most 1,000, however few rows an owner has.

    Example: with equal turns these are as many turns as there are owners.
    """
    own = weights(owners, turns)
    apart = len(own) if turns == EQUAL else sum(own) // min(own) + len(own)
    return min(apart, max(_MOST_APART, len(own)))
