"""Order of batches: turns of owners, their items, events at turn boundaries, and the use of rows.

A *turn* is one initiator's ``local_iterations`` steps, or one owner's evaluation. A *round* is as many train turns as
there are owners: with equal turns every owner has one (``run_shape``). The coordinator grants turns; nodes expand them
into *items*. An item is one pass of one batch through the ring; ``seq`` counts all items of a run from 0, ``step``
counts optimizer steps only.

Boundaries: checkpoint, evaluation and operation table are due at the first boundary at or after a multiple of their
steps. Turns of 10 steps, a checkpoint every 20, an evaluation every 25 and tables every 16 steps, 60 steps::

    step            0    10   20   30   40   50   60
    checkpoint                x         x         x
    evaluation                     x         x    x
    table           x         x         x    x

Checkpoint and evaluation belong to the turn before, a table to the turn that begins there. So no table is chosen at the
end, and a run resumed from a checkpoint repeats the choice of its step.

``Evaluations`` (``train.patience_evals``): a run ends after a number of evaluations in a row that were no better than
the best. The loss is the mean over all evaluated rows, tokens or windows of all owners; it is better if it is lower by
any amount. No train turn is granted between an evaluation and its judgement, so the run ends at the same step whatever
the timing ::

    evaluation after step   10   20   30   40        patience_evals = 2
    loss                   0.7  0.5  0.6  0.5
    waited                   0    0    1    2        the run ends with step 40

``Unfreezing`` (``unfreeze.at = "auto"``): the next block is unfrozen when the loss has stopped improving, a pure fold
over the mean losses of the finished train turns, in order. The judged loss is the mean over the last turn of every
owner, because owners' data differ; with turns by rows, owners are weighted by rows. It improves if it falls below the
best one by more than ``min_improvement`` of that. After ``patience_steps`` steps without improvement, counted from the
best loss or from the last unfreezing, one more block is unfrozen. The first round only sets the best loss, and so does
later the first turn of an owner with few rows, as a mean over other owners is not comparable. A turn of an owner with
fewer rows than the mean owner has little weight in the judged loss, so it counts as fewer steps.

The loss of turn t takes effect from turn t + 2 on: turn t + 1 is granted already while t trains, so that frozen blocks
can work ahead. Three owners, turns of 10 steps, a patience of 20, and a loss that never improves ::

    turn             0   1   2   3   4   5   6   7   8   9
    waited steps             0  10  20      10  20      10    turns 5 and 8 were still trained with the depth before
    depth            1   1   1   1   1   1   2   2   2   3

``GENERATE``: an owner's evaluation is followed by its turns of ``Course.generation``. Item 0 of such a turn passes the
whole prompts, a micro-batch each, and each later item the token that the head chose in the item before. Five sequences,
two at once, three tokens each::

    turn                 t            t + 1        t + 2
    items                0  1  2      3  4  5      6  7  8
    micro-batches        0, 1         0, 1         0
    sequences            0, 1         2, 3         4

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
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, Protocol, Self, TypeVar

from ringtune.errors import PlanError
from ringtune.schedule.batches import BatchStream, eval_rows
from ringtune.schedule.course import Course, stream_of
from ringtune.schedule.methods.base import TURNS_AHEAD, Patience
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.placement import WHOLE, Passage
from ringtune.schedule.run_shape import (
    Owner,
    latest_owners,
    latest_turn,
    next_owner,
    owner_indices,
    turn_counts,
    turns_until_repeat,
    weights,
)
from ringtune.storage.strict import LATER

BEST_BY: Final[Mapping[str, bool]] = {**dict.fromkeys(("accuracy", "f1", "exact_match", "rouge_l"), True), "mae": False}
"""Figures that every evaluation may have, besides the loss -> whether a higher one is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """State of ``train.patience_evals`` after the evaluations so far, saved in checkpoints.

    Attributes:
        step: of the last evaluation; -1 before the first. A repeated evaluation counts once.
        best: the best finite value: the lowest loss, or that of the figure ``by``; None before the first.
        waited: evaluations since then.
        by: figure that is compared, one of ``BEST_BY``; empty = the loss.
        head_at: where all parameters train, the owner that keeps embedding and head of the best result; empty = the
            first one.
    """

    step: int = -1
    best: float | None = None
    best_step: int = 0
    waited: int = 0
    by: Annotated[str, LATER] = ""
    head_at: Annotated[str, LATER] = ""

    def after(self, step: int, value: float, *, head_at: str = "") -> Evaluations:
        """Return the state after one more evaluation; a value that is not finite is never better."""
        if step <= self.step:
            return self
        is_better = self.best is None or (value > self.best if self.is_rising else value < self.best)
        if math.isfinite(value) and is_better:
            return Evaluations(step=step, best=value, best_step=step, by=self.by, head_at=head_at)
        return dataclasses.replace(self, step=step, waited=self.waited + 1)

    def without(self, before: Course, after: Course) -> Evaluations:
        """Return the state with other owners: as before the first where evaluations have other rows then."""
        return self if evaluates_as(before, after) else Evaluations(by=self.by)

    @property
    def is_rising(self) -> bool:
        """Whether a higher value is better."""
        return BEST_BY.get(self.by, False)

    def compared_by(self, name: str) -> Evaluations:
        """Return the state of a run that compares this figure: no evaluation was judged by another one."""
        return self if self.by == name else Evaluations(step=self.step, by=name)

    def stops_run(self, patience_evals: int) -> bool:
        """Whether a run with this patience ends now; 0 = never."""
        return 0 < patience_evals <= self.waited


NONE_DONE: Final = Evaluations()


def evaluates_as(before: Course, after: Course) -> bool:
    """Whether evaluations have the same rows in two courses of a run."""
    names, other = ({owner.node for owner in course.owners if owner.eval_rows} for course in (before, after))
    return names == other


def checkpoint_is_due(course: Course, step: int) -> bool:
    """Whether every node saves after the turn that ends at ``step``."""
    if course.checkpoint_every < 1:
        return False
    return step == course.num_steps or _passes_multiple(course, course.checkpoint_every, step)


def next_checkpoint(course: Course, step: int, *, after: int) -> int | None:
    """Return the first step from ``step`` on, the end of a turn, at which nodes save and turns are left; None if none.

    It comes after step ``after``.
    """
    ends = range(step, course.num_steps, course.local_iterations)
    return next((end for end in ends if end > after and checkpoint_is_due(course, end)), None)


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
    return every > 0 and max(0, step - 1 - (step - 1) % course.local_iterations) // every != step // every


_WORST: Final = sys.float_info.max / 4  # a mean of such losses is finite, however it is rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfreezing:
    """State of ``unfreeze.at = "auto"`` after some finished train turns, saved in checkpoints.

    Attributes:
        recent: mean loss of the last turn of each owner that has had one, in the order of these turns.
        best: the best loss so far; None before the first whole round.
        waited_steps: counted steps without improvement.
        unfreeze_at: decisions: at each of these steps, which are turn boundaries, one more block is unfrozen.
    """

    num_turns: int = 0
    recent: tuple[float, ...] = ()
    best: float | None = None
    waited_steps: int = 0
    unfreeze_at: tuple[int, ...] = ()

    def after(self, course: Course, loss: float) -> Unfreezing:
        """Return the state after one more train turn with this mean loss; not finite counts as the worst."""
        patience = course.method.patience or Patience()
        turn, length = self.num_turns, course.local_iterations
        last = self._last_losses(course, min(loss, _WORST) if math.isfinite(loss) else _WORST)
        noted = dataclasses.replace(self, num_turns=turn + 1, recent=tuple(last.values()))
        if turn + 1 < len(course.owners):
            return noted
        owner_weights = weights(course.owners, course.turns)
        total = sum(owner_weights[owner] for owner in last)
        judged = math.fsum(
            loss / (total / owner_weights[owner]) for owner, loss in last.items()
        )  # mean by the owners' weights
        is_first = len(last) > len(self.recent)
        if self.best is None or is_first or judged < self.best - patience.min_improvement * abs(self.best):
            return dataclasses.replace(noted, best=judged, waited_steps=0)
        if self.unfreeze_at and turn * length < self.unfreeze_at[-1]:
            return noted
        waited = self.waited_steps + _counted_steps(course, min(length, course.num_steps - turn * length), [*last][-1])
        step = (turn + TURNS_AHEAD) * length
        most = course.num_blocks - course.frozen_blocks - 1  # the top block trains from the start
        if waited < patience.patience_steps or len(self.unfreeze_at) >= most or step >= course.num_steps:
            return dataclasses.replace(noted, waited_steps=waited)
        return dataclasses.replace(noted, waited_steps=0, unfreeze_at=(*self.unfreeze_at, step))

    def _last_losses(self, course: Course, loss: float) -> dict[int, float]:
        """Return owner index -> loss of its last turn, after one more turn; the newest is last."""
        owner_weights, num_turns = weights(course.owners, course.turns), course.turns_of_owners(self.num_turns)
        last = dict(zip(_with_losses(course, self.num_turns), self.recent, strict=True))
        owner = next_owner(owner_weights, turn_counts(owner_weights, num_turns))
        last.pop(owner, None)
        return {**last, owner: loss}

    def without(self, before: Course, after: Course) -> Unfreezing:
        """Return the state without the losses of the owners that the course ``after`` leaves out."""
        names = [owner.node for owner in before.owners]
        last = zip(_with_losses(before, self.num_turns), self.recent, strict=False)  # nothing where the course decides
        kept = tuple(loss for at, loss in last if after.owner(names[at]) is not None)
        return dataclasses.replace(self, recent=kept)

    def holding(self, step: int) -> tuple[int, ...]:
        """Return the decisions that hold for a turn that begins at ``step``."""
        return tuple(at for at in self.unfreeze_at if at <= step)

    def check(self, course: Course, step: int) -> None:
        """Refuse a state that is not of a run of ``course`` after ``step`` steps, with ``PlanError``."""
        num_turns = course.turns_of(step) if course.decides else 0
        owners = _with_losses(course, num_turns) if course.decides else ()
        fits = self.num_turns == num_turns and len(self.recent) == len(owners)
        if not fits or any(at % course.local_iterations for at in self.unfreeze_at):
            raise PlanError(
                f"what is known of the losses is of {self.num_turns} turns, step {step} comes after {num_turns}; the "
                "checkpoint is of another run"
            )
        course.decided(self.unfreeze_at)


NOTHING_KNOWN = Unfreezing()
"""State at the beginning of a run, and where losses decide nothing."""


def _with_losses(course: Course, num_turns: int) -> tuple[int, ...]:
    """Return the indices of the owners with a turn since they are there, in the order of their latest ones."""
    owner_weights, num_turns = weights(course.owners, course.turns), course.turns_of_owners(num_turns)
    since = {event.owner.node: event.turns for event in course.left_out}
    counts = turn_counts(owner_weights, num_turns) if since else ()
    none_yet = {at for at, count in enumerate(counts) if count == since.get(course.owners[at].node)}
    return tuple(index for index in latest_owners(owner_weights, num_turns) if index not in none_yet)


def _counted_steps(course: Course, steps: int, owner: int) -> int:
    """Number of an owner's steps that count against the patience: fewer if its weight is below the mean."""
    owner_weights = weights(course.owners, course.turns)
    return min(steps, steps * owner_weights[owner] * len(owner_weights) // sum(owner_weights))


_MAX_FOLLOWED = 20_000
ITEMS_AHEAD = 16
"""Turns are granted until this number of items is granted beyond the finished ones."""


class StepKind(enum.StrEnum):
    """Purpose of a pass through the ring.

    Attributes:
        has_backward: whether gradients are computed.
        has_update: whether weights change.
        evaluates: whether it is a part of an evaluation.
    """

    TRAIN = "train"  # forward, backward, update
    EVALUATE = "evaluate"  # forward and counts
    SCORE = "score"  # forward and backward of everything, no update (D2FT)
    GENERATE = "generate"  # forward of one more token of each sequence
    CHECKPOINT = "checkpoint"  # every node saves what it trained; no batch passes

    __hash__ = str.__hash__  # equal to its text, so of the same hash; and a fast one
    has_backward: bool
    has_update: bool
    evaluates: bool

    def __init__(self, value: str) -> None:
        """Set the properties once, as a member of an enumeration is slow to compare with."""
        self.has_backward = value in ("train", "score")
        self.has_update = value == "train"
        self.evaluates = value in ("evaluate", "generate")


class _Decides(Protocol):
    def decided(self, steps: tuple[int, ...], operations: Operations | None = None) -> Self: ...


Decidable = TypeVar("Decidable", bound=_Decides)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Consecutive items of one owner.

    Attributes:
        index: counts all turns of a run from 0.
        first_step: optimizer steps done before its first item.
        first_batch: index of its first batch in the owner's stream of batches.
        unfreeze_at: unfreezing decisions that hold for it, if the course leaves them to the run (``settled``).
        operations: table that holds for it, if the course leaves tables to the run; None before the first.
        passages: passage of each of its items; empty = every item is embedded and not stored.
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

    def step_of(self, seq: int) -> int:
        """Optimizer steps done before the item ``seq`` of the turn."""
        return self.first_step + (seq - self.first_seq if self.kind.has_update else 0)

    def settled(self, value: Decidable) -> Decidable:
        """The course or plan in which the decisions that hold for this turn are settled; see ``Course.decided``."""
        return value.decided(self.unfreeze_at, self.operations)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPoint:
    """Point where a run begins, or continues after a checkpoint or a move.

    Attributes:
        step: optimizer steps done; at a turn boundary.
        unfreezing: state of ``unfreeze.at = "auto"``.
        operations: table in force there, if the course leaves tables to the run; only the coordinator needs it.
        evaluations: state of ``train.patience_evals``; only the coordinator needs it.
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
        """Make a start point that fits the course; by default the beginning of the run.

        Raises ``PlanError`` if the step is not at a turn boundary, or the holder is no owner.
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
        step: of a train item its own step; otherwise the number of steps done before it.
        batch: index in the owner's stream of batches (training) or of evaluation batches.
        passage: boundaries where it enters the ring and is stored.
    """

    seq: int
    kind: StepKind
    step: int
    owner: str
    batch: int
    rows: int
    turn: int
    passage: Passage = WHOLE


@functools.lru_cache(maxsize=4)
def items(course: Course, turn: Turn) -> tuple[Item, ...]:
    """Expand a turn into its items; those of the last turns are kept, as all nodes of a simulated ring ask for them."""
    return tuple(item_of(course, turn, offset) for offset in range(turn.num_items))


def item_of(course: Course, turn: Turn, offset: int) -> Item:
    """Return the item at position ``offset`` of a turn, counted from 0."""
    batch, rows, owner = turn.first_batch + offset, course.batch_size, course.owner(turn.owner)
    if turn.kind is StepKind.EVALUATE:
        rows = min(rows, (owner.eval_rows if owner else 0) - batch * rows)
    elif turn.kind is StepKind.GENERATE and owner is not None and course.generation is not None:
        rows = len(course.generation.sequences(owner, turn.first_batch // course.generation.max_new_tokens))
    elif owner is not None:
        rows = course.batch_rows(owner)
    return Item(
        seq=turn.first_seq + offset,
        kind=turn.kind,
        step=turn.step_of(turn.first_seq + offset),
        owner=turn.owner,
        batch=batch,
        rows=rows,
        turn=turn.index,
        passage=turn.passages[offset] if turn.passages else WHOLE,
    )


def microbatch_rows(course: Course, item: Item) -> tuple[int, ...]:
    """Return the rows of each micro-batch of an item: one where texts are written; none in a checkpoint."""
    if item.kind is StepKind.CHECKPOINT:
        return ()
    return (1,) * item.rows if item.kind is StepKind.GENERATE else course.microbatch_sizes(item.rows)


def rows_of(course: Course, item: Item, micro: int | None = None) -> tuple[int, ...]:
    """Row numbers of an item among the rows of its owner, from 0; of one micro-batch, or of all."""
    owner = course.owner(item.owner)
    if owner is None:
        return ()
    if item.kind is StepKind.GENERATE and course.generation is not None:
        rows = tuple(course.generation.sequences(owner, item.batch // course.generation.max_new_tokens))
    elif item.kind is StepKind.EVALUATE:
        rows = eval_rows(owner.eval_rows, course.batch_size, item.batch)
    else:
        rows = stream_of(course.plain, item.owner).rows(item.batch)
    if micro is None:
        return rows
    sizes = microbatch_rows(course, item)
    first = sum(sizes[:micro])
    return rows[first : first + sizes[micro]]


def follows_token(course: Course, item: Item) -> bool:
    """Whether the micro-batches of an item are single tokens, which the heads of the item before have chosen."""
    return (
        item.kind is StepKind.GENERATE
        and course.generation is not None
        and item.batch % course.generation.max_new_tokens > 0
    )


def turn_sequence(course: Course, *, start: StartPoint | None = None) -> Iterator[Turn]:
    """Yield all turns of a run in order: rounds of train turns, with checkpoints, evaluations and scores between.

    At a boundary the checkpoint is first; then each owner evaluates, in initiator order from the holder of the head on,
    and writes its texts.
    A course of no steps is one evaluation. Before a train turn with a new table by scores every owner has a score turn,
    in initiator order from the owner on that trained last. ``start`` is the point to continue from. After a checkpoint
    indices and ``seq`` count from 0 again, and the evaluation due at that step is repeated; after a move they continue,
    and only ``start.repeats`` is repeated.
    """
    start = start or StartPoint.of(course)
    index, seq = start.first_turn, start.first_seq
    for part in _parts(course, start):
        yield Turn(index=index, first_seq=seq, **part._asdict())
        index, seq = index + 1, seq + part.num_items


class _Part(NamedTuple):
    """A turn without its place in the sequence."""

    kind: StepKind
    owner: str
    round: int
    num_items: int
    first_step: int
    first_batch: int = 0


def _parts(course: Course, start: StartPoint) -> Iterator[_Part]:
    step = start.step
    num_turns = course.turns_of(step)
    round_index = max(0, course.turns_of_owners(num_turns) - 1) // len(course.owners)
    if StepKind.CHECKPOINT in start.repeats:
        yield _Part(StepKind.CHECKPOINT, start.holder, round_index, 1, step)
    is_resumed = start.first_turn == 0 and (step or not course.num_steps) and evaluation_is_due(course, step)
    if is_resumed or any(kind.evaluates for kind in start.repeats):
        yield from _visits(StepKind.EVALUATE, course, step, start.holder, round_index)
    owner_weights = weights(course.owners, course.turns)
    num_turns = course.turns_of_owners(num_turns)
    counts, order = turn_counts(owner_weights, num_turns), owner_indices(owner_weights, num_turns)
    while step < course.num_steps:
        round_index, position = num_turns // len(course.owners), next(order)
        if scores_are_due(course, step):
            yield from _visits(StepKind.SCORE, course, step, _first_scorer(course, start, step), round_index)
        holder, num_items = course.owners[position].node, min(course.local_iterations, course.num_steps - step)
        yield _Part(StepKind.TRAIN, holder, round_index, num_items, step, counts[position] * course.local_iterations)
        step += num_items
        if checkpoint_is_due(course, step):
            yield _Part(StepKind.CHECKPOINT, holder, round_index, 1, step)
        if evaluation_is_due(course, step):
            yield from _visits(StepKind.EVALUATE, course, step, holder, round_index)
        num_turns += 1
        counts[position] += 1


def holder_after(course: Course, step: int) -> str:
    """Return the owner of the train turn that ends at ``step``, above 0, which has the head then.

    The owner of the first turn has it from the beginning.

    Example: turns of 10 steps by owners a, b, c. After 40 steps, turns 0 to 3, a has the head.
    """
    owner_weights = weights(course.owners, course.turns)
    num_turns = max(1, course.turns_of_owners(course.turns_of(step)))
    return course.owners[next_owner(owner_weights, turn_counts(owner_weights, num_turns - 1))].node


@functools.lru_cache(maxsize=256)
def hand_overs(course: Course, start: StartPoint) -> frozenset[tuple[str, str]]:
    """Return every pair of owners between which the head is handed over.

    Example: owners a to d hand it from a to b, b to c, c to d and d to a. An evaluation after the turn of b visits b,
    c, d and a, and the next turn is that of c, so that a hands the head to c too. Evaluations and scores are assumed
    after each owner's turn, a few pairs more than a short run needs. With turns by rows of a very long period the
    result is all pairs.
    """
    names, owner_weights = [owner.node for owner in course.owners], weights(course.owners, course.turns)
    done, stop = (course.turns_of_owners(course.turns_of(step)) for step in (start.step, course.num_steps))
    num_turns = min(stop - done, turns_until_repeat(owner_weights))
    if num_turns > _MAX_FOLLOWED:
        return frozenset(itertools.permutations(names, 2))
    order = [
        names[index] for index in itertools.islice(owner_indices(owner_weights, done), min(stop - done, num_turns + 1))
    ]
    has_scores = course.choice is not None and bool(course.choice.scores)
    is_refreshed = has_scores and bool(course.choice and course.choice.refresh_steps)
    scorer = _first_scorer(course, start, start.step) if has_scores else ""
    ways = [_ways(course, start.holder, order[:1], evaluates=bool(start.step), scorer=scorer)]
    for holder, following in set(itertools.pairwise(order)):
        scorer = holder if is_refreshed else ""
        ways.append(_ways(course, holder, [following], evaluates=bool(course.eval_every), scorer=scorer))
    last = holder_after(course, course.num_steps) if order else start.holder
    ways.append(_ways(course, last, [], evaluates=True, scorer=""))
    pairs = {pair for way in itertools.chain.from_iterable(ways) for pair in itertools.pairwise(way)}
    return frozenset((source, target) for source, target in pairs if source != target)


def _first_scorer(course: Course, start: StartPoint, step: int) -> str:
    """Return the owner of the first score turn at a step: the same wherever the run continues."""
    return holder_after(course, step) if step else start.holder


def _ways(course: Course, holder: str, following: list[str], *, evaluates: bool, scorer: str) -> list[list[str]]:
    """Return the ways of the head from its holder to the next train turn, if there is one.

    Directly, after an evaluation, after scores, and after both. ``scorer`` has the first score turn; empty = no scores.
    """
    ways = [[holder]]
    if evaluates:
        ways.append([holder, *(owner.node for owner in _visited(StepKind.EVALUATE, course, holder))])
    if scorer:
        ways += [[*way, *(owner.node for owner in _visited(StepKind.SCORE, course, scorer))] for way in ways]
    return [[*way, *following] for way in ways]


def checkpoint_turn(last: Turn, *, holder: str) -> Turn:
    """Return the turn after ``last`` in which every node saves; ``holder`` has the head."""
    return dataclasses.replace(
        last,
        index=last.index + 1,
        kind=StepKind.CHECKPOINT,
        owner=holder,
        first_seq=last.end_seq,
        num_items=1,
        first_step=last.end_step,
        first_batch=0,
        passages=(),
    )


def _visited(kind: StepKind, course: Course, holder: str) -> list[Owner]:
    """Return the owners with an evaluation or a score turn, in initiator order from ``holder`` on."""
    first = next((index for index, owner in enumerate(course.owners) if owner.node == holder), 0)
    owners = course.owners[first:] + course.owners[:first]
    return [owner for owner in owners if kind is StepKind.SCORE or owner.eval_rows]


def _visits(kind: StepKind, course: Course, step: int, holder: str, round_index: int) -> Iterator[_Part]:
    for owner in _visited(kind, course, holder):
        if kind is StepKind.SCORE:
            yield _Part(kind, owner.node, round_index, course.num_scored(owner), step)
            continue
        texts = course.generation
        if texts is None or not texts.alone:
            yield _Part(kind, owner.node, round_index, course.eval_batches(owner), step)
        if texts is not None:
            length = texts.max_new_tokens
            for turn in range(texts.turns(owner)):
                yield _Part(StepKind.GENERATE, owner.node, round_index, length, step, turn * length)


def evaluation_turns(course: Course) -> int:
    """Number of turns of one evaluation, of all owners."""
    owners, texts = [owner for owner in course.owners if owner.eval_rows], course.generation
    if texts is None:
        return len(owners)
    return sum(texts.turns(owner) + (not texts.alone) for owner in owners)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowUse:
    """Use of one owner's rows in a run."""

    owner: str
    rows: int
    batch_rows: int
    steps: int
    used_rows: int
    least: int
    most: int

    @property
    def trained_rows(self) -> int:
        """Rows of all its batches, with repetitions."""
        return self.steps * self.batch_rows

    @property
    def epochs(self) -> float:
        """Mean number of uses of a row."""
        return self.trained_rows / self.rows


def turns_had(course: Course, num_turns: int) -> tuple[int, ...]:
    """Turns of each of ``Course.all_owners`` among the first ``num_turns`` train turns, missed ones counted."""
    counts = turn_counts(weights(course.owners, course.turns), course.turns_of_owners(num_turns))
    had = {owner.node: count for owner, count in zip(course.owners, counts, strict=True)}
    had |= {dropped.owner.node: dropped.turns for dropped in course.absent}
    return tuple(had[owner.node] for owner in course.all_owners)


def steps_of_owners(course: Course) -> dict[str, int]:
    """Number of steps of the run with batches of each owner, those left out among them."""
    counts, length = turns_had(course, course.turns_of(course.num_steps)), course.local_iterations
    every, missed = course.all_owners, course.missed
    steps = {
        owner.node: (count - missed.get(owner.node, 0)) * length for owner, count in zip(every, counts, strict=True)
    }
    _, last = latest_turn(weights(every, course.turns), counts)
    steps[every[last].node] -= -course.num_steps % length  # the last turn may be short
    return steps


@functools.lru_cache(maxsize=16)
def row_uses(course: Course) -> tuple[RowUse, ...]:
    """Use of each owner's rows in a run, in the order of the owners, then of owners left out."""
    steps = steps_of_owners(course)
    owners = (*course.owners, *(dropped.owner for dropped in course.absent))
    return tuple(_use(course, owner, _trained(course, owner.node, steps[owner.node])) for owner in owners)


def _trained(course: Course, node: str, steps: int) -> list[range]:
    """Positions of the batches of an owner that train, ``steps`` of them, without those that it missed."""
    length = course.local_iterations
    bounds = [event.turns * length for event in course.left_out if event.owner.node == node]
    end = steps + course.missed.get(node, 0) * length
    bounds = [0, *bounds[: len(bounds) // 2 * 2], end]  # its last loss ends with ``end``
    return [range(first, stop) for first, stop in zip(bounds[::2], bounds[1::2], strict=True)]


def _use(course: Course, owner: Owner, trained: list[range]) -> RowUse:
    """Count by whole passes and further batches; the last batch of a pass is filled up with rows of batch 0."""
    size = course.batch_rows(owner)
    stream = BatchStream(owner.train_rows, course.batch_size, course.seed, owner.node)
    passes, more, number = 0, Counter[int](), stream.num_batches
    for part in trained:
        begin = -(-part.start // number) * number
        whole = max(0, part.stop - begin) // number
        passes += whole
        alone = (*range(part.start, begin), *range(begin + whole * number, part.stop)) if whole else part
        more.update(map(stream.batch_id, alone))
    first, last, twice = more[0], more[number - 1], number * size - owner.train_rows
    most = passes + max(more.values(), default=0)
    return RowUse(
        owner=owner.node,
        rows=owner.train_rows,
        batch_rows=size,
        steps=sum(map(len, trained)),
        used_rows=owner.train_rows if passes else len(more) * size - (twice if first and last else 0),
        least=passes + (min(more.values()) if len(more) == number else 0),
        most=max(most, 2 * passes + first + last) if twice else most,
    )
