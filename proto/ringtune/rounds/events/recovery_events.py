"""What the coordinator's state machine is told in a recovery, and what it answers: values only."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import Turn

# ---- events ----


class Halted(NamedTuple):
    """A node has stopped, to recover in the placement with this number; it has what it kept of committed turns."""

    node: str
    placement_number: int


class Placed(NamedTuple):
    """There is a placement without the lost nodes; it shall have this number."""

    placement_number: int
    placement: Placement


class NotPlaced(NamedTuple):
    """There is no placement without the lost nodes; the error's class and message say why."""

    placement_number: int
    error: str
    message: str


class NodeJoined(NamedTuple):
    """A node that was lost is back, or a new one is there: it may have a place from now on.

    The driver has seen that its model, and its rows if it owns some, are those of the plan.
    """

    node: str


# ---- commands ----


class AwaitNodes(NamedTuple):
    """Tell people that the run waits for nodes, why, and until when.

    Attributes:
        nodes: whose return lets the run go on, as far as they have names.
        why: it can't go on without them.
        until_s: on the clock of the state machine.
    """

    nodes: tuple[str, ...]
    why: str
    until_s: float


class Halt(NamedTuple):
    """Let a node stop, to recover in the placement with this number; ``Halted`` or ``MoveFailed`` answers."""

    node: str
    placement_number: int


class PlaceAgain(NamedTuple):
    """Find a placement without the lost nodes, for the steps after ``step``; ``Placed`` or ``NotPlaced`` answers."""

    placement_number: int
    part: Plan
    lost: tuple[str, ...]
    step: int


class ShowStep(NamedTuple):
    """Show people an item that is done for the first time; its line is logged once its turn is committed.

    Fields are those of ``LogStep``.
    """

    turn: Turn
    seq: int
    step: int
    depth: int
    values: tuple[tuple[str, float], ...]


class LogRecovery(NamedTuple):
    """Log that the run goes on without a node that was lost, or after a bad step, from the end of ``step`` on.

    Attributes:
        step: the last one of the turn to which all went back.
        lost: nodes that were lost in this recovery.
        plan: of the run from now on.
        part: of the plan that holds from here on.
        seconds: from the loss to the first turn that is granted again.
        fetched_bytes: by node, of what others had kept.
        bad_step: what was not finite, where it and what came with it since ``step`` is done once more; else empty.
        left_out: those of ``lost`` that owned rows, and whose turns are left out from here on.
        back: those of ``lost`` that have come back meanwhile.
    """

    step: int
    lost: tuple[str, ...]
    plan: Plan
    part: Plan
    seconds: float
    fetched_bytes: tuple[tuple[str, int], ...]
    bad_step: str = ""
    left_out: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
