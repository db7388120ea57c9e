"""Spans: the actions that a node carried out, each with its start and end."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.schedule.actions import Action, Scope


class Span(NamedTuple):
    """One action of a node with its start and end, in seconds of the clock of whoever recorded it.

    A node records monotonic seconds, its reports carry unix seconds, and a virtual ring has virtual seconds.
    ``worked_s`` is what the action would have taken at the quota of processor time alone; 0 where no quota holds.
    """

    action: Action
    start_s: float
    end_s: float
    worked_s: float = 0.0

    @property
    def is_compute(self) -> bool:
        """Whether it kept the node's processor busy."""
        return self.action.op.scope is not Scope.MESSAGE
