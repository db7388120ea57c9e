"""Algorithms 1 and 2 of D2FT as printed, in plain loops and exact numbers.

Two things differ from the print: each operation's own cost is the guard, and the index steps down (``i = i - 1``;
``i = 1 - 1`` is a misprint). Items stand in their order of preference.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def dp_searching(values: Sequence[Fraction], costs: Sequence[int], capacity: int) -> list[bool]:
    """Algorithm 2 for one subnet; items worth nothing are added in order as long as they fit."""
    count = len(values)
    table = [[Fraction(0)] * (capacity + 1) for _ in range(count + 1)]
    for i in range(1, count + 1):
        for w in range(capacity + 1):
            if w >= costs[i - 1]:
                table[i][w] = max(table[i - 1][w], table[i - 1][w - costs[i - 1]] + values[i - 1])
            else:
                table[i][w] = table[i - 1][w]
    taken, w = [False] * count, capacity
    for i in range(count, 0, -1):
        if table[i][w] != table[i - 1][w]:
            taken[i - 1] = True
            w -= costs[i - 1]
    for i in range(count):
        if not taken[i] and costs[i] <= w:
            taken[i] = True
            w -= costs[i]
    return taken


def knapsack_scheduling(
    backward: Sequence[Fraction],
    forward: Sequence[Fraction],
    costs: tuple[Sequence[int], Sequence[int]],
    capacities: tuple[int, int],
    *,
    independent: bool = False,
) -> str:
    """Algorithm 1 for one subnet: the codes of its micro-batches.

    Args:
        backward: scores of full operations.
        forward: scores of forward-only operations.
        costs: of full and of forward-only operations.
        capacities: C^pf and C^po.
        independent: read it literally: stage two knows nothing of stage one, and what both take is full. Otherwise
            stage two chooses among the rest, as equation 5 says.
    """
    full = dp_searching(backward, costs[0], capacities[0])
    rest = [at for at in range(len(full)) if independent or not full[at]]
    found = dp_searching([forward[at] for at in rest], [costs[1][at] for at in rest], capacities[1])
    second = {at for at, taken in zip(rest, found, strict=True) if taken}
    return "".join("1" if full[at] else "2" if at in second else "3" for at in range(len(full)))
