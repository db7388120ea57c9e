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
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.owner_turns import next_owner, owner_indices, turn_counts, turns_until_repeat, weights
from ringtune.schedule.passage import WHOLE, Passage, passage_at
from ringtune.schedule.turns.boundaries import checkpoint_is_due, evaluation_is_due, scores_are_due
from ringtune.schedule.turns.early_stop import NONE_DONE, Evaluations
from ringtune.schedule.turns.unfreezing import NOTHING_KNOWN, Unfreezing

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
    """The consecutive items of one owner.

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
        passages: where each of its items enters the ring and is kept; none = every item is embedded and not kept.
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
    passages: tuple[Passage, ...] = ()

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
    """Where a run begins, goes on after a checkpoint, or goes on after it moved to its next placement.

    Attributes:
        step: optimizer steps done; at a turn boundary.
        holder: the owner that has the head.
        unfreezing: what the coordinator knows of the losses, if the course leaves unfreezing to the run.
        operations: the table in force there, if the course leaves tables to the run; only the coordinator has to know.
        evaluations: what is known of the evaluations before it; only the coordinator has to know.
        first_turn: index of the first turn after it: 0, unless the run moved.
        first_seq: ``seq`` of the first item after it.
        placement_number: of the placement that holds there.
        repeats: kinds of turns that were due at this step and are not committed, so that they come first.
    """

    step: int
    holder: str
    unfreezing: Unfreezing = NOTHING_KNOWN
    operations: Operations | None = None
    evaluations: Evaluations = NONE_DONE
    first_turn: int = 0
    first_seq: int = 0
    placement_number: int = 0
    repeats: tuple[StepKind, ...] = ()

    @staticmethod
    def of(
        course: Course,
        *,
        step: int = 0,
        holder: str = "",
        unfreezing: Unfreezing = NOTHING_KNOWN,
        operations: Operations | None = None,
        evaluations: Evaluations = NONE_DONE,
        placement_number: int = 0,
    ) -> StartPoint:
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
        return StartPoint(
            step=step,
            holder=holder,
            unfreezing=unfreezing,
            operations=operations,
            evaluations=evaluations,
            placement_number=placement_number,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One batch's pass through the ring.

    Attributes:
        seq: position among all items of the run.
        step: for a train item its own step; otherwise the number of steps done before it.
        batch: index in the owner's stream of batches (training) or of evaluation batches.
        rows: rows of the batch.
        turn: index of its turn.
        passage: where it enters the ring, and where it is kept for a later visit.
    """

    seq: int
    kind: StepKind
    step: int
    owner: str
    batch: int
    rows: int
    turn: int
    passage: Passage = WHOLE


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
        passage=passage_at(turn.passages, offset),
    )


def turn_sequence(course: Course, *, start: StartPoint | None = None) -> Iterator[Turn]:
    """Yield all turns of a run in order: rounds of train turns, checkpoints and evaluations between.

    A checkpoint or an evaluation comes after the turn in which a multiple of ``checkpoint_every`` or
    ``eval_every`` steps was passed; both come at the end too. The checkpoint is first; the evaluation starts
    at the owner that holds the head, then follows the initiator order. A course of no steps is one evaluation.
    Where the run chooses operation tables by scores, every owner has a score turn before the train turn that begins
    with a new table; they too start at the owner that holds the head.

    Args:
        course: of the run.
        start: continue a run from there. After a checkpoint indices and ``seq`` count from 0 again, and the evaluation
            that was due at that step is repeated; after a move neither, but for what the start says.

    Raises:
        PlanError: ``start`` is not at a turn boundary of this course.
    """
    start = start or StartPoint.of(course)
    last: Turn | None = None
    step = start.step
    num_turns = -(-step // course.local_iterations)
    round_index = max(0, course.turns_of_owners(num_turns) - 1) // len(course.owners)
    if StepKind.CHECKPOINT in start.repeats:
        last = _next_turn(
            None, start, kind=StepKind.CHECKPOINT, owner=start.holder, round=round_index, num_items=1, first_step=step
        )
        yield last
    is_resumed = start.first_turn == 0 and (step or not course.num_steps) and evaluation_is_due(course, step)
    if is_resumed or StepKind.EVALUATE in start.repeats:
        last = yield from _visits(StepKind.EVALUATE, course, step, start.holder, round_index, last, start)
    own = weights(course.owners, course.turns)
    num_turns = course.turns_of_owners(num_turns)
    counts, order = turn_counts(own, num_turns), owner_indices(own, num_turns)
    while step < course.num_steps:
        round_index, position = num_turns // len(course.owners), next(order)
        if scores_are_due(course, step):
            holder = last.owner if last else start.holder
            last = yield from _visits(StepKind.SCORE, course, step, holder, round_index, last, start)
        last = _next_turn(
            last,
            start,
            kind=StepKind.TRAIN,
            owner=course.owners[position].node,
            round=round_index,
            num_items=min(course.local_iterations, course.num_steps - step),
            first_step=step,
            first_batch=counts[position] * course.local_iterations,
        )
        yield last
        step, holder = last.end_step, last.owner
        if checkpoint_is_due(course, step):
            last = checkpoint_turn(last, holder=holder)
            yield last
        if evaluation_is_due(course, step):
            last = yield from _visits(StepKind.EVALUATE, course, step, holder, round_index, last)
        num_turns += 1
        counts[position] += 1


def holder_after(course: Course, step: int) -> str:
    """The owner of the train turn that ends at ``step``, which is above 0: it has the head then.

    The owner of the first turn has it from the very beginning.

    Example: turns of 10 steps by owners a, b, c. After 40 steps, which are turns 0 to 3, a has the head.
    """
    own = weights(course.owners, course.turns)
    num_turns = max(1, course.turns_of_owners(-(-step // course.local_iterations)))
    return course.owners[next_owner(own, turn_counts(own, num_turns - 1))].node


@functools.lru_cache(maxsize=256)
def hand_overs(course: Course, start: StartPoint) -> frozenset[tuple[str, str]]:
    """Every pair of owners such that the head goes from the first to the second.

    Example: with owners a to d it goes a to b, b to c, c to d and d to a. An evaluation after the turn of b visits
    b, c, d and a, and the next turn is that of c, so that the head goes a to c too. If evaluations or scores come
    between, they are counted after each owner's turn: a few pairs more than a short run needs. Where turns by rows
    repeat themselves only after very many turns, these are all pairs.
    """
    names, own = [owner.node for owner in course.owners], weights(course.owners, course.turns)
    ends = (-(-step // course.local_iterations) for step in (start.step, course.num_steps))
    done, stop = map(course.turns_of_owners, ends)
    num_turns = min(stop - done, turns_until_repeat(own))
    if num_turns > _MOST_FOLLOWED:
        return frozenset(itertools.permutations(names, 2))
    order = [names[index] for index in itertools.islice(owner_indices(own, done), min(stop - done, num_turns + 1))]
    has_scores = course.choice is not None and bool(course.choice.scores)
    is_refreshed = has_scores and bool(course.choice and course.choice.refresh_steps)
    ways = [_ways(course, start.holder, order[:1], evaluates=bool(start.step), scores=has_scores)]
    for holder, following in set(itertools.pairwise(order)):
        ways.append(_ways(course, holder, [following], evaluates=bool(course.eval_every), scores=is_refreshed))
    last = holder_after(course, course.num_steps) if order else start.holder
    ways.append(_ways(course, last, [], evaluates=True, scores=False))
    pairs = {pair for way in itertools.chain.from_iterable(ways) for pair in itertools.pairwise(way)}
    return frozenset((source, target) for source, target in pairs if source != target)


def _ways(course: Course, holder: str, following: list[str], *, evaluates: bool, scores: bool) -> list[list[str]]:
    """The ways that the head may take from its holder to the next train turn, if there is one.

    Without anything between, after an evaluation, after scores, and after both.
    """
    ways = [[holder]]
    if evaluates:
        ways.append([holder, *(owner.node for owner in _visited(StepKind.EVALUATE, course, holder))])
    if scores:
        ways += [[*way, *(owner.node for owner in _visited(StepKind.SCORE, course, way[-1]))] for way in ways]
    return [[*way, *following] for way in ways]


def checkpoint_turn(last: Turn, *, holder: str) -> Turn:
    """The turn after ``last`` in which every node saves; ``holder`` has the head."""
    return _next_turn(
        last,
        kind=StepKind.CHECKPOINT,
        owner=holder,
        round=last.round,
        num_items=1,
        first_step=last.end_step,
    )


def _next_turn(
    last: Turn | None,
    start: StartPoint | None = None,
    *,
    kind: StepKind,
    owner: str,
    round: int,  # noqa: A002 - the word of the protocol
    num_items: int,
    first_step: int,
    first_batch: int = 0,
) -> Turn:
    return Turn(
        index=last.index + 1 if last else start.first_turn if start else 0,
        kind=kind,
        owner=owner,
        round=round,
        first_seq=last.end_seq if last else start.first_seq if start else 0,
        num_items=num_items,
        first_step=first_step,
        first_batch=first_batch,
        unfreeze_at=last.unfreeze_at if last else (),
        operations=last.operations if last else None,
    )


def _visited(kind: StepKind, course: Course, holder: str) -> list[Owner]:
    """The owners that have an evaluation or a score turn, from the holder of the head on."""
    first = next((index for index, owner in enumerate(course.owners) if owner.node == holder), 0)
    owners = course.owners[first:] + course.owners[:first]
    return [owner for owner in owners if kind is StepKind.SCORE or owner.eval_rows]


def _visits(
    kind: StepKind,
    course: Course,
    step: int,
    holder: str,
    round_index: int,
    last: Turn | None,
    start: StartPoint | None = None,
) -> Generator[Turn, None, Turn | None]:
    """Yield a turn of this kind for each owner, with all its batches that count; return the last turn that there is."""
    for owner in _visited(kind, course, holder):
        last = _next_turn(
            last,
            start,
            kind=kind,
            owner=owner.node,
            round=round_index,
            num_items=course.num_scored(owner) if kind is StepKind.SCORE else course.eval_batches(owner),
            first_step=step,
        )
        yield last
    return last
