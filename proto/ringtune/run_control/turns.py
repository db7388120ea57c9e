"""Grants of turns on the coordinator: ahead of the current turn, but only after the decisions on which they depend.

A decision (depth, operation table) takes effect at a turn boundary. A turn is granted only when all its decisions are
made, so that no timing changes its work.

Unfreezing under ``auto``: the loss of a train turn counts when the turn is closed, with all its steps reported, and
turn t is granted only when t - 2 is closed.

Evaluations: every owner with evaluation rows has a turn of its own. Without patience and ``train.keep_best`` turns are
granted beyond an evaluation. With ``keep_best`` nothing is granted beyond a best evaluation until every node has sent
its trained tensors, so that the evaluated ones are sent. After the last turn no node is asked: the collected results
are of the same step ::

    evaluation after step    10        20       30        40, the last one
    loss                     0.7       0.5      0.6       0.4
    sent                     step 10   step 20  -         with the end of the run
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ringtune.errors import IntegrityError
from ringtune.run_control.evaluation import is_entity_count, pair_of
from ringtune.run_control.events import (
    ChooseOperations,
    Command,
    Grant,
    LogEvaluation,
    LogOperations,
    LogStop,
    LogTechniqueFailed,
    LogUnfreeze,
    StepReported,
)
from ringtune.run_control.migration import Migration
from ringtune.schedule.course import Course
from ringtune.schedule.methods.base import TURNS_AHEAD
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import (
    NONE_DONE,
    NOTHING_KNOWN,
    StartPoint,
    StepKind,
    Turn,
    checkpoint_turn,
    evaluation_turns,
    turn_sequence,
)
from ringtune.schedule.versions import adds_up, depth
from ringtune.techniques import turn_rules
from ringtune.techniques.operations import TurnOperations
from ringtune.techniques.replicas import CopyComparison

Values = tuple[tuple[str, float], ...]


class EvaluationSums:
    """The values of the evaluation under way."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Values] = {}  # of open turns
        self._sums: dict[str, float] = {}  # of closed ones
        self._num_done = 0

    def note(self, seq: int, values: Values) -> None:
        """Take the values of one item."""
        if values:  # of most tokens of a text there are none
            self._by_seq[seq] = values

    def close(self, turn: Turn, course: Course) -> Values | None:
        """Add up a closed turn; return the sums with the evaluation's last turn, else None.

        A drained run may stop between two owners: that evaluation is never logged, and a resumed run repeats it. Values
        that a fast owner has reported for a later turn are kept for that one. Turns are closed in their order, and
        values are summed in the order of ``seq``, so that the order of arrival does not change the last bits.
        """
        for seq in sorted(seq for seq in self._by_seq if seq < turn.end_seq):
            for name, value in self._by_seq.pop(seq):
                self._sums[name] = self._sums.get(name, 0.0) + value
        self._num_done += 1
        if self._num_done < evaluation_turns(course):
            return None
        sums, self._sums, self._num_done = self._sums, {}, 0
        return tuple(sorted(sums.items()))

    def forget(self) -> None:
        """Drop the evaluation under way: it is repeated."""
        self._by_seq, self._sums, self._num_done = {}, {}, 0


class OpenTurn(NamedTuple):
    """An open turn, nodes that have not done it, and the ``seq`` of its reported items, and of those with counts."""

    turn: Turn
    waits_for: set[str]
    reported: set[int]
    counted: set[int]


class OpenTurns:
    """The turns that are granted and not done by every node: two or more, of at least ``items_ahead`` items."""

    def __init__(self, items_ahead: int) -> None:
        self._items_ahead = items_ahead
        self._open: dict[int, OpenTurn] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def needs_more(self) -> bool:
        """Whether to grant more turns: fewer than two are open, or fewer than ``items_ahead`` items."""
        ahead = sum(open_turn.turn.num_items - len(open_turn.reported) for open_turn in self._open.values())
        return len(self._open) < 2 or ahead < self._items_ahead

    @property
    def change_anything(self) -> bool:
        """Whether an open turn trains or saves; score and evaluation turns change no state."""
        kinds = [open_turn.turn.kind for open_turn in self._open.values()]
        return any(kind.has_update or kind is StepKind.CHECKPOINT for kind in kinds)

    @property
    def oldest(self) -> OpenTurn | None:
        """The oldest open turn; None if none is open."""
        return self._open[min(self._open)] if self._open else None

    def add(self, turn: Turn, nodes: Collection[str]) -> None:
        """Open a turn that was granted to these nodes."""
        self._open[turn.index] = OpenTurn(turn, set(nodes), set(), set())

    def get(self, index: int) -> Turn | None:
        """Find an open turn by its index."""
        return self._open[index].turn if index in self._open else None

    def of_item(self, seq: int) -> Turn | None:
        """Find the open turn of the item ``seq``."""
        turns = (open_turn.turn for open_turn in self._open.values())
        return next((turn for turn in turns if turn.first_seq <= seq < turn.end_seq), None)

    def item_done(self, turn: Turn, told: StepReported) -> bool:
        """Note that an item of an open turn is finished; False for a repeated report; raises ``IntegrityError``."""
        if (told.node, told.step, told.kind) != (turn.owner, turn.step_of(told.seq), turn.kind):
            raise IntegrityError(
                f"node {told.node} reports item {told.seq} of step {told.step}, kind {told.kind}; it is of node "
                f"{turn.owner} and of step {turn.step_of(told.seq)}, kind {turn.kind}; use one version on all machines"
            )
        known, counted = self._open[turn.index].reported, self._open[turn.index].counted
        is_new = told.seq not in known
        known.add(told.seq)
        if is_new and any(pair_of(name) or is_entity_count(name) for name, _ in told.values):
            counted.add(told.seq)
        if len(counted) > 1:
            raise IntegrityError(
                f"node {told.node} reports counts of classes for {len(counted)} items of one turn; use one version on "
                "all machines"
            )
        return is_new

    def waits_for(self, node: str, turn: Turn) -> bool:
        """Whether a node has not done an open turn: a second report of it is no progress, and changes nothing."""
        return node in self._open[turn.index].waits_for

    def node_done(self, node: str, turn: Turn) -> None:
        """Note that a node has done an open turn."""
        self._open[turn.index].waits_for.discard(node)

    def close(self, turn: Turn) -> None:
        """Remove a turn that every node has done."""
        del self._open[turn.index]


class TurnDepths:
    """The unfreezing decisions of one run; ``unfreezing`` is the state of the rule after the closed turns."""

    def __init__(self, course: Course, start: StartPoint | None) -> None:
        self.unfreezing = start.unfreezing if start else NOTHING_KNOWN
        self.unfreezing.check(course, start.step if start else 0)
        self._course = course
        self._losses: dict[int, dict[int, tuple[float, float]]] = {}

    def may_grant(self, turn: Turn) -> bool:
        """Whether the losses are known on which the depth of this turn may depend."""
        if not self._course.decides or turn.kind is not StepKind.TRAIN:
            return True
        return turn.first_step // self._course.local_iterations < self.unfreezing.num_turns + TURNS_AHEAD

    def decided(self, turn: Turn, last: Turn | None) -> Turn:
        """Return the turn with its unfreezing decisions; one between train turns takes those of ``last`` before it."""
        if not self._course.decides:
            return turn
        step = turn.first_step
        if turn.kind is not StepKind.TRAIN and last is not None:
            return dataclasses.replace(turn, unfreeze_at=last.unfreeze_at)
        return dataclasses.replace(turn, unfreeze_at=self.unfreezing.holding(step))

    def note(self, turn: Turn, seq: int, values: tuple[tuple[str, float], ...]) -> None:
        """Note the loss of a finished item; a second report of an item changes nothing."""
        if self._course.decides and turn.kind is StepKind.TRAIN:
            figures = dict(values)
            sums = (figures.get("loss_sum", math.nan), figures.get("count", 0.0))
            self._losses.setdefault(turn.index, {}).setdefault(seq, sums)

    def is_complete(self, turn: Turn) -> bool:
        """Whether the losses of all items of the turn are reported."""
        if not self._course.decides or turn.kind is not StepKind.TRAIN:
            return True
        return len(self._losses.get(turn.index, ())) == turn.num_items

    def close(self, turn: Turn) -> None:
        """Add a closed turn's mean loss; turns must be closed in order."""
        losses = self._losses.pop(turn.index, None)
        if losses is None:
            return
        count = sum(losses[seq][1] for seq in sorted(losses))
        loss_sum = sum(losses[seq][0] for seq in sorted(losses))
        self.unfreezing = self.unfreezing.after(self._course, loss_sum / count if count else math.nan)

    def forget_open(self) -> None:
        """Drop the losses of open turns: these are repeated."""
        self._losses.clear()


class Judge(NamedTuple):
    """A figure by which evaluations are compared: name, and value of sums and names of classes; NaN = none."""

    by: str
    value: Callable[[Mapping[str, float], Sequence[str]], float]


class EarlyStopping:
    """Decisions of one run by its evaluations: its end, and its best result.

    ``judge`` is the figure that is compared; None = the loss.

    Attributes:
        evaluations: best one so far.
        settled: the state for a resumed run: ``evaluations``, or, while a best result is being sent, the state before
            that evaluation, which a resumed run repeats.
        wanted: the step of the evaluation whose result the nodes send; None = none is to be sent.
        asked: nodes that have not answered the last request for it.
    """

    def __init__(
        self, patience_evals: int, start: StartPoint | None, *, keeps_best: bool = False, judge: Judge | None = None
    ) -> None:
        self._patience, self._keeps_best, self._judge = patience_evals, keeps_best, judge
        known = start.evaluations if start else NONE_DONE
        self.evaluations = self.settled = known.compared_by(judge.by if judge else "")
        self.wanted: int | None = None
        self.asked: set[str] = set()
        self._num_asks = 0
        self._waits = False

    @property
    def _is_watching(self) -> bool:
        return self._patience > 0 or self._keeps_best

    def ends(self, course: Course) -> bool:
        """Whether a run ends with the last judged evaluation; ``course`` must have its decisions (``Course.decided``).

        Without a best result it does not while a helper has added up gradients: what they are for would be lost.
        """
        if not self.evaluations.stops_run(self._patience):
            return False
        return self._keeps_best or not adds_up(course, self.evaluations.step)

    def may_grant(self, turn: Turn) -> bool:
        """Whether no evaluation to be judged, and no best result to be sent, holds this turn back."""
        if self.wanted is not None:
            return False
        if not self._waits or turn.kind.evaluates:
            return True
        return turn.kind is not StepKind.TRAIN and not self._keeps_best

    def granted(self, turn: Turn) -> None:
        """Note that a turn is granted."""
        self._waits = self._is_watching and (self._waits or turn.kind.evaluates)

    def judge(
        self, step: int, values: tuple[tuple[str, float], ...], labels: Sequence[str] = (), *, head_at: str = ""
    ) -> None:
        """Take a complete evaluation; ``labels`` are the names of classes, ``head_at`` is as in ``Evaluations``."""
        if not self._is_watching:
            return
        sums = dict(values)
        if self._judge is None:
            count = sums.get("count", 0.0)
            value = sums.get("loss_sum", math.nan) / count if count else math.nan
        else:
            value = self._judge.value(sums, labels)
        is_news = step > self.evaluations.step
        self.evaluations, self._waits = self.evaluations.after(step, value, head_at=head_at), False
        if self._keeps_best and is_news and self.is_best(step):
            self.wanted = step
        else:
            self.settled = self.evaluations

    def is_best(self, step: int) -> bool | None:
        """Whether the evaluation at ``step`` is the best so far; None where no best result is kept."""
        if not self._keeps_best:
            return None
        return self.evaluations.best is not None and self.evaluations.best_step == step

    def ask(self, nodes: Iterable[str]) -> int:
        """Begin a request to these nodes for the best result; return its number."""
        self.asked, self._num_asks = set(nodes), self._num_asks + 1
        return self._num_asks

    def sent(self, node: str, number: int) -> bool:
        """Note a node's answer to the last request; return whether every node has sent the best result now."""
        if number != self._num_asks or node not in self.asked:
            return False
        self.asked.discard(node)
        if not self.asked:
            self.wanted, self.settled = None, self.evaluations
        return not self.asked

    def change_owners(self, before: Course, after: Course) -> None:
        """Begin anew where the evaluations from here on have other rows than those before."""
        evaluations = self.evaluations.without(before, after)
        if evaluations != self.evaluations:
            self.evaluations = self.settled = evaluations
            self.wanted = None

    def forget_open(self) -> None:
        """Forget an incomplete evaluation: its open turns are repeated."""
        self._waits, self.asked = False, set()


class TurnGrants:
    """The turns of one run, in their order, granted to all nodes of the placement; raises ``PlanError``.

    Attributes:
        rules: decisions of the techniques of the placement.
        last: the turn that was granted last; None before the first.
        is_exhausted: whether no turn is left to be granted.
        holds: whether nothing is granted from the next train turn on, with the scores before it; where all parameters
            train, whether nothing is granted after the next checkpoint.
    """

    def __init__(
        self,
        moving: Migration,
        *,
        items_ahead: int,
        start: StartPoint | None,
        patience_evals: int,
        keeps_best: bool,
        judge: Judge | None,
    ) -> None:
        self._migration, self._plan = moving, moving.plan
        self.open = OpenTurns(items_ahead)
        self.depths, self.tables = TurnDepths(self._plan.course, start), TurnOperations(moving.part, start)
        self.stopping = EarlyStopping(patience_evals, start, keeps_best=keeps_best, judge=judge)
        self._rules_ahead = max(1, items_ahead)
        self.last: Turn | None = None
        self.is_exhausted = self.holds = False
        self.place(moving.part)
        self._sequence = turn_sequence(self._plan.course, start=start)
        self._next: Turn | None = None
        self._saved_step = self._first_saved = start.step if start else None
        self._since: list[Turn] = []
        self._ahead_of = (0, 0)  # so many turns and items of the sequence were begun twice

    @property
    def chooses_for(self) -> int | None:
        """The step for which an operation table is being chosen; None if none is, or no turn is left."""
        return None if self.is_exhausted else self.tables.chooses_for

    def place(self, part: Plan) -> None:
        """Grant in another placement from now on; no turn may be open."""
        self.nodes, self.copies, self.rules = part.nodes, CopyComparison(part), turn_rules(part, self._rules_ahead)
        self.tables.place(part)

    @property
    def _awaiting(self) -> Turn | None:
        """The next turn, if all turns before it are done; else None."""
        if self.open or self.is_exhausted or self._next is None or not self.stopping.may_grant(self._next):
            return None
        return self._next

    @property
    def moves_before(self) -> Turn | None:
        """The next turn, if the run has to move before it and all turns before it are done; else None."""
        turn = self._awaiting
        return turn if turn is not None and self._migration.is_due(turn) else None

    @property
    def held(self) -> Turn | None:
        """The next turn, if it is held back and all turns before it are done; else None."""
        turn = self._awaiting
        return turn if turn is not None and self._holds_back(turn) else None

    def _holds_back(self, turn: Turn) -> bool:
        if self._plan.course.method.full_parameters:
            return self.holds and turn.first_step == self._saved_step != self._first_saved
        return self.holds and turn.kind in (StepKind.TRAIN, StepKind.SCORE)

    def depth(self, turn: Turn, step: int) -> int:
        """Number of blocks that train at a step of a turn."""
        return depth(turn.settled(self._plan.course), step)

    def ahead(self) -> list[Command]:
        """Grant all turns that may be granted now; log the decisions that they carry."""
        commands: list[Command] = []
        granted: list[Turn] = []
        while not self.is_exhausted and self.open.needs_more:
            if self._next is None and (following := next(self._sequence, None)) is not None:
                self._next = _shifted(following, *self._ahead_of)
            if self._next is None:
                self.is_exhausted = True
                break
            if self._migration.is_due(self._next) or self._holds_back(self._next):
                break
            may_grant = self.depths.may_grant(self._next) and self.stopping.may_grant(self._next)
            may_grant = may_grant and all(rule.may_grant(self._next) for rule in self.rules)
            if not may_grant or not self._has_table(self._next, commands):
                break
            turn = self._ruled(self.tables.decided(self.depths.decided(self._next, self.last)))
            self._next = None
            if turn.kind is StepKind.TRAIN and turn.first_step in turn.unfreeze_at:
                commands.append(LogUnfreeze(turn.first_step, self.depth(turn, turn.first_step)))
            granted.append(turn)
            self._note(turn)
        return [*commands, Grant(tuple(granted))] if granted else commands

    def _ruled(self, turn: Turn) -> Turn:
        return functools.reduce(lambda turn, rule: rule.decided(turn), self.rules, turn)

    def _has_table(self, turn: Turn, commands: list[Command]) -> bool:
        """Whether the turn's operation table is chosen; appends ``ChooseOperations`` if only the choice is missing."""
        if self.tables.may_grant(turn):
            return True
        given = self.tables.given(turn)
        if given is not None:
            commands.append(LogOperations(turn.first_step, given))
            return True
        scores = self.tables.ask(turn)
        if scores is not None:
            commands.append(ChooseOperations(turn.first_step, scores))
        return False

    # ---- recovery ---------------------------------------------------------------------------------

    def commit(self, index: int) -> None:
        """Note that the run never goes back before the end of this turn: it is closed, and its state kept twice."""
        self._since = [turn for turn in self._since if turn.index > index]

    @property
    def repeats(self) -> tuple[StepKind, ...]:
        """Kinds of the turns since the last commit, up to the next train turn."""
        before = itertools.takewhile(lambda turn: turn.kind is not StepKind.TRAIN, self._since)
        return tuple(dict.fromkeys(turn.kind for turn in before))

    def halt(self) -> None:
        """Drop the open turns: the run goes back."""
        self.open = OpenTurns(self.open._items_ahead)
        self.depths.forget_open()
        self.stopping.forget_open()
        self.tables.halt()

    def rewind(self, part: Plan) -> list[Command]:
        """Grant every uncommitted turn once more, in another placement.

        Turns and items get new numbers, so that late messages of the old ones are not taken for theirs.
        """
        self.place(part)
        again, self._since = self._since, []
        if not again or self.last is None:
            return []
        turns, items = self.last.index + 1 - again[0].index, self.last.end_seq - again[0].first_seq
        self._ahead_of = (self._ahead_of[0] + turns, self._ahead_of[1] + items)
        if self._next is not None:
            self._next = _shifted(self._next, turns, items)
        granted = [self._ruled(_shifted(turn, turns, items)) for turn in again]
        for turn in granted:
            self._note(turn)
        return [Grant(tuple(granted))]

    def change_owners(self, plan: Plan, part: Plan, start: StartPoint) -> None:
        """Continue at ``start`` with a plan in which other owners have turns, in its last placement.

        Uncommitted turns are granted again as far as the new plan has them.
        """
        self.is_exhausted = self._ends_early
        if not self.is_exhausted:
            self.stopping.change_owners(self._plan.course, plan.course)
        unfreezing = self.depths.unfreezing.without(self._plan.course, plan.course)
        start = dataclasses.replace(start, unfreezing=unfreezing)
        self._plan, self._next, self._ahead_of, self._since = plan, None, (0, 0), []
        self._sequence = turn_sequence(plan.course, start=start)
        self.depths, self.tables = TurnDepths(plan.course, start), TurnOperations(plan, start)
        self.place(part)

    def chosen(self, step: int, operations: Operations) -> list[Command]:
        """Take a chosen table; no commands if no turn waits for it; raises ``PlanError``."""
        if self.is_exhausted or not self.tables.chosen(step, operations):
            return []
        return [LogOperations(step, operations)]

    def technique_failed(self, node: str, problem: str) -> list[Command]:
        """Stop using a technique on a node from the next turn on; no commands if that was known."""
        is_news = [rule.lose(node, problem) for rule in self.rules]
        return [LogTechniqueFailed(node, problem)] if any(is_news) else []

    @property
    def _ends_early(self) -> bool:
        return self.stopping.ends(self._plan.course.decided(self.depths.unfreezing.unfreeze_at))

    def judge(self, step: int, values: Values) -> list[Command]:
        """Take a complete evaluation; grant nothing more if the run ends with it."""
        course = self._plan.course
        head_at = course.owners[0].node if course.method.full_parameters else ""
        self.stopping.judge(step, values, course.labels, head_at=head_at)
        ends = self._ends_early and step < course.num_steps and not self.is_exhausted
        self.is_exhausted = self.is_exhausted or ends
        told = LogEvaluation(step, values, self.stopping.is_best(step))
        return [told, *([LogStop(step, self.stopping.evaluations)] if ends else [])]

    def drain(self, last: Turn) -> list[Command]:
        """Grant only a checkpoint after ``last``, the last turn, if any step was done.

        A step that has a checkpoint is not saved again: another holder would overwrite its shards.
        """
        self.is_exhausted = True
        if last.end_step in (0, self._saved_step):
            return []
        turn = checkpoint_turn(last, holder=last.owner)
        self._note(turn)
        return [Grant((turn,))]

    def _note(self, turn: Turn) -> None:
        self.last = turn
        self._since.append(turn)
        if turn.kind is StepKind.CHECKPOINT:
            self._saved_step = turn.first_step
        self.open.add(turn, self.nodes)
        self.stopping.granted(turn)
        self.tables.granted(turn)
        for rule in self.rules:
            rule.granted(turn)

    def close(self, turn: Turn) -> None:
        """Close a turn that every node has done; turns must be closed in order."""
        self.open.close(turn)
        self.depths.close(turn)
        self.tables.close(turn)
        for rule in self.rules:
            rule.close(turn)


def _shifted(turn: Turn, turns: int, items: int) -> Turn:
    """Return the turn with index and items moved on, and without cached passages."""
    if not turns and not items:
        return turn
    return dataclasses.replace(turn, index=turn.index + turns, first_seq=turn.first_seq + items, passages=())
