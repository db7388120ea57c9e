"""What nodes reported, as arrays; whatever is missing, twice, or no number is refused by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.operations.choice import Choice
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.rows.batches import num_batches
from ringtune.schedule.spreading.choosers import Chooser

Scores = NDArray[np.float64]
"""Batches by micro-batches by blocks by scores by subnets."""


class Batches(NamedTuple):
    """The batches of one owner.

    Attributes:
        owner: whose.
        num_batches: how many it has.
        sizes: rows of each micro-batch.
    """

    owner: str
    num_batches: int
    sizes: tuple[int, ...]


def batches_of(course: Course) -> list[Batches]:
    """The batches of each owner of a course, in the order of its owners."""
    return [
        Batches(
            owner=owner.node,
            num_batches=num_batches(owner.train_rows, course.batch_size),
            sizes=course.microbatch_sizes(course.batch_rows(owner)),
        )
        for owner in course.owners
    ]


def scores_by_owner(course: Course, choosers: Sequence[Chooser], scores: Sequence[BlockScores]) -> dict[str, Scores]:
    """The scores of each owner, as an array; 0 for blocks that choose nothing.

    Raises:
        PlanError: a score is missing, stands twice, is of no batch or block of the course, or is no number of at least
            0; names owner, batch, micro-batch, block and subnet.
    """
    needed = sorted({block for chooser in choosers for block in range(chooser.start, chooser.stop)})
    rows: dict[str, list[BlockScores]] = {owner.node: [] for owner in course.owners}
    for entry in scores:
        if entry.owner not in rows:
            raise PlanError(f"{_name(entry)} are of no owner of this run; it has {', '.join(rows)}")
        rows[entry.owner].append(entry)
    return {batches.owner: _array(course, batches, needed, rows[batches.owner]) for batches in batches_of(course)}


def _array(course: Course, batches: Batches, needed: Sequence[int], entries: Sequence[BlockScores]) -> Scores:
    choice = course.choice
    if choice is None:
        raise PlanError("scores came for a run that chooses no operations; use one version on all machines")
    limits = (batches.num_batches, len(batches.sizes), course.num_blocks)
    for entry in entries:
        _check_entry(entry, choice, limits)
    where = np.array([entry[1:4] for entry in entries], dtype=np.int64).reshape(-1, 3)
    seen = np.zeros(limits, dtype=np.int64)
    np.add.at(seen, tuple(where.T), 1)
    _check_seen(batches.owner, seen, needed, _scored(course, batches.owner))
    found = np.zeros((*limits, len(choice.scores), choice.subnets))
    found[tuple(where.T)] = np.array([entry.values for entry in entries]).reshape(-1, *found.shape[3:])
    _check_numbers(batches.owner, found, choice)
    if not (choice.prunes or any(score.needs_gradient for score in choice.scores)):
        found[:] = found[_scored(course, batches.owner)[0]]  # of weights alone: all batches are alike
    return found


def _check_entry(entry: BlockScores, choice: Choice, limits: tuple[int, int, int]) -> None:
    for name, value, limit in zip(("batch", "micro-batch", "block"), entry[1:4], limits, strict=True):
        if not 0 <= value < limit:
            raise PlanError(f"{_name(entry)} are of no {name} of this run, which has {limit}; plan anew")
    if len(entry.values) != len(choice.scores) or any(len(value) != choice.subnets for value in entry.values):
        shape = f"{len(entry.values)} times {len(entry.values[0]) if entry.values else 0} numbers"
        raise PlanError(
            f"{_name(entry)} are {shape}, it has to be {len(choice.scores)} scores of {choice.subnets} subnets; use "
            "one version on all machines"
        )


def _scored(course: Course, node: str) -> list[int]:
    """The batches of an owner that are scored."""
    owner = course.owner(node)
    return sorted(course.batch_id(node, at) for at in range(course.num_scored(owner) if owner else 0))


def _check_seen(owner: str, seen: NDArray[np.int64], needed: Sequence[int], scored: Sequence[int]) -> None:
    missing = np.zeros(seen.shape, dtype=bool)
    missing[np.ix_(scored, range(seen.shape[1]), needed)] = True
    for wrong, text in ((missing & (seen == 0), "are missing"), (seen > 1, "stand twice")):
        if wrong.any():
            batch, micro, block = (int(each[0]) for each in np.nonzero(wrong))
            name = _name(BlockScores(owner, batch, micro, block, ()))
            raise PlanError(f"{name} {text}; use one version on all machines, and start the run anew")


def _check_numbers(owner: str, found: Scores, choice: Choice) -> None:
    wrong = ~(np.isfinite(found) & (found >= 0))
    if not wrong.any():
        return
    batch, micro, block, score, subnet = (int(each[0]) for each in np.nonzero(wrong))
    value = float(found[batch, micro, block, score, subnet])
    why = "below 0" if math.isfinite(value) else "no finite number"
    raise PlanError(
        f"{_name(BlockScores(owner, batch, micro, block, ()))}, subnet {subnet}: {choice.scores[score]} is {value}, "
        f"which is {why}; look at the rows of {owner} and at the weights of the model; nothing was trained with it"
    )


def _name(entry: BlockScores) -> str:
    return f"scores of owner {entry.owner}, batch {entry.batch_id}, micro-batch {entry.micro}, block {entry.block}"
