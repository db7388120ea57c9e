"""How a run on the virtual clock comes to its operation tables, where its course leaves them to the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ringtune.rounds.turns.turn_scores import score_keys
from ringtune.schedule.operations.given import GivenTable
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.spreading.expected import expected_table
from ringtune.schedule.turns.turns import Turn


class Chooser(Protocol):
    """What nodes report at the end of a score turn, and the table that comes of it."""

    def scores(self, node: str, turn: Turn) -> tuple[BlockScores, ...]:
        """The scores that a node reports at the end of a turn; nothing if it is no score turn."""

    def table(self, step: int, scores: Sequence[BlockScores]) -> Operations:
        """The table that holds from ``step`` on."""


class ExpectedTables:
    """Scores that say nothing, and at every decision the table that is expected before any scores are known.

    Args:
        plan: of the run.
        known: tables that a real run of the plan has chosen; they come in place of expected ones.
    """

    def __init__(self, plan: Plan, known: Sequence[GivenTable] = ()) -> None:
        self._plan = plan
        self._known = {table.step: table.operations for table in known}

    def scores(self, node: str, turn: Turn) -> tuple[BlockScores, ...]:
        """A zero for every score that the node owes."""
        choice = self._plan.course.choice
        values = ((0.0,) * choice.subnets,) * len(choice.scores) if choice is not None else ()
        return tuple(BlockScores(turn.owner, *key, values) for key in score_keys(self._plan, turn, node))

    def table(self, step: int, scores: Sequence[BlockScores]) -> Operations:
        """The known table or the expected one, whatever the scores."""
        return self._known.get(step) or expected_table(self._plan.course)
