"""Grants of turns on the coordinator: ahead of those at work, but no further than every decision allows.

A decision (what trains, which operations hold) takes effect at a turn boundary. A turn is granted when all is known on
which it depends, and not before, so that no timing changes its work.

Unfreezing under ``auto``: the loss of a train turn counts when the turn is closed, with all its steps reported, and
turn t is granted only when t - 2 is closed.

Evaluations: every owner with evaluation rows carries its part out in a turn of its own. Without patience and
``train.keep_best`` turns are granted beyond an evaluation. With ``keep_best`` nothing is granted beyond the best one so
far until every node has sent what it trained, so that they send what was evaluated. After the last turn no node is
asked: the results that are collected then are of the same step ::

    evaluation after step    10        20       30        40, the last one
    loss                     0.7       0.5      0.6       0.4
    sent                     step 10   step 20  -         with the end of the run
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ringtune.errors import IntegrityError
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
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import NONE_DONE, NOTHING_KNOWN, StartPoint, StepKind, Turn, checkpoint_turn, turn_sequence
from ringtune.schedule.versions import depth
from ringtune.techniques import turn_rules
from ringtune.techniques.operations import TurnOperations
from ringtune.techniques.replicas import CopyComparison

Values = tuple[tuple[str, float], ...]


class EvaluationSums:
    """The figures of the evaluation that is under way."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Values] = {}
        self._done: set[str] = set()

    def note(self, seq: int, values: Values) -> None:
        """Take the figures of one item."""
        self._by_seq[seq] = values

    def close(self, turn: Turn, owners: Iterable[Owner]) -> Values | None:
        """Note that a turn is closed; return the sums with the last owner's turn, else None.

        A run that is drained may stop between two owners: that evaluation is never logged, a resumed run repeats it.
        A fast owner may have reported of the next evaluation already; its values stay for that one.
        """
        self._done.add(turn.owner)
        if self._done != {each.node for each in owners if each.eval_rows}:
            return None
        mine = {seq: self._by_seq.pop(seq) for seq in sorted(self._by_seq) if seq < turn.end_seq}
        self._done = set()
        return _summed(mine)

    def forget(self) -> None:
        """Forget the evaluation that is under way: it is begun anew."""
        self._by_seq, self._done = {}, set()


def _summed(values: Mapping[int, Values]) -> Values:
    """Sum values by name, in the order of ``seq``: arrival must not change the last bits."""
    sums: dict[str, float] = {}
    for seq in sorted(values):
        for name, value in values[seq]:
            sums[name] = sums.get(name, 0.0) + value
    return tuple(sorted(sums.items()))


class OpenTurn(NamedTuple):
    """The oldest open turn, and the nodes that it waits for."""

    turn: Turn
    waits_for: tuple[str, ...]


class OpenTurns:
    """The open turns of one run.

    Args:
        items_ahead: grant turns until at least so many items are granted beyond the finished ones.
    """

    def __init__(self, items_ahead: int) -> None:
        self._items_ahead = items_ahead
        self._turns: dict[int, Turn] = {}
        self._waits: dict[int, set[str]] = {}
        self._reported_items: dict[int, set[int]] = {}

    def __bool__(self) -> bool:
        """Whether a turn is open."""
        return bool(self._turns)

    @property
    def needs_more(self) -> bool:
        """Whether to grant more turns: fewer than two are open, or too few items are ahead."""
        ahead = sum(turn.num_items - len(self._reported_items[turn.index]) for turn in self._turns.values())
        return len(self._turns) < 2 or ahead < self._items_ahead

    @property
    def change_anything(self) -> bool:
        """Whether an open turn trains or saves; scores and evaluations leave nothing behind."""
        return any(turn.kind.has_update or turn.kind is StepKind.CHECKPOINT for turn in self._turns.values())

    @property
    def oldest(self) -> OpenTurn | None:
        """The oldest open turn; None if none is open."""
        if not self._turns:
            return None
        first = min(self._turns)
        return OpenTurn(self._turns[first], tuple(sorted(self._waits[first])))

    def add(self, turn: Turn, nodes: Collection[str]) -> None:
        """Open a turn that was granted to these nodes."""
        self._turns[turn.index] = turn
        self._waits[turn.index] = set(nodes)
        self._reported_items[turn.index] = set()

    def get(self, index: int) -> Turn | None:
        """Find an open turn by its index."""
        return self._turns.get(index)

    def of_item(self, seq: int) -> Turn | None:
        """Find the open turn that has an item."""
        return next((turn for turn in self._turns.values() if turn.first_seq <= seq < turn.end_seq), None)

    def item_done(self, turn: Turn, told: StepReported) -> bool:
        """Note that an item of an open turn is finished; False if that was known.

        Raises:
            IntegrityError: another node than its owner reports it, or with the step of another turn.
        """
        if told.node != turn.owner or not turn.first_step <= told.step <= turn.end_step:
            raise IntegrityError(
                f"node {told.node} reports item {told.seq} of step {told.step}; it is of node {turn.owner} and of a "
                f"turn that begins at step {turn.first_step}; use one version on all machines"
            )
        known = self._reported_items[turn.index]
        is_new = told.seq not in known
        known.add(told.seq)
        return is_new

    def node_done(self, node: str, turn: Turn) -> None:
        """Note that a node has done an open turn."""
        self._waits[turn.index].discard(node)

    def close(self, turn: Turn) -> None:
        """Forget a turn that is done everywhere."""
        del self._turns[turn.index], self._waits[turn.index], self._reported_items[turn.index]

    def cleared(self) -> OpenTurns:
        """The same with no turn open."""
        return OpenTurns(self._items_ahead)


class TurnDepths:
    """The unfreezing decisions of one run.

    Args:
        course: of the run.
        start: where it continues; None = it begins.

    Attributes:
        unfreezing: what is known of the closed turns.

    Raises:
        PlanError: what ``start`` knows is not of this course and step.
    """

    def __init__(self, course: Course, start: StartPoint | None) -> None:
        self.unfreezing = start.unfreezing if start else NOTHING_KNOWN
        self.unfreezing.check(course, start.step if start else 0)
        self._course = course
        self._losses: dict[int, dict[int, tuple[float, float]]] = {}

    def may_grant(self, turn: Turn) -> bool:
        """Whether all losses are known on which the depth of this turn may depend."""
        if not self._course.decides or turn.kind is not StepKind.TRAIN:
            return True
        return turn.first_step // self._course.local_iterations < self.unfreezing.num_turns + TURNS_AHEAD

    def decided(self, turn: Turn, last: Turn | None) -> Turn:
        """The turn with the decisions that hold for it.

        A turn between train turns takes the decisions of the turn before it, ``last``.
        """
        if not self._course.decides:
            return turn
        step = turn.first_step
        if turn.kind is not StepKind.TRAIN and last is not None:
            return dataclasses.replace(turn, unfreeze_at=last.unfreeze_at)
        return dataclasses.replace(turn, unfreeze_at=self.unfreezing.holding(step))

    def note(self, turn: Turn, seq: int, values: tuple[tuple[str, float], ...]) -> None:
        """Note the loss of a finished item of an open turn; a second report of an item changes nothing."""
        if self._course.decides and turn.kind is StepKind.TRAIN:
            found = dict(values)
            sums = (found.get("loss_sum", math.nan), found.get("count", 0.0))
            self._losses.setdefault(turn.index, {}).setdefault(seq, sums)

    def is_complete(self, turn: Turn) -> bool:
        """Whether every loss of the turn that counts is here."""
        if not self._course.decides or turn.kind is not StepKind.TRAIN:
            return True
        return len(self._losses.get(turn.index, ())) == turn.num_items

    def close(self, turn: Turn) -> None:
        """Add a closed turn's mean loss; turns are closed in order."""
        losses = self._losses.pop(turn.index, None)
        if losses is None:
            return
        count = sum(losses[seq][1] for seq in sorted(losses))
        loss_sum = sum(losses[seq][0] for seq in sorted(losses))
        self.unfreezing = self.unfreezing.after(self._course, loss_sum / count if count else math.nan)

    def forget_open(self) -> None:
        """Forget the losses of turns that are not closed: they are begun anew."""
        self._losses.clear()


class BestResults:
    """The results that the nodes of one run send of the best evaluation.

    Attributes:
        wanted: after which step that evaluation was; None = nothing is wanted.
        asked: nodes that were asked and have not sent all yet.
        num_asks: how often the nodes were asked; an answer to an older request counts for nothing.
    """

    def __init__(self) -> None:
        self.wanted: int | None = None
        self.asked: set[str] = set()
        self.num_asks = 0

    def ask(self, nodes: Iterable[str]) -> int:
        """Note that the nodes are asked; return the number of the request."""
        self.asked, self.num_asks = set(nodes), self.num_asks + 1
        return self.num_asks

    def answered(self, node: str, number: int) -> bool:
        """Take the answer of a node; return whether it was the last one that lacked."""
        if number != self.num_asks or node not in self.asked:
            return False
        self.asked.discard(node)
        return not self.asked

    def reset_requests(self) -> None:
        """Count on no answer any more: nodes have to be asked anew."""
        self.asked = set()


class EarlyStopping:
    """Decisions of one run by its evaluations: its end, and its best result.

    Args:
        patience_evals: evaluations without a better loss after which the run ends; 0 = it does not.
        start: where the run continues; None = it begins.
        keeps_best: whether the result of the best evaluation is kept.

    Attributes:
        evaluations: what is known of them.
        settled: what a resumed run may count on: the same, or, while a best result is not sent yet,
            what was known before its evaluation, which is repeated then.
        best: the result that is wanted.
    """

    def __init__(self, patience_evals: int, start: StartPoint | None, *, keeps_best: bool = False) -> None:
        self._patience, self._keeps_best = patience_evals, keeps_best
        self.evaluations = self.settled = start.evaluations if start else NONE_DONE
        self.best = BestResults()
        self._waits = False

    @property
    def _is_watching(self) -> bool:
        return self._patience > 0 or self._keeps_best

    @property
    def has_ended(self) -> bool:
        """Whether the run ends with the last evaluation that was judged."""
        return self.evaluations.stops_run(self._patience)

    def may_grant(self, turn: Turn) -> bool:
        """Whether every evaluation is judged, and its result sent, on which it depends whether a turn is granted."""
        if self.best.wanted is not None:
            return False
        if not self._waits or turn.kind is StepKind.EVALUATE:
            return True
        return turn.kind is not StepKind.TRAIN and not self._keeps_best

    def granted(self, turn: Turn) -> None:
        """Note that a turn is granted."""
        self._waits = self._is_watching and (self._waits or turn.kind is StepKind.EVALUATE)

    def judge(self, step: int, values: tuple[tuple[str, float], ...]) -> bool:
        """Take a complete evaluation; return whether the run ends with it."""
        if not self._is_watching:
            return False
        sums = dict(values)
        count = sums.get("count", 0.0)
        loss = sums.get("loss_sum", math.nan) / count if count else math.nan
        is_news = step > self.evaluations.step
        self.evaluations, self._waits = self.evaluations.after(step, loss), False
        if self._keeps_best and is_news and self.is_best(step):
            self.best.wanted = step
        else:
            self.settled = self.evaluations
        return self.has_ended

    def is_best(self, step: int) -> bool | None:
        """Whether the evaluation after a step is the best one so far; None where no best result is kept."""
        if not self._keeps_best:
            return None
        return self.evaluations.best is not None and self.evaluations.best_step == step

    def sent(self) -> None:
        """Note that the best result is where it is kept."""
        self.best.wanted, self.settled = None, self.evaluations

    def forget_open(self) -> None:
        """Wait for no evaluation that is not complete: the turns that are not closed are begun anew."""
        self._waits = False
        self.best.reset_requests()


class TurnGrants:
    """The turns of one run, in their order.

    Args:
        plan: of the run.
        nodes: that work on every turn.
        items_ahead: grant turns until at least so many items are granted beyond the finished ones.
        start: where the run continues; None = it begins.
        patience_evals: evaluations without a better loss after which nothing more is granted; 0 = however many.
        keeps_best: whether the result of the best evaluation is kept.
        moving: knows to which placement a turn belongs.

    Attributes:
        nodes: that work on every turn now.
        open: turns that are granted and not done by every node.
        depths: what trains when.
        tables: which operations hold when.
        stopping: whether the run ends early.
        rules: what the techniques of the placement decide.
        copies: whether the owners' copies of embedding and head are equal.
        last: the turn that was granted last; None before the first.
        is_exhausted: whether no turn is left to be granted.

    Raises:
        PlanError: ``start`` is not of this plan.
    """

    def __init__(
        self,
        plan: Plan,
        nodes: Collection[str],
        *,
        items_ahead: int,
        start: StartPoint | None,
        patience_evals: int = 0,
        keeps_best: bool = False,
        moving: Migration | None = None,
    ) -> None:
        self._migration = moving
        self.open = OpenTurns(items_ahead)
        self.depths = TurnDepths(plan.course, start)
        self.tables = TurnOperations(plan, start)
        self.stopping = EarlyStopping(patience_evals, start, keeps_best=keeps_best)
        part = moving.part if moving else plan
        self._rules_ahead = max(1, items_ahead)
        self.rules = turn_rules(part, self._rules_ahead)
        self.copies = CopyComparison(part)
        self.last: Turn | None = None
        self.is_exhausted = False
        self._plan, self.nodes = plan, nodes
        self._sequence = turn_sequence(plan.course, start=start)
        self._next: Turn | None = None
        self._saved_step = start.step if start else None
        self._since: list[Turn] = []
        self._ahead_of = (0, 0)  # so many turns and items of the sequence were begun twice

    @property
    def chooses_for(self) -> int | None:
        """The step whose operation table is waited for; None if none is, as in a run that grants nothing more."""
        return None if self.is_exhausted else self.tables.chooses_for

    def place(self, part: Plan) -> None:
        """Grant in another placement from now on, in which nothing is kept yet; no turn is open."""
        self.nodes, self.copies, self.rules = part.nodes, CopyComparison(part), turn_rules(part, self._rules_ahead)

    @property
    def moves_before(self) -> Turn | None:
        """The next turn, if the run has to move before it and every turn before it is done; else None."""
        if self.open or self.is_exhausted or self._next is None or not self.stopping.may_grant(self._next):
            return None
        return self._next if self._is_elsewhere(self._next) else None

    def _is_elsewhere(self, turn: Turn) -> bool:
        return self._migration is not None and self._migration.is_due(turn)

    def depth(self, turn: Turn, step: int) -> int:
        """How many blocks train at a step of a turn."""
        return depth(self._plan.course.decided(turn.unfreeze_at, turn.operations), step)

    def ahead(self) -> list[Command]:
        """Grant the turns that may be granted now, with the decisions that are made by that."""
        commands: list[Command] = []
        granted: list[Turn] = []
        while not self.is_exhausted and self.open.needs_more:
            if self._next is None:
                self._next = self._numbered(next(self._sequence, None))
            if self._next is None:
                self.is_exhausted = True
                break
            if self._is_elsewhere(self._next):
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
        """The turn with what the techniques of the placement decide of it."""
        return functools.reduce(lambda turn, rule: rule.decided(turn), self.rules, turn)

    def _has_table(self, turn: Turn, commands: list[Command]) -> bool:
        """Whether the table is chosen that a turn carries; if nothing but the choice is missing, it is asked for."""
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
        """Never go back to a turn up to this one: it is closed, and what it changed is kept twice."""
        self._since = [turn for turn in self._since if turn.index > index]

    @property
    def repeats(self) -> tuple[StepKind, ...]:
        """Kinds of the turns before the next train turn to which the run would go back."""
        before = itertools.takewhile(lambda turn: turn.kind is not StepKind.TRAIN, self._since)
        return tuple(dict.fromkeys(turn.kind for turn in before))

    def halt(self) -> None:
        """Hear no more of the turns that are open: the run goes back."""
        self.open = self.open.cleared()
        self.depths.forget_open()
        self.stopping.forget_open()

    def rewind(self, part: Plan) -> list[Command]:
        """Grant in another placement, once more, every turn that is not committed.

        Turns and items are numbered on, so that nothing that is still under way of the old ones is taken for theirs.
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

    def leave_out(self, plan: Plan, part: Plan, start: StartPoint) -> None:
        """Go on at a start point with a plan in which fewer owners have turns, in its last placement.

        What is not committed is granted again as far as it is of the plan, and as the plan has it then.
        """
        unfreezing = self.depths.unfreezing.without(self._plan.course, plan.course)
        start = dataclasses.replace(start, unfreezing=unfreezing)
        self._plan, self._next, self._ahead_of, self._since = plan, None, (0, 0), []
        self._sequence, self.is_exhausted = turn_sequence(plan.course, start=start), self.stopping.has_ended
        self.depths, self.tables = TurnDepths(plan.course, start), TurnOperations(plan, start)
        self.place(part)

    def _numbered(self, turn: Turn | None) -> Turn | None:
        return None if turn is None else _shifted(turn, *self._ahead_of)

    def chosen(self, step: int, operations: Operations) -> list[Command]:
        """Take a chosen table, and grant the turns that waited for it; none if none waits any more.

        Raises:
            PlanError: the table does not fit the course.
        """
        if self.is_exhausted or not self.tables.chosen(step, operations):
            return []
        return [LogOperations(step, operations), *self.ahead()]

    def technique_failed(self, node: str, problem: str) -> list[Command]:
        """Count on a node for a technique no longer, from the next turn on; nothing if that is no news."""
        is_news = [rule.lose(node, problem) for rule in self.rules]
        return [LogTechniqueFailed(node, problem)] if any(is_news) else []

    def judge(self, step: int, values: Values) -> list[Command]:
        """Take a complete evaluation: what waited for it may be granted now, or nothing if the run ends with it."""
        ends = self.stopping.judge(step, values) and step < self._plan.course.num_steps and not self.is_exhausted
        self.is_exhausted = self.is_exhausted or ends
        told = LogEvaluation(step, values, self.stopping.is_best(step))
        return [told, *([LogStop(step, self.stopping.evaluations)] if ends else [])]

    def drain(self, last: Turn) -> list[Command]:
        """Grant nothing more but a checkpoint after ``last``, the last turn, if any step was done.

        What has a checkpoint already is not saved again: another holder would write over its shards.
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
        """Close a turn that every node has done; turns are closed in their order."""
        self.open.close(turn)
        self.depths.close(turn)
        self.tables.close(turn)
        for rule in self.rules:
            rule.close(turn)


def _shifted(turn: Turn, turns: int, items: int) -> Turn:
    """The turn, so many turns and items later, with nothing of it in a cache."""
    if not turns and not items:
        return turn
    return dataclasses.replace(turn, index=turn.index + turns, first_seq=turn.first_seq + items, passages=())
