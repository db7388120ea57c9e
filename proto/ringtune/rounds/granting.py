"""Which turns of a run are granted: ahead of those at work, but no further than every decision allows.

A decision (what trains, which operations hold) takes effect at a turn boundary. A turn is granted when all is known on
which it depends, and not before, so that no timing changes what it carries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection

from ringtune.rounds.copy_digests import CopyComparison
from ringtune.rounds.evaluation_sums import Values
from ringtune.rounds.events.round_events import (
    ChooseOperations,
    Command,
    Grant,
    LogCacheLost,
    LogEvaluation,
    LogOperations,
    LogStop,
    LogUnfreeze,
)
from ringtune.rounds.moves.moving import Moving
from ringtune.rounds.turns.open_turns import OpenTurns
from ringtune.rounds.turns.turn_depths import TurnDepths
from ringtune.rounds.turns.turn_operations import TurnOperations
from ringtune.rounds.turns.turn_prefixes import TurnPrefixes
from ringtune.rounds.turns.turn_stopping import TurnStopping
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn, checkpoint_turn, turn_sequence
from ringtune.schedule.turns.versions import depth


class Granting:
    """The turns of one run, in their order.

    Args:
        plan: of the run.
        nodes: that work on every turn.
        items_ahead: grant turns until at least so many items are granted beyond the finished ones.
        start: where the run goes on; None = it begins.
        patience_evals: evaluations without a better loss after which nothing more is granted; 0 = however many.
        keeps_best: whether the result of the best evaluation is kept.
        moving: knows to which placement a turn belongs.

    Attributes:
        nodes: that work on every turn now.
        open: turns that are granted and not done by every node.
        depths: what trains when.
        tables: which operations hold when.
        stopping: whether the run ends early.
        prefixes: where items enter the ring, and are kept.
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
        moving: Moving | None = None,
    ) -> None:
        self._moving = moving
        self.open = OpenTurns(items_ahead)
        self.depths = TurnDepths(plan.course, start)
        self.tables = TurnOperations(plan, start)
        self.stopping = TurnStopping(patience_evals, start, keeps_best=keeps_best)
        part = moving.part if moving else plan
        self.prefixes = TurnPrefixes(part, items_ahead=max(1, items_ahead))
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
        self.nodes, self.copies, self.prefixes = part.nodes, CopyComparison(part), self.prefixes.moved(part)

    @property
    def moves_before(self) -> Turn | None:
        """The next turn, if the run has to move before it and every turn before it is done; else None."""
        if self.open or self.is_exhausted or self._next is None or not self.stopping.may_grant(self._next):
            return None
        return self._next if self._is_elsewhere(self._next) else None

    def _is_elsewhere(self, turn: Turn) -> bool:
        return self._moving is not None and self._moving.is_due(turn)

    def depth(self, turn: Turn, step: int) -> int:
        """How many blocks train at a step of a turn."""
        return depth(self._plan.course.decided(turn.unfreeze_at, turn.operations), step)

    def ahead(self) -> list[Command]:
        """Grant the turns that may be granted now, with the decisions that come into force by that."""
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
            may_grant = self.depths.may_grant(self._next) and self.prefixes.may_grant(self._next)
            may_grant = may_grant and self.stopping.may_grant(self._next)
            if not may_grant or not self._has_table(self._next, commands):
                break
            turn = self.prefixes.decided(self.tables.decided(self.depths.decided(self._next, self.last)))
            self._next = None
            if turn.kind is StepKind.TRAIN and turn.first_step in turn.unfreeze_at:
                commands.append(LogUnfreeze(turn.first_step, self.depth(turn, turn.first_step)))
            granted.append(turn)
            self._note(turn)
        return [*commands, Grant(tuple(granted))] if granted else commands

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

    def go_back(self, part: Plan) -> list[Command]:
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
        granted = [self.prefixes.decided(_shifted(turn, turns, items)) for turn in again]
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
        """Take a table that was chosen, and grant what waited for it; nothing if nobody waits for it any more.

        Raises:
            PlanError: the table does not fit the course.
        """
        if self.is_exhausted or not self.tables.chosen(step, operations):
            return []
        return [LogOperations(step, operations), *self.ahead()]

    def lose_cache(self, node: str, problem: str) -> list[Command]:
        """Count on what a node keeps no longer, from the next turn on; nothing if that is no news."""
        return [LogCacheLost(node, problem)] if self.prefixes.lose(node, problem) else []

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
        self.prefixes.granted(turn)

    def close(self, turn: Turn) -> None:
        """Close a turn that every node has done; turns are closed in their order."""
        self.open.close(turn)
        self.depths.close(turn)
        self.tables.close(turn)
        self.prefixes.close(turn)


def _shifted(turn: Turn, turns: int, items: int) -> Turn:
    """The turn, so many turns and items later, with nothing of it in a cache."""
    if not turns and not items:
        return turn
    return dataclasses.replace(turn, index=turn.index + turns, first_seq=turn.first_seq + items, passages=())
