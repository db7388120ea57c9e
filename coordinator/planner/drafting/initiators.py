"""The order of the owners' turns: from a start on, always the best link to an owner that has not had its turn.

The start is the owner from which a round of hand-overs, the way back to it included, takes least. Without links the
owners begin in the order of their names.

Source: RingAda, section III-B.3 (the next initiator is the one with the best link).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def initiator_order(owners: Sequence[str], hand_over_s: Callable[[str, str], float] | None) -> tuple[str, ...]:
    """Sort the owners in the order of their turns; with fewer than three owners, or without links, by name.

    Args:
        owners: names, any order.
        hand_over_s: (from, to) -> seconds that the head takes; None if links take no time.
    """
    names = sorted(owners)
    if hand_over_s is None or len(names) < 3:
        return tuple(names)
    tours = [_tour(start, names, hand_over_s) for start in names]
    return min(tours, key=lambda tour: (_length_s(tour, hand_over_s), tour))


def _tour(start: str, names: Sequence[str], hand_over_s: Callable[[str, str], float]) -> tuple[str, ...]:
    tour, left = [start], set(names) - {start}
    while left:
        last = tour[-1]
        best = min(left, key=lambda name: (hand_over_s(last, name), name))
        tour.append(best)
        left.remove(best)
    return tuple(tour)


def _length_s(tour: Sequence[str], hand_over_s: Callable[[str, str], float]) -> float:
    return sum(hand_over_s(tour[index - 1], tour[index]) for index in range(len(tour)))
