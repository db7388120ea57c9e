"""The coordinator's part in operation tables: which turn may be granted, and which table it carries.

Where the course leaves no tables to the run, this does nothing. A table holds from the train turn on before which it
was chosen (``boundaries.table_is_due``); that turn is granted only when the table is there, and the table is asked for
only when every score that counts is there. So no timing changes what a turn carries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringtune.errors import PlanError
from ringtune.rounds.turns.turn_scores import check_scores
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.boundaries import table_is_due
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn


class TurnOperations:
    """The operation tables that one run chooses.

    Args:
        plan: of the run.
        start: where it goes on; None = it begins.

    Attributes:
        in_force: the table that the next turn carries; None as long as there is none.

    Raises:
        PlanError: the table in force at ``start`` is missing, or not of this course.
    """

    def __init__(self, plan: Plan, start: StartPoint | None) -> None:
        step, self.in_force = (start.step, start.operations) if start else (0, None)
        check_in_force(plan, step, self.in_force)
        self._plan = plan
        self._asked_for: int | None = None
        self._chosen_for: int | None = None
        self._open: dict[int, set[str]] = {}  # score turn -> nodes whose scores are here
        self._scores: list[BlockScores] = []

    @property
    def chooses_for(self) -> int | None:
        """The step for which a table was asked and is not there yet; None if there is none."""
        return self._asked_for if self._asked_for != self._chosen_for else None

    def may_grant(self, turn: Turn) -> bool:
        """Whether the table that the turn carries is chosen already."""
        step = turn.first_step
        is_chosen = self._chosen_for == step or not table_is_due(self._plan.course, step)
        return turn.kind is not StepKind.TRAIN or is_chosen

    def given(self, turn: Turn) -> Operations | None:
        """Take the table that was given for a turn into force; None if the run has to choose."""
        choice = self._plan.course.choice
        found = choice.given_at(turn.first_step) if choice is not None else None
        if found is not None:
            self._asked_for = self._chosen_for = turn.first_step
            self.in_force = found
        return found

    def ask(self, turn: Turn) -> tuple[BlockScores, ...] | None:
        """The scores by which the table of a turn is to be chosen, in order; None if it can't be, or was asked for."""
        if self._open or self._asked_for == turn.first_step:
            return None
        self._asked_for = turn.first_step
        scores, self._scores = tuple(sorted(self._scores, key=_position)), []
        return scores

    def chosen(self, step: int, operations: Operations) -> bool:
        """Take a chosen table into force; False, and nothing changes, if none is waited for at this step.

        Raises:
            PlanError: the table does not fit the course.
        """
        if self.chooses_for != step:
            return False
        self._plan.decided((), operations)
        self._chosen_for, self.in_force = step, operations
        return True

    def decided(self, turn: Turn) -> Turn:
        """The turn with the table that holds for it."""
        if self._plan.course.choice is None:
            return turn
        return dataclasses.replace(turn, operations=self.in_force)

    # ---- scores -----------------------------------------------------------------------------------

    def granted(self, turn: Turn) -> None:
        """Expect the scores of a turn that was granted."""
        if turn.kind is StepKind.SCORE:
            self._open[turn.index] = set()

    def note(self, node: str, turn: Turn, scores: Sequence[BlockScores]) -> None:
        """Note the scores with which a node ends an open turn; its second report of a turn changes nothing.

        Raises:
            IntegrityError: they are not just those that it owes; names node and turn.
        """
        nodes = self._open.get(turn.index)
        if nodes is not None and node in nodes:
            return
        check_scores(self._plan, turn, node, scores)
        if nodes is not None:
            nodes.add(node)
            self._scores += scores

    def close(self, turn: Turn) -> None:
        """Note that every node has ended a turn."""
        self._open.pop(turn.index, None)


def check_in_force(plan: Plan, step: int, operations: Operations | None) -> None:
    """Refuse a table that can't be in force after ``step`` steps of a run.

    Raises:
        PlanError: there is none where there has to be one, one where there can't be any, or it does not fit.
    """
    if plan.course.choice is not None and step and operations is None:
        raise PlanError(f"the checkpoint of step {step} has no table of operations; it is of another run")
    if operations is not None:
        plan.decided((), operations)


def _position(entry: BlockScores) -> tuple[str, int, int, int]:
    return entry[:4]
