"""What the coordinator's state machine is told while a run moves, and what it answers: values only."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.rounds.events.replanning_events import Replanned
from ringtune.schedule.changing_hands.placements import Source
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint

# ---- events ----


class Rested(NamedTuple):
    """A node of the placement with this number keeps what it has trained, and offers it to the others."""

    node: str
    placement_number: int


class Moved(NamedTuple):
    """A node has built what the placement with this number wants from it.

    ``fetched_bytes`` came from other nodes: what they have trained.
    """

    node: str
    placement_number: int
    fetched_bytes: int = 0


class MoveFailed(NamedTuple):
    """A node can't rest, or move to the placement with this number; the error's class and message say why."""

    node: str
    placement_number: int
    error: str
    message: str


# ---- commands ----


class Rest(NamedTuple):
    """Let a node keep what it has trained and offer it to the others; ``Rested`` or ``MoveFailed`` answers."""

    node: str


class Move(NamedTuple):
    """Let a node move to another placement, or go back to the one it had; ``Moved`` or ``MoveFailed`` answers.

    Attributes:
        part: of the plan, with the placement; a node that is not in it only stops.
        start: where the run goes on.
        from_placement_number: in which the trained blocks were hosted as ``sources`` says.
        sources: the trained blocks that the node takes over, perhaps from itself.
        from_step: the run recovers, and blocks and head are as they were kept after this step; None = as they are.
        head_from: from whom it fetches the head as it was kept then; empty = from nobody.
    """

    node: str
    part: Plan
    start: StartPoint
    from_placement_number: int
    sources: tuple[Source, ...]
    from_step: int | None = None
    head_from: str = ""


class LogPlan(NamedTuple):
    """Log that the plan has another placement from now on, to which the run moves, and why."""

    plan: Plan
    why: Replanned


class LogMove(NamedTuple):
    """Log that the run has moved after ``step`` steps, or has stayed and why.

    Attributes:
        placement_number: to which it was to move.
        part: of the plan that holds from here on.
        seconds: from the last turn before to the first one after.
        fetched_bytes: by node, of what others had trained.
        problem: why it stays; empty = it has moved.
    """

    step: int
    placement_number: int
    part: Plan
    seconds: float
    fetched_bytes: tuple[tuple[str, int], ...]
    problem: str = ""
