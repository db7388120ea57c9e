"""The order of batches: turns of owners, and the items that each turn consists of.

A *turn* is one initiator's ``local_iterations`` steps, or one owner's evaluation. A *round* is as many train turns as
there are owners: with equal turns every owner has one (``owner_turns``). The coordinator grants
turns; nodes expand them into *items*. An item is one pass of one batch through the ring; ``seq`` counts
all items of a run from 0, ``step`` counts optimizer steps only.

Source: RingAda, Algorithm 1 and section III-B.3.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.owner_turns import next_owner, owner_indices, turn_counts, turns_until_repeat, weights
from ringtune.schedule.unfreezing import NOTHING_KNOWN, Unfreezing

_MOST_FOLLOWED = 20_000
ITEMS_AHEAD = 16
"""Turns are granted until so many items are granted beyond the finished ones; a turn has at least one item."""


class StepKind(enum.StrEnum):
    """What a pass through the ring is for."""

    TRAIN = "train"  # forward, backward, update
    EVALUATE = "evaluate"  # forward and counts
    SCORE = "score"  # forward and backward of everything, no update (D2FT)
    MEASURE = "measure"  # forward and backward as at this step, no update
    CHECKPOINT = "checkpoint"  # every node saves what it trained; no batch passes

    @property
    def has_backward(self) -> bool:
        """Whether gradients flow."""
        return self in (StepKind.TRAIN, StepKind.SCORE, StepKind.MEASURE)

    @property
    def has_update(self) -> bool:
        """Whether weights change."""
        return self is StepKind.TRAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One owner's consecutive items.

    Attributes:
        index: counts all turns of a run from 0.
        kind: of every item of the turn.
        owner: the initiator.
        round: the round it belongs to.
        first_seq: ``seq`` of its first item.
        num_items: how many items.
        first_step: optimizer steps done before its first item.
        first_batch: index of its first batch in the owner's own stream of batches.
        unfreeze_at: all decisions of the run that hold for it, if the course leaves them to the run; whoever works
            on the turn goes by ``course.decided`` of them.
        operations: the table that holds for it, if the course leaves tables to the run; None as long as there is none.
    """

    index: int
    kind: StepKind
    owner: str
    round: int
    first_seq: int
    num_items: int
    first_step: int
    first_batch: int
    unfreeze_at: tuple[int, ...] = ()
    operations: Operations | None = None

    @property
    def end_step(self) -> int:
        """Optimizer steps done after the turn."""
        return self.first_step + (self.num_items if self.kind.has_update else 0)

    @property
    def end_seq(self) -> int:
        """``seq`` of the first item after the turn."""
        return self.first_seq + self.num_items


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPoint:
    """Where a run begins, or goes on after a checkpoint.

    Attributes:
        step: optimizer steps done; at a turn boundary.
        holder: the owner that has the head.
        unfreezing: what the coordinator knows of the losses, if the course leaves unfreezing to the run.
    """

    step: int
    holder: str
    unfreezing: Unfreezing = NOTHING_KNOWN

    @staticmethod
    def of(course: Course, *, step: int = 0, holder: str = "", unfreezing: Unfreezing = NOTHING_KNOWN) -> StartPoint:
        """Make a start point that fits the course; by default the very beginning of the run.

        Raises:
            PlanError: the step is not at a turn boundary, or the holder is no owner.
        """
        if not 0 <= step <= course.num_steps or (step % course.local_iterations and step != course.num_steps):
            raise PlanError(
                f"step {step} is not at a turn boundary of {course.local_iterations} steps within {course.num_steps}"
            )
        holder = holder or holder_after(course, course.local_iterations)
        if course.owner(holder) is None:
            raise PlanError(f"node {holder!r} is no owner of the run, so it can't hold the head")
        return StartPoint(step=step, holder=holder, unfreezing=unfreezing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One batch's pass through the ring.

    Attributes:
        seq: position among all items of the run.
        step: for a train item its own step; otherwise the number of steps done before it.
        batch: index in the owner's stream of batches (training) or of evaluation batches.
        rows: rows of the batch.
        turn: index of its turn.
    """

    seq: int
    kind: StepKind
    step: int
    owner: str
    batch: int
    rows: int
    turn: int


def items(course: Course, turn: Turn) -> tuple[Item, ...]:
    """Expand a turn into its items."""
    return tuple(item_of(course, turn, offset) for offset in range(turn.num_items))


def item_of(course: Course, turn: Turn, offset: int) -> Item:
    """The item at position ``offset`` of a turn, counted from 0."""
    batch, rows, owner = turn.first_batch + offset, course.batch_size, course.owner(turn.owner)
    if turn.kind is StepKind.EVALUATE:
        rows = min(rows, (owner.eval_rows if owner else 0) - batch * rows)
    elif owner is not None:
        rows = course.batch_rows(owner)
    return Item(
        seq=turn.first_seq + offset,
        kind=turn.kind,
        step=turn.first_step + (offset if turn.kind.has_update else 0),
        owner=turn.owner,
        batch=batch,
        rows=rows,
        turn=turn.index,
    )


def turn_sequence(course: Course, *, start: StartPoint | None = None) -> Iterator[Turn]:
    """Yield all turns of a run in order: rounds of train turns, checkpoints and evaluations between.

    A checkpoint or an evaluation comes after the turn in which a multiple of ``checkpoint_every`` or
    ``eval_every`` steps was passed; both come at the end too. The checkpoint is first; the evaluation starts
    at the owner that holds the head, then follows the initiator order. A course of no steps is one evaluation.

    Args:
        course: of the run.
        start: continue a run from there. Indices and ``seq`` count from 0 again; the evaluation that was due
            at that step is repeated.

    Raises:
        PlanError: ``start`` is not at a turn boundary of this course.
    """
    start = start or StartPoint.of(course)
    last: Turn | None = None
    step = start.step
    num_turns = -(-step // course.local_iterations)
    before = max(0, step - 1 - (step - 1) % course.local_iterations)
    if (step or not course.num_steps) and _evaluation_is_due(course, before, step):
        evaluation = _evaluation(course, step, start.holder, max(0, num_turns - 1) // len(course.owners), last)
        yield from evaluation
        last = evaluation[-1] if evaluation else last
    own = weights(course.owners, course.turns)
    counts, order = turn_counts(own, num_turns), owner_indices(own, num_turns)
    while step < course.num_steps:
        round_index, position = num_turns // len(course.owners), next(order)
        last = _next_turn(
            last,
            kind=StepKind.TRAIN,
            owner=course.owners[position].node,
            round=round_index,
            num_items=min(course.local_iterations, course.num_steps - step),
            first_step=step,
            first_batch=counts[position] * course.local_iterations,
        )
        yield last
        before, step, holder = step, last.end_step, last.owner
        if _checkpoint_is_due(course, before, step):
            last = checkpoint_turn(last, holder=holder)
            yield last
        if _evaluation_is_due(course, before, step):
            evaluation = _evaluation(course, step, holder, round_index, last)
            yield from evaluation
            last = evaluation[-1] if evaluation else last
        num_turns += 1
        counts[position] += 1


def holder_after(course: Course, step: int) -> str:
    """The owner of the train turn that ends at ``step``, which is above 0: it has the head then.

    The owner of the first turn has it from the very beginning.

    Example: turns of 10 steps by owners a, b, c. After 40 steps, which are turns 0 to 3, a has the head.
    """
    own = weights(course.owners, course.turns)
    return course.owners[next_owner(own, turn_counts(own, -(-step // course.local_iterations) - 1))].node


@functools.lru_cache(maxsize=256)
def hand_overs(course: Course, start: StartPoint) -> frozenset[tuple[str, str]]:
    """Every pair of owners such that the head goes from the first to the second.

    Example: with owners a to d it goes a to b, b to c, c to d and d to a. An evaluation after the turn of b visits
    b, c, d and a, and the next turn is that of c, so that the head goes a to c too. If evaluations come between, one is
    counted after each owner's turn: a few pairs more than a short run needs. Where turns by rows repeat themselves
    only after very many turns, these are all pairs.
    """
    names, own = [owner.node for owner in course.owners], weights(course.owners, course.turns)
    done, stop = (-(-step // course.local_iterations) for step in (start.step, course.num_steps))
    num_turns = min(stop - done, turns_until_repeat(own))
    if num_turns > _MOST_FOLLOWED:
        return frozenset(itertools.permutations(names, 2))
    order = [names[index] for index in itertools.islice(owner_indices(own, done), min(stop - done, num_turns + 1))]
    followed = set(itertools.pairwise(order))
    first = {(start.holder, following) for following in order[:1]}
    evaluated = {*(followed if course.eval_every else ()), *(first if start.step else ())}
    holders = {holder for holder, _ in evaluated}
    holders.add(holder_after(course, course.num_steps) if order else start.holder)
    pairs, ends = followed | first, dict[str, str]()
    for holder in holders:
        way = [holder, *(owner.node for owner in _visited(course, holder))]
        pairs.update(itertools.pairwise(way))
        ends[holder] = way[-1]
    pairs.update((ends[holder], following) for holder, following in evaluated)
    return frozenset((source, target) for source, target in pairs if source != target)


def checkpoint_turn(last: Turn, *, holder: str) -> Turn:
    """The turn after ``last`` in which every node saves; ``holder`` has the head."""
    return _next_turn(
        last,
        kind=StepKind.CHECKPOINT,
        owner=holder,
        round=last.round,
        num_items=1,
        first_step=last.end_step,
        first_batch=0,
    )


def _next_turn(
    last: Turn | None,
    *,
    kind: StepKind,
    owner: str,
    round: int,  # noqa: A002 - the word of the protocol
    num_items: int,
    first_step: int,
    first_batch: int,
) -> Turn:
    return Turn(
        index=last.index + 1 if last else 0,
        kind=kind,
        owner=owner,
        round=round,
        first_seq=last.end_seq if last else 0,
        num_items=num_items,
        first_step=first_step,
        first_batch=first_batch,
        unfreeze_at=last.unfreeze_at if last else (),
        operations=last.operations if last else None,
    )


def _passes_multiple(every: int, before: int, after: int) -> bool:
    return every > 0 and before // every != after // every


def _checkpoint_is_due(course: Course, before: int, after: int) -> bool:
    return course.checkpoint_every > 0 and (
        after == course.num_steps or _passes_multiple(course.checkpoint_every, before, after)
    )


def _evaluation_is_due(course: Course, before: int, after: int) -> bool:
    return after == course.num_steps or _passes_multiple(course.eval_every, before, after)


def _visited(course: Course, holder: str) -> list[Owner]:
    """The owners that evaluate, from the holder of the head on."""
    first = next((index for index, owner in enumerate(course.owners) if owner.node == holder), 0)
    return [owner for owner in course.owners[first:] + course.owners[:first] if owner.eval_rows]


def _evaluation(course: Course, step: int, holder: str, round_index: int, last: Turn | None) -> list[Turn]:
    turns: list[Turn] = []
    for owner in _visited(course, holder):
        last = _next_turn(
            last,
            kind=StepKind.EVALUATE,
            owner=owner.node,
            round=round_index,
            num_items=course.eval_batches(owner),
            first_step=step,
            first_batch=0,
        )
        turns.append(last)
    return turns
