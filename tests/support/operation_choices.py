"""Courses that choose their operation tables, and scores for them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import BlockCapacity, BlockScores, Choice
from tests.support.plans import make_plan


def choosing_course(
    *,
    full: float,
    microbatches: int,
    num_blocks: int,
    forward_only: float = 0.0,
    subnets: int = 1,
    size: int = 2,
    policy: str = "two-stage",
    groups: tuple[tuple[int, ...], ...] = (),
    frozen_blocks: int = 0,
    train_rows: int = 0,
    owners: int = 1,
    forward: float = 0.4,
    **choice: object,
) -> Course:
    """A course whose subnets are full for so many micro-batches of ``size`` rows, and forward-only for more.

    A forward is 0.4 of a full operation, or ``forward``. Each owner has two batches, or ``train_rows`` rows.
    """
    batch_size = size * microbatches
    names = [f"node-{at}" for at in range(owners)]
    plan = make_plan(
        [(names[0], frozen_blocks, num_blocks)],
        names,
        num_blocks=num_blocks,
        microbatches=microbatches,
        batch_size=batch_size,
        train_rows=train_rows or 2 * batch_size,
        private_blocks=frozen_blocks,
        method="all",
    )
    capacity = BlockCapacity(
        full=full * size, forward_only=forward * forward_only * size, forward=forward, backward=1 - forward
    )
    made = Choice(policy=policy, subnets=subnets, groups=groups, capacities=(capacity,), **choice)  # type: ignore[arg-type]
    return dataclasses.replace(plan.course, choice=made)


def made_scores(course: Course, value: Callable[[BlockScores, int, int], float]) -> list[BlockScores]:
    """Scores of every micro-batch and block of a course."""
    choice, found = course.choice, []
    assert choice is not None
    for owner in course.owners:
        for batch_id in range(num_batches(owner.train_rows, course.batch_size)):
            for micro in range(len(course.microbatch_sizes(course.batch_rows(owner)))):
                for block in range(course.frozen_blocks, course.num_blocks):
                    entry = BlockScores(owner.node, batch_id, micro, block, ())
                    values = tuple(
                        tuple(value(entry, score, subnet) for subnet in range(choice.subnets))
                        for score in range(len(choice.scores))
                    )
                    found.append(entry._replace(values=values))
    return found


def random_scores(course: Course) -> list[BlockScores]:
    """Scores drawn from a seed."""
    rng = random.Random(0)
    return made_scores(course, lambda _entry, _score, _subnet: rng.random())
