"""What D2FT is compared with: operations drawn by lot, and whole subnets pruned.

Random: each subnet draws which micro-batches are full and which forward-only, with the counts that its capacities
allow. Pruning: the subnets that count least are passed by for all micro-batches until the next choice; the budget is
over all subnets, so that some nodes may have nothing to do. Magnitude counts a subnet's weights. Magnitude-gradient
counts the sum of weights and gradients, each as a share of its mean over all subnets, because a sum of two measures
needs one scale.

Source: D2FT, section III-A (baselines). Sum: Sokar et al., Where to pay attention in sparse training for feature
selection, whose importance is a weighted sum of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.planner.knapsacks.packing import Bools, Ints, take_in_order
from coordinator.planner.knapsacks.two_stage import Codes, Knapsacks, codes_of
from ringtune.errors import PlanError
from ringtune.schedule.spreading.choosers import Chooser, whole


def drawn(knapsacks: Knapsacks, *, seed: int, owner: str, step: int) -> Codes:
    """The operations that each subnet draws for one owner's batches.

    The lots are keyed by seed, owner and step of the decision, and counted on by batch, subnet and micro-batch.
    """
    digest = hashlib.sha256(f"operations/{seed}/{owner}/{step}".encode()).digest()
    lots = np.random.Philox(key=int.from_bytes(digest[:16], "big")).random_raw(knapsacks.order.size)
    order: Ints = np.argsort(np.reshape(lots, knapsacks.order.shape), axis=1, kind="stable")
    every = np.ones(order.shape, dtype=bool)
    full = take_in_order(order, knapsacks.full_costs, knapsacks.full_capacity, every)
    forward_only = take_in_order(order, knapsacks.forward_costs, knapsacks.forward_capacity, ~full)
    return codes_of(full, forward_only)


def kept(choosers: Sequence[Chooser], scores: NDArray[np.float64], most: float) -> Bools:
    """Which choosers pruning keeps.

    Args:
        choosers: all that choose.
        scores: of each chooser by each of the policy's scores, summed over its blocks and all micro-batches.
        most: subnets that may stay; each block of a group counts as one.

    Raises:
        PlanError: none may stay.
    """
    blocks = np.array([chooser.stop - chooser.start for chooser in choosers])
    each = scores / blocks[:, None]
    mean = each.mean(axis=0)
    worth = (each / np.where(mean > 0, mean, 1)).sum(axis=1)
    order: Ints = np.argsort(-worth, kind="stable")[None]
    every = np.ones(order.shape, dtype=bool)
    found: Bools = take_in_order(order, blocks[None], np.array([whole(most, 1)]), every)[0]
    if not found.any():
        raise PlanError(f"pruning may keep {most:.2g} of {blocks.sum()} subnets, so none; raise operations.compute")
    return found
