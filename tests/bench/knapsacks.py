"""How long the knapsacks take, how evenly they load the boards, and what choosing in two stages costs."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import BlockScores, Operations
from ringtune.techniques.knapsacks import Codes, Knapsacks, choose_table, joint, two_stage
from ringtune.techniques.operation_capacities import HostCost, balanced, spread
from tests.support.operation_choices import choosing_course

Floats = NDArray[np.float64]
TRIES: Final = 7
ODD_FORWARD: Final = 0.4123
"""A forward's share of a full operation that is no small fraction, which the joint choice takes longest for."""
SIZES: Final = {"knapsack_144x5_s": (24, 6, 5, 1), "knapsack_1152x20_s": (96, 12, 20, 1)}
"""Blocks, subnets of each, micro-batches, and batches."""
WHOLE_JOB: Final = (12, 6, 4, 600)
INSTANCES: Final = 2000


def knapsack_seconds() -> dict[str, float]:
    """Wall seconds of one table with unequal scores, from reported scores to operations, the quickest of some tries.

    ``_searched`` is with micro-batches of unequal rows, which need a search; ``_joint`` is the joint choice.
    """
    found = {}
    for name, size in SIZES.items():
        found[name] = _seconds(size)
        found[f"{name}_searched"] = _seconds(size, uneven=True)
        found[f"{name}_joint"] = _seconds(size, policy="joint")
    found["knapsack_job_600x72x4_s"] = _seconds(WHOLE_JOB, tries=1)
    found["knapsack_job_600x72x4_s_joint"] = _seconds(WHOLE_JOB, tries=1, policy="joint")
    return found


def workload_variance() -> dict[str, float]:
    """The variance of a subnet's work, as a share of its whole work for a batch, with equal boards at 60 % compute."""
    found = {}
    for policy in ("two-stage", "random", "magnitude", "magnitude-gradient"):
        course = choosing_course(full=3, microbatches=5, subnets=6, num_blocks=12, policy=policy)
        found[policy] = _variance(choose_table(course, _scores(course)))
    return found


def hetero_busy_spread() -> dict[str, float]:
    """How far busy seconds of two boards of speed 1 : 2 lie apart, with counts chosen at 60 % compute."""
    found = {}
    for microbatches in (8, 10):
        boards = [
            HostCost(node="slow", blocks=6, full_s=1.0, forward_s=0.4),
            HostCost(node="fast", blocks=6, full_s=0.5, forward_s=0.2),
        ]
        found[f"{microbatches} micro-batches"] = spread(boards, balanced(boards, microbatches, 0.6 * microbatches * 12))
    return found


def cost_of_decoupling() -> dict[str, dict[str, float]]:
    """What two stages lose of the joint optimum, as a share of it, over random instances; forward scores count alike.

    Each instance has 5 micro-batches, C^pf for 1 to 4 full operations and C^po for some of the rest.
    """
    return {
        "equal costs": _lost(unequal=False, scale=1.0),
        "unequal costs": _lost(unequal=True, scale=1.0),
        "equal costs, forward scores count a tenth": _lost(unequal=False, scale=0.1),
        "unequal costs, forward scores count a tenth": _lost(unequal=True, scale=0.1),
    }


def _seconds(
    size: tuple[int, int, int, int], *, policy: str = "two-stage", uneven: bool = False, tries: int = TRIES
) -> float:
    blocks, subnets, microbatches, batches = size
    course = choosing_course(
        full=0.6 * microbatches,
        forward_only=1,
        microbatches=microbatches,
        subnets=subnets,
        num_blocks=blocks,
        size=4,
        train_rows=4 * microbatches * batches - (1 if uneven else 0),
        policy=policy,
        backward_score="taylor",
        forward=ODD_FORWARD,
    )
    scores, taken = _scores(course), []
    for _ in range(tries):
        start = time.perf_counter()
        choose_table(course, scores)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _scores(course: Course) -> list[BlockScores]:
    rng, choice = random.Random(0), course.choice
    assert choice is not None
    owner = course.owners[0]
    batches, micros = -(-owner.train_rows // course.batch_size), len(course.microbatch_sizes(course.batch_rows(owner)))
    return [
        BlockScores(
            owner.node,
            batch,
            micro,
            block,
            tuple(tuple(rng.random() for _ in range(choice.subnets)) for _ in choice.scores),
        )
        for batch in range(batches)
        for micro in range(micros)
        for block in range(course.num_blocks)
    ]


def _variance(table: Operations) -> float:
    columns = [column for batch in table.batches for column in zip(*batch.rows, strict=True)]
    return float(np.var([column.count("1") / len(column) for column in columns]))


def _lost(*, unequal: bool, scale: float) -> dict[str, float]:
    rng = np.random.default_rng(0)
    shape = (INSTANCES, 5)
    forward_costs = rng.integers(2, 7, shape) if unequal else np.full(shape, 4)
    full_costs = forward_costs + (rng.integers(3, 10, shape) if unequal else np.full(shape, 6))
    full, forward_only = rng.integers(1, 5, INSTANCES), rng.integers(0, 4, INSTANCES)
    knapsacks = Knapsacks(
        full_costs=full_costs,
        forward_costs=forward_costs,
        full_capacity=full * 10,
        forward_capacity=np.minimum(forward_only, 5 - full) * 4,
        order=np.tile(np.arange(5), (INSTANCES, 1)),
    )
    backward, forward = rng.random(shape), rng.random(shape)
    worth = [_worth(each, backward, scale * forward) for each in (
        two_stage(knapsacks, backward, forward), joint(knapsacks, backward, forward, scale)
    )]  # fmt: skip
    lost = 1 - worth[0] / worth[1]
    return {"mean": float(lost.mean()), "worst": float(lost.max()), "share_without_loss": float((lost < 1e-9).mean())}


def _worth(codes: Codes, backward: Floats, forward: Floats) -> Floats:
    worth: Floats = np.where(codes == ord("1"), backward, np.where(codes == ord("2"), forward, 0)).sum(axis=1)
    return worth


def main() -> int:
    """Measure and print."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for measure in (knapsack_seconds, workload_variance, hetero_busy_spread, cost_of_decoupling):
        print(json.dumps({measure.__name__: measure()}, indent=2))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
