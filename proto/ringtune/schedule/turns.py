"""The order of batches: turns of owners, their items, what is due at their boundaries, and the use of rows.

A *turn* is one initiator's ``local_iterations`` steps, or one owner's evaluation. A *round* is as many train turns as
there are owners: with equal turns every owner has one (``run_shape``). The coordinator grants turns; nodes expand them
into *items*. An item is one pass of one batch through the ring; ``seq`` counts all items of a run from 0, ``step``
counts optimizer steps only.

Boundaries: checkpoint, evaluation and operation table are due at the first boundary at which a multiple of their steps
was passed. Turns of 10 steps, a checkpoint every 20, an evaluation every 25 and tables every 16 steps, 60 steps::

    step            0    10   20   30   40   50   60
    checkpoint                x         x         x
    evaluation                     x         x    x
    table           x         x         x    x

Checkpoint and evaluation belong to the turn before, a table to the turn that begins there. So no table is chosen at the
very end, and a run resumed from a checkpoint chooses again what was chosen at its step.

``Evaluations`` (``train.patience_evals``): a run ends when so many evaluations in a row were no better than the best.
The loss is the mean over all evaluated rows, tokens or windows of all owners; it is better if it is lower by any
amount. No turn that trains is granted between an evaluation and its judgement, so the run ends at the same step
whatever the timing ::

    evaluation after step   10   20   30   40        patience_evals = 2
    loss                   0.7  0.5  0.6  0.5
    waited                   0    0    1    2        the run ends with step 40

``Unfreezing`` (``unfreeze.at = "auto"``): the next block is unfrozen when the loss has stopped improving, a pure fold
over the mean losses of the finished train turns, in their order. The judged loss is the mean over the last turn of
every owner, because owners' data differ; where turns go by rows, each owner counts by its rows. It improves if it falls
below the best one by more than ``min_improvement`` of that. After ``patience_steps`` steps without improvement, counted
from the best loss or from the last unfreezing, one more block is unfrozen. The first round only sets the best loss, and
so does later the first turn of an owner with few rows: a mean over other owners can't be compared. A turn of an owner
with fewer rows than the mean owner hardly moves the judged loss, so it counts as fewer steps.

What the loss of turn t decides holds from turn t + 2 on: turn t + 1 is granted already while t trains, so that frozen
blocks can work ahead. Three owners, turns of 10 steps, a patience of 20, and a loss that never improves ::

    turn             0   1   2   3   4   5   6   7   8   9
    waited steps             0  10  20      10  20      10    turns 5 and 8 were still trained with the depth before
    depth            1   1   1   1   1   1   2   2   2   3

``RowUse``: 12 steps in turns of 4 by owners a and b, with 100 and 24 rows in batches of 8. Owner a has the turns 0 and
2: 8 steps, 64 of its 100 rows, each once. Owner b has 4 steps: all of its 24 rows, 8 of them twice.

Source: RingAda, Algorithm 1 and section III-B.3; section IV unfreezes every k steps; the criterion of ``auto`` is that
of learning rates reduced on a plateau.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, Self, TypeVar

from ringtune.errors import PlanError
from ringtune.schedule.batches import BatchStream
from ringtune.schedule.course import Course
from ringtune.schedule.methods.base import TURNS_AHEAD, Patience
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.placement import WHOLE, Passage, passage_at
from ringtune.schedule.run_shape import (
    Owner,
    latest_owners,
    next_owner,
    owner_indices,
    turn_counts,
    turns_until_repeat,
    weights,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """The state of the patience rule after the evaluations so far; checkpoints keep it.

    Attributes:
        step: after which the last one was; -1 before the first. An evaluation that is repeated counts once.
        best: the lowest loss; None before the first that is a finite number.
        best_step: after which it was.
        waited: evaluations since then.
    """

    step: int = -1
    best: float | None = None
    best_step: int = 0
    waited: int = 0

    def after(self, step: int, loss: float) -> Evaluations:
        """The knowledge after one more evaluation; a loss that is not a finite number is no better than any."""
        if step <= self.step:
            return self
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            return Evaluations(step=step, best=loss, best_step=step)
        return dataclasses.replace(self, step=step, waited=self.waited + 1)

    def stops_run(self, patience_evals: int) -> bool:
        """Whether a run with this patience ends now; with 0 it never does."""
        return 0 < patience_evals <= self.waited


NONE_DONE: Final = Evaluations()


def boundary_before(course: Course, step: int) -> int:
    """The turn boundary before the one at ``step``; 0 at the very beginning."""
    return max(0, step - 1 - (step - 1) % course.local_iterations)


def checkpoint_is_due(course: Course, step: int) -> bool:
    """Whether every node saves after the turn that ends at ``step``."""
    if course.checkpoint_every < 1:
        return False
    return step == course.num_steps or _passes_multiple(course, course.checkpoint_every, step)


def evaluation_is_due(course: Course, step: int) -> bool:
    """Whether the owners evaluate after the turn that ends at ``step``."""
    return step == course.num_steps or _passes_multiple(course, course.eval_every, step)


def table_is_due(course: Course, step: int) -> bool:
    """Whether the run chooses an operation table before the train turn that begins at ``step``."""
    choice = course.choice
    if choice is None or step >= course.num_steps:
        return False
    if choice.tables:
        return choice.given_at(step) is not None
    return not step or _passes_multiple(course, choice.refresh_steps, step)


def scores_are_due(course: Course, step: int) -> bool:
    """Whether scores are gathered before the train turn that begins at ``step``."""
    return course.choice is not None and bool(course.choice.scores) and table_is_due(course, step)


def _passes_multiple(course: Course, every: int, step: int) -> bool:
    return every > 0 and boundary_before(course, step) // every != step // every


_WORST: Final = sys.float_info.max / 4  # a mean of such losses is finite, however it is rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfreezing:
    """The knowledge of the rule after some finished train turns; checkpoints keep it.

    Attributes:
        num_turns: train turns that are finished.
        recent: mean loss of the last turn of each owner that has had one, in the order of these turns.
        best: the best loss so far; None before the first whole round.
        waited_steps: steps without improvement that count.
        unfreeze_at: the decisions: at each of these steps, the first ones of turns, one more block is unfrozen.
    """

    num_turns: int = 0
    recent: tuple[float, ...] = ()
    best: float | None = None
    waited_steps: int = 0
    unfreeze_at: tuple[int, ...] = ()

    def after(self, course: Course, loss: float) -> Unfreezing:
        """The knowledge after one more train turn with this mean loss.

        A loss that is not a finite number counts as the worst.
        """
        patience = course.method.patience or Patience()
        turn, length = self.num_turns, course.local_iterations
        last = self._last_losses(course, min(loss, _WORST) if math.isfinite(loss) else _WORST)
        found = dataclasses.replace(self, num_turns=turn + 1, recent=tuple(last.values()))
        if turn + 1 < len(course.owners):
            return found
        judged, is_first = _mean(course, last), len(last) > len(self.recent)
        if self.best is None or is_first or judged < self.best - patience.min_improvement * abs(self.best):
            return dataclasses.replace(found, best=judged, waited_steps=0)
        if self.unfreeze_at and turn * length < self.unfreeze_at[-1]:
            return found
        waited = self.waited_steps + _counted_steps(course, min(length, course.num_steps - turn * length), [*last][-1])
        step = (turn + TURNS_AHEAD) * length
        if waited < patience.patience_steps or len(self.unfreeze_at) >= _most(course) or step >= course.num_steps:
            return dataclasses.replace(found, waited_steps=waited)
        return dataclasses.replace(found, waited_steps=0, unfreeze_at=(*self.unfreeze_at, step))

    def _last_losses(self, course: Course, loss: float) -> dict[int, float]:
        """The loss of each owner's last turn after one more turn, by the owners' indices, the newest last."""
        own, num_turns = weights(course.owners, course.turns), course.turns_of_owners(self.num_turns)
        last = dict(zip(latest_owners(own, num_turns), self.recent, strict=True))
        owner = next_owner(own, turn_counts(own, num_turns))
        last.pop(owner, None)
        return {**last, owner: loss}

    def without(self, before: Course, after: Course) -> Unfreezing:
        """The knowledge without the losses of the owners that another course leaves out from now on."""
        names = [owner.node for owner in before.owners]
        order = latest_owners(weights(before.owners, before.turns), before.turns_of_owners(self.num_turns))
        last = zip(order, self.recent, strict=False)  # nothing is known where the course decides all
        kept = tuple(loss for at, loss in last if after.owner(names[at]) is not None)
        return dataclasses.replace(self, recent=kept)

    def holding(self, step: int) -> tuple[int, ...]:
        """The decisions that hold for a turn that begins at ``step``."""
        return tuple(at for at in self.unfreeze_at if at <= step)

    def check(self, course: Course, step: int) -> None:
        """Refuse knowledge that is not of a run of ``course`` that has done ``step`` steps.

        Raises:
            PlanError: it is not; where the course leaves nothing to the run there is nothing to know.
        """
        num_turns = -(-step // course.local_iterations) if course.decides else 0
        owners = latest_owners(weights(course.owners, course.turns), course.turns_of_owners(num_turns))
        fits = self.num_turns == num_turns and len(self.recent) == len(owners)
        if not fits or any(at % course.local_iterations for at in self.unfreeze_at):
            raise PlanError(
                f"what is known of the losses is of {self.num_turns} turns, step {step} comes after {num_turns}; the "
                "checkpoint is of another run"
            )
        course.decided(self.unfreeze_at)


NOTHING_KNOWN = Unfreezing()
"""The knowledge at the beginning of a run, and where the course leaves nothing to the run."""


def _mean(course: Course, last: Mapping[int, float]) -> float:
    """The mean of the owners' last losses by what each owner counts."""
    own = weights(course.owners, course.turns)
    total = sum(own[owner] for owner in last)
    return math.fsum(loss / (total / own[owner]) for owner, loss in last.items())


def _counted_steps(course: Course, steps: int, owner: int) -> int:
    """How many of the steps of an owner's turn count as waited: fewer where it counts less than the mean owner."""
    own = weights(course.owners, course.turns)
    return min(steps, steps * own[owner] * len(own) // sum(own))


def _most(course: Course) -> int:
    """How many blocks can be unfrozen besides the top block, which trains from the start."""
    return course.num_blocks - course.frozen_blocks - 1


_MAX_FOLLOWED = 20_000
ITEMS_AHEAD = 16
"""Turns are granted until so many items are granted beyond the finished ones; a turn has at least one item."""


class StepKind(enum.StrEnum):
    """The purpose of a pass through the ring."""

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


class _Decides(Protocol):
    def decided(self, steps: tuple[int, ...], operations: Operations | None = None) -> Self: ...


Decidable = TypeVar("Decidable", bound=_Decides)


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
            on the turn goes by ``settled``.
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

    def settled(self, value: Decidable) -> Decidable:
        """The course or plan in which the decisions that hold for this turn are settled; see ``Course.decided``."""
        return value.decided(self.unfreeze_at, self.operations)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPoint:
    """The point where a run begins, or continues after a checkpoint or a move to its next placement.

    Attributes:
        step: optimizer steps done; at a turn boundary.
        holder: the owner that has the head.
        unfreezing: what the coordinator knows of the losses, if the course leaves unfreezing to the run.
        operations: the table in force there, if the course leaves tables to the run; only the coordinator has to know.
        evaluations: what is known of the evaluations before it; only the coordinator has to know.
        first_turn: index of the first turn after it: 0, unless the run moved.
        first_seq: ``seq`` of the first item after it.
        placement_number: of the placement that holds there.
        repeats: kinds of turns that were due at this step and are not committed, so that they are first.
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

    A checkpoint or an evaluation follows the turn in which a multiple of ``checkpoint_every`` or
    ``eval_every`` steps was passed; both are due at the end too. The checkpoint is first; the evaluation starts
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
    if num_turns > _MAX_FOLLOWED:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RowUse:
    """The use that a run makes of one owner's rows.

    Attributes:
        owner: its node.
        rows: training rows that it has.
        batch_rows: rows of each of its batches.
        steps: steps of the run on them.
        used_rows: rows that are trained on at least once.
        least: times that the least used row is trained on.
        most: times that the most used row is trained on.
    """

    owner: str
    rows: int
    batch_rows: int
    steps: int
    used_rows: int
    least: int
    most: int

    @property
    def trained_rows(self) -> int:
        """Rows of all its batches, each time counted."""
        return self.steps * self.batch_rows

    @property
    def epochs(self) -> float:
        """How often each of its rows is trained on, in the mean."""
        return self.trained_rows / self.rows


def steps_of_owners(course: Course) -> tuple[int, ...]:
    """How many steps of the run are on the batches of each owner, in the order of the owners."""
    length, own = course.local_iterations, weights(course.owners, course.turns)
    whole, rest = divmod(course.num_steps, length)
    whole = course.turns_of_owners(whole)
    before, after = turn_counts(own, whole), turn_counts(own, whole + 1)
    steps = (count * length + rest * (later - count) for count, later in zip(before, after, strict=True))
    return tuple(steps)


@functools.lru_cache(maxsize=16)
def row_uses(course: Course) -> tuple[RowUse, ...]:
    """The use that a run makes of each owner's rows, in the order of the owners; those left out are last."""
    there = [_use(course, owner, steps) for owner, steps in zip(course.owners, steps_of_owners(course), strict=True)]
    return (*there, *(_use(course, one.owner, one.turns * course.local_iterations) for one in course.left_out))


def _use(course: Course, owner: Owner, steps: int) -> RowUse:
    """Count by batches; the first rows are in batch 0, and again in the last batch as far as that needs filling up."""
    size = course.batch_rows(owner)
    stream = BatchStream(owner.train_rows, course.batch_size, course.seed, owner.node)
    epochs, rest = divmod(steps, stream.num_batches)
    more = {stream.batch_id(index) for index in range(epochs * stream.num_batches, steps)}
    first, last, twice = 0 in more, stream.num_batches - 1 in more, stream.num_batches * size - owner.train_rows
    used = owner.train_rows if epochs else rest * size - (twice if first and last else 0)
    most = epochs + bool(more)
    if twice:
        most = max(most, 2 * epochs + first + last)
    return RowUse(
        owner=owner.node,
        rows=owner.train_rows,
        batch_rows=size,
        steps=steps,
        used_rows=used,
        least=epochs,
        most=most,
    )
