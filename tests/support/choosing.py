"""Runs that choose their operation tables: choices to draw, and scores and tables that any seed gives."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import BatchOperations, BlockCapacity, BlockScores, Choice, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.techniques.operations import score_keys
from tests.support.plans import make_plan

CAPACITY = BlockCapacity(full=2.0, forward_only=1.0, forward=0.4, backward=0.6)


def make_choice(policy: str = "two-stage", *, subnets: int = 2, refresh_steps: int = 0, **changes: Any) -> Choice:
    """A choice with one capacity for all blocks."""
    return Choice(policy=policy, subnets=subnets, capacities=(CAPACITY,), refresh_steps=refresh_steps, **changes)


def random_choice(rng: random.Random) -> Choice:
    """Any policy, with or without scores, once or refreshed."""
    policy = rng.choice(["two-stage", "joint", "random", "magnitude", "magnitude-gradient"])
    subnets, refresh_steps, scored = rng.choice([1, 2, 3]), rng.choice([0, 1, 3, 5]), rng.choice(["base", "adapter"])
    return make_choice(policy, subnets=subnets, refresh_steps=refresh_steps, scored_weights=scored)


def table_of(course: Course, seed: object) -> Operations:
    """Any table that fits a course: a function of the seed."""
    rng = random.Random(f"{seed}")
    subnets = course.choice.subnets if course.choice is not None else 1
    batches = [
        BatchOperations(
            owner=owner.node,
            batch_id=batch_id,
            rows=tuple(
                "".join(rng.choice("1123") for _ in range(course.num_blocks * subnets))
                for _ in range(course.microbatches)
            ),
        )
        for owner in course.owners
        for batch_id in range(-(-owner.train_rows // course.batch_size))
    ]
    return Operations(batches=tuple(batches), subnets=subnets)


class DrawnTables:
    """Scores that depend on what they are of and on the step; tables that depend on the step and on every score."""

    def __init__(self, plan: Plan, seed: object = 0) -> None:
        self._plan, self._seed = plan, seed
        self.asked: list[int] = []

    def scores(self, part: Plan, node: str, turn: Turn) -> tuple[BlockScores, ...]:
        """A number of its own for everything that the node owes, in any order."""
        choice = self._plan.course.choice
        if choice is None:
            return ()
        found = []
        for key in score_keys(part, turn, node):
            rng = random.Random(f"{self._seed}/{turn.owner}/{key}/{turn.first_step}")
            values = tuple(tuple(rng.random() for _ in range(choice.subnets)) for _ in choice.scores)
            found.append(BlockScores(turn.owner, *key, values))
        return tuple(sorted(found, key=lambda entry: entry.values))

    def table(self, step: int, scores: Sequence[BlockScores]) -> Operations:
        """A table that another score, or another order of the scores, would change."""
        self.asked.append(step)
        return table_of(self._plan.course, f"{self._seed}/{step}/{scores}")


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
    **choice: object,
) -> Course:
    """A course whose subnets are full for so many micro-batches of ``size`` rows, and forward-only for more.

    A forward is 0.4 of a full operation. Each owner has two batches, or ``train_rows`` rows.
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
    capacity = BlockCapacity(full=full * size, forward_only=0.4 * forward_only * size, forward=0.4, backward=0.6)
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
