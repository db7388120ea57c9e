"""Choose full operations first, then forward-only ones among the rest: D2FT's two stages, for many subnets at once.

Stage one takes full operations by their backward scores under C^pf, at c^f + c^b each. Stage two takes forward-only
ones by their forward scores under C^po, at c^f each. Equation 5 allows one operation for a micro-batch, so stage two
chooses among those that stage one left: three full and one forward-only of five are just that.

Source: D2FT, equations 5 to 8 and Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.planner.knapsacks.packing import Ints, packed, whole_values
from ringtune.schedule.operations.codes import FORWARD_ONLY, FULL, SHORTCUT

Codes = NDArray[np.uint8]
"""Operations as the numbers of their characters."""


class Knapsacks(NamedTuple):
    """K knapsacks over N micro-batches, in whole numbers.

    Attributes:
        full_costs: of a full operation for each micro-batch, K by N.
        forward_costs: of a forward-only one.
        full_capacity: C^pf of each knapsack, K.
        forward_capacity: C^po of each.
        order: the micro-batches of each in the order of preference where scores tie, K by N.
    """

    full_costs: Ints
    forward_costs: Ints
    full_capacity: Ints
    forward_capacity: Ints
    order: Ints


def two_stage(knapsacks: Knapsacks, backward: NDArray[np.float64], forward: NDArray[np.float64]) -> Codes:
    """The operations of each knapsack, by D2FT's two stages.

    Args:
        knapsacks: costs, capacities, and order.
        backward: what a full operation is worth for each micro-batch, K by N.
        forward: what a forward-only one is worth.
    """
    full_costs, forward_costs, full_capacity, forward_capacity, order = knapsacks
    every = np.ones(order.shape, dtype=bool)
    full = packed(whole_values(backward), full_costs, full_capacity, order, every)
    forward_only = packed(whole_values(forward), forward_costs, forward_capacity, order, ~full)
    return codes_of(full, forward_only)


def codes_of(full: NDArray[np.bool_], forward_only: NDArray[np.bool_]) -> Codes:
    """The operations where these are full, those forward-only, and all others shortcuts."""
    rest = np.where(forward_only, ord(FORWARD_ONLY), ord(SHORTCUT))
    return np.where(full, ord(FULL), rest).astype(np.uint8)
