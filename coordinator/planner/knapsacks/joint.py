"""Choose full and forward-only operations together: one multiple-choice knapsack for each subnet, solved exactly.

Each micro-batch is full, forward-only or passed by; both kinds share one capacity, C^pf + C^po. A forward score counts
``score_scale`` times against a backward score. What is left in the end goes to full operations, then to forward-only
ones, where that loses nothing.

Source: D2FT, equation 6 without the decoupling of equations 7 and 8; section IV-F (the scale).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.planner.knapsacks.packing import Bools, Ints, after, in_parts, take_in_order, whole_values
from coordinator.planner.knapsacks.two_stage import Codes, Knapsacks, codes_of
from ringtune.errors import PlanError


def joint(
    knapsacks: Knapsacks, backward: NDArray[np.float64], forward: NDArray[np.float64], score_scale: float = 1.0
) -> Codes:
    """The operations of each knapsack, by one search over both kinds.

    Args:
        knapsacks: costs, capacities, and order; both kinds of costs in the same unit.
        backward: what a full operation is worth for each micro-batch, K by N.
        forward: what a forward-only one is worth, before it is scaled.
        score_scale: what a forward score counts against a backward score.

    Raises:
        PlanError: a scaled forward score is too large for a float.
    """
    with np.errstate(over="ignore"):
        scaled = score_scale * forward
    if not np.isfinite(scaled).all():
        raise PlanError(f"operations.score_scale = {score_scale:g} makes forward scores too large; lower it")
    values = whole_values(np.stack([backward, scaled], axis=1))
    costs = np.stack([knapsacks.full_costs, knapsacks.forward_costs], axis=1)
    most = np.maximum(knapsacks.full_costs, knapsacks.forward_costs).sum(axis=1)
    capacity = np.minimum(knapsacks.full_capacity + knapsacks.forward_capacity, most)
    codes = np.zeros(backward.shape, dtype=np.uint8)
    for some in in_parts(np.arange(len(codes)), knapsacks.order.shape[1], int(capacity.max(initial=0))):
        codes[some] = _searched(values[some], costs[some], capacity[some], knapsacks.order[some])
    return codes


def _searched(values: Ints, costs: Ints, capacity: Ints, order: Ints) -> Codes:
    at = np.arange(len(order))
    best = np.zeros((len(order), int(capacity.max()) + 1), dtype=np.int64)
    kinds = np.zeros((order.shape[1], *best.shape), dtype=np.int8)  # 1 full, 2 forward-only, 0 neither
    for step, item in enumerate(order.T):
        before = best
        for kind in (1, 2):
            taking = after(before, costs[at, kind - 1, item], values[at, kind - 1, item])
            kinds[step][taking > best] = kind
            best = np.maximum(best, taking)
    full, forward_only, left = _walked_back(kinds, costs, capacity, order)
    return _filled(full, forward_only, left, values, costs, order)


def _walked_back(kinds: NDArray[np.int8], costs: Ints, capacity: Ints, order: Ints) -> tuple[Bools, Bools, Ints]:
    at, left = np.arange(len(order)), capacity.copy()
    full, forward_only = np.zeros(order.shape, dtype=bool), np.zeros(order.shape, dtype=bool)
    for step in reversed(range(len(kinds))):
        item, kind = order[:, step], kinds[step, at, left]
        full[at, item], forward_only[at, item] = kind == 1, kind == 2
        left -= np.where(kind == 0, 0, costs[at, np.maximum(kind, 1) - 1, item])
    return full, forward_only, left


def _filled(full: Bools, forward_only: Bools, left: Ints, values: Ints, costs: Ints, order: Ints) -> Codes:
    now = np.where(forward_only, values[:, 1], 0)
    more = np.where(forward_only, costs[:, 0] - costs[:, 1], costs[:, 0])
    raised = take_in_order(order, np.maximum(more, 0), left, ~full & (values[:, 0] >= now))
    left = left - np.where(raised, np.maximum(more, 0), 0).sum(axis=1)
    full, forward_only = full | raised, forward_only & ~raised
    added = take_in_order(order, costs[:, 1], left, ~full & ~forward_only)
    return codes_of(full, forward_only | added)
