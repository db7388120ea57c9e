"""Knapsacks, many at once: which items of each are taken, so that their values are large and their costs fit.

Arrays are K knapsacks by N items, an item is a micro-batch. All costs and capacities are whole numbers; values are
made whole too, so that sums are exact and a tie is a tie on every machine. The rule for ties: of all best choices the
one that leaves out the latest item in the order of preference, then the next latest one, and so on. Items that are
worth nothing are taken last, in that order, as long as they fit.

Source: D2FT, Algorithm 2, with each operation's own cost as guard, and its index stepped down.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SUM_BITS: Final = 62
"""All values of a knapsack together have at most so many bits; each is rounded to its share of them."""
_NEVER: Final = -(2**62)
"""What no choice is worth."""
_CELLS: Final = 16_000_000
"""Cells of the search table of one go; more knapsacks are solved in several."""


def whole_values(values: NDArray[np.float64]) -> Ints:
    """Values as whole numbers, each knapsack in its own unit, which is a power of two."""
    largest = values.max(axis=tuple(range(1, values.ndim)), initial=0.0, keepdims=True)
    bits = SUM_BITS - (values.shape[-1] - 1).bit_length() if values.size else 0
    whole: Ints = np.rint(np.ldexp(values, bits - np.frexp(largest)[1])).astype(np.int64)
    return whole


def packed(values: Ints, costs: Ints, capacity: Ints, order: Ints, allowed: Bools) -> Bools:
    """Solve all knapsacks exactly.

    Args:
        values: of each item, at least 0.
        costs: of each item, at least 0.
        capacity: of each knapsack.
        order: the items of each knapsack in the order of preference.
        allowed: which items may be taken.

    Returns:
        Which items are taken.
    """
    taken = np.zeros(values.shape, dtype=bool)
    if not values.size:
        return taken
    equal = (costs == costs[:, :1]).all(axis=1)
    if equal.any():
        taken[equal] = _sorted(*(each[equal] for each in (values, costs, capacity, order, allowed)))
    rest = np.flatnonzero(~equal)
    for some in in_parts(rest, values.shape[1], int(capacity[rest].max(initial=0))):
        taken[some] = _searched(*(each[some] for each in (values, costs, capacity, order, allowed)))
    return taken


def take_in_order(order: Ints, costs: Ints, capacity: Ints, allowed: Bools) -> Bools:
    """Take items in an order, each that still fits what those before it left."""
    taken = np.zeros(costs.shape, dtype=bool)
    at, left = np.arange(len(costs)), capacity.copy()
    for item in order.T:
        cost = costs[at, item]
        fits = allowed[at, item] & (cost <= left)
        taken[at, item] = fits
        left -= np.where(fits, cost, 0)
    return taken


def in_parts(rows: NDArray[Any], items: int, capacity: int) -> list[NDArray[Any]]:
    """The knapsacks in parts, such that the search table of each has not too many cells."""
    each = max(1, _CELLS // (items * (capacity + 1)))
    return [rows[at : at + each] for at in range(0, len(rows), each)]


def after(best: Ints, cost: Ints, value: Ints) -> Ints:
    """What each knapsack is worth at each capacity if it takes one more item; impossible below the item's cost.

    Args:
        best: without the item, for each capacity from 0 on, K by W.
        cost: of the item in each knapsack.
        value: of the item in each knapsack.
    """
    if (cost == cost[0]).all():  # one shift for all knapsacks
        least = min(int(cost[0]), best.shape[1])
        found = np.full_like(best, _NEVER)
        found[:, least:] = best[:, : best.shape[1] - least] + value[:, None]
        return found
    weights = np.arange(best.shape[1]) - cost[:, None]
    below: Ints = np.take_along_axis(best, np.maximum(weights, 0), axis=1) + value[:, None]
    return np.where(weights >= 0, below, _NEVER)


def _sorted(values: Ints, costs: Ints, capacity: Ints, order: Ints, allowed: Bools) -> Bools:
    """Items of equal cost: the most valuable ones, those in front where values tie."""
    ranked = np.argsort(-np.take_along_axis(values, order, axis=1), axis=1, kind="stable")
    return take_in_order(np.take_along_axis(order, ranked, axis=1), costs, capacity, allowed)


def _searched(values: Ints, costs: Ints, capacity: Ints, order: Ints, allowed: Bools) -> Bools:
    """Items of any cost: Algorithm 2 over the items in their order of preference."""
    at = np.arange(len(values))
    best = np.zeros((len(values), int(capacity.max()) + 1), dtype=np.int64)
    better = np.zeros((order.shape[1], *best.shape), dtype=bool)
    for step, item in enumerate(order.T):
        taking = after(best, costs[at, item], np.where(allowed[at, item], values[at, item], _NEVER))
        better[step] = taking > best
        best = np.maximum(best, taking)
    taken, left = np.zeros(values.shape, dtype=bool), capacity.copy()
    for step in reversed(range(len(better))):
        item = order[:, step]
        taken[at, item] = better[step, at, left]
        left -= np.where(taken[at, item], costs[at, item], 0)
    return taken | take_in_order(order, costs, left, allowed & ~taken)
