"""What a run does after a bad step, one with a loss, hidden state, gradient or weight that is not finite.

No node applies an update of which it sees that it is bad. Others may have applied theirs by then, so all go back to the
end of the last committed turn, and every turn since is done once more::

    turn        0          1          2  (bad)
    committed   yes        no         no        all go back to the end of turn 0
    again                  3          4         bad once more, in 3 or 4: the run ends

A fault that was there once, as of a memory chip, leaves no trace: the run's result is that of the undisturbed one.
What is bad again is of the training, and would be so for ever. Once turn 4 is committed, another bad step has a second
try of its own.
"""

from __future__ import annotations

from typing import Final

from ringtune.errors import DivergedError
from ringtune.rounds.events.round_events import NodeFailed

NOTHING_KEPT: Final = "it was not done once more, because the plan keeps no turns to go back to (recovery.copies)"


def is_bad_step(event: NodeFailed) -> bool:
    """Whether a node tells of numbers that are not finite."""
    return event.error == DivergedError.__name__ and not event.lost


class BadSteps:
    """Which turns of one run are done once more because of a bad step."""

    def __init__(self) -> None:
        self._is_going_back = False
        self._committed = self._last_again = -1

    def commit(self, index: int) -> None:
        """Note that every turn up to this one is committed."""
        self._committed = index

    def why_it_ends(self, step: int | None) -> str:
        """Why a run does not go back because of a bad step; empty if it does.

        Args:
            step: to whose end it would go back; None = to none.
        """
        if step is None:
            return "no turn has ended since the run was resumed or loaded, so there is nothing to go back to"
        if self._committed < self._last_again:
            return f"the steps after step {step} were done a second time because of it, and it came again"
        return ""

    def go_back(self) -> None:
        """All nodes go back because of a bad step."""
        self._is_going_back = True

    def went_back(self, last: int) -> None:
        """Note up to which turn everything is done again, of whatever reason all went back."""
        if self._is_going_back or self._committed < self._last_again:
            self._last_again = last
        self._is_going_back = False
