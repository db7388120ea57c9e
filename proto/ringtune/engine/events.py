"""Events, commands, spans and recordings of the engine of a node, as values.

Every driver (agent, simulator, tests) translates between its world and these values. All have a JSON form, so that a
recorded run can be fed to an engine again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringtune.schedule.actions import Action, Scope, TensorKey
from ringtune.schedule.turns import Turn

# ---- events: something happened ------------------------------------------------------------------


class TurnGranted(NamedTuple):
    """The coordinator permits work on ``turn``."""

    turn: Turn


class TensorArrived(NamedTuple):
    """A whole tensor with a valid checksum is in the inbox."""

    key: TensorKey
    source: str


class HeadArrived(NamedTuple):
    """The head for ``turn`` is in the inbox."""

    turn: int
    source: str


class ParcelArrived(NamedTuple):
    """A whole parcel is in the inbox, with content that the engine does not read."""

    key: TensorKey
    source: str


Arrival = TensorArrived | HeadArrived | ParcelArrived


class CreditArrived(NamedTuple):
    """``source`` has taken one of this node's hidden states for ``boundary`` from its inbox.

    For a parcel ``boundary`` is ``schedule.lowering.credit_boundary`` of its kind.
    """

    boundary: int
    source: str


class ActionDone(NamedTuple):
    """The compute action of the last ``RunAction`` is complete.

    ``values`` are numbers for the report: an H gives ``loss_sum``, ``count`` and, in an evaluation, ``correct``.
    """

    action: Action
    values: tuple[tuple[str, float], ...] = ()


class TimerFired(NamedTuple):
    """The deadline of a timer has passed."""

    timer: str


class StopRequested(NamedTuple):
    """The run ends for this node, whatever its state."""

    reason: str


Event = (
    TurnGranted | TensorArrived | HeadArrived | ParcelArrived | CreditArrived | ActionDone | TimerFired | StopRequested
)

# ---- commands: do this ---------------------------------------------------------------------------


class RunAction(NamedTuple):
    """Run one compute action; at most one runs at a time."""

    action: Action


class Accept(NamedTuple):
    """Move a tensor from the inbox to its micro-batch; for a hidden state, return a credit to ``source``."""

    key: TensorKey
    source: str


class SendTensor(NamedTuple):
    """Send the micro-batch's hidden state or gradient, and drop it here."""

    key: TensorKey
    target: str


class SendHead(NamedTuple):
    """Send the head with its optimizer state to the initiator of ``turn``."""

    turn: int
    target: str


class AcceptHead(NamedTuple):
    """Load the head that arrived for ``turn``."""

    turn: int
    source: str


class SendParcel(NamedTuple):
    """Send a parcel; its tensors may change afterwards."""

    key: TensorKey
    target: str


class AcceptParcel(NamedTuple):
    """Take a parcel from the inbox, and return a credit to ``source``."""

    key: TensorKey
    source: str


class SetTimer(NamedTuple):
    """Send the engine ``TimerFired(timer)`` at time ``at_s``; replaces a timer of the same name."""

    timer: str
    at_s: float


class CancelTimer(NamedTuple):
    """Cancel a timer."""

    timer: str


class ReportStep(NamedTuple):
    """Report to the coordinator the values of a finished own item, summed over its micro-batches."""

    seq: int
    step: int
    kind: str
    values: tuple[tuple[str, float], ...]


class ReportTurn(NamedTuple):
    """Report to the coordinator that this node has done all its actions of a turn."""

    turn: int


class Fail(NamedTuple):
    """End the run; ``error`` is a class name of ``ringtune.errors``."""

    error: str
    message: str


Command = (
    RunAction
    | Accept
    | SendTensor
    | SendHead
    | AcceptHead
    | SendParcel
    | AcceptParcel
    | SetTimer
    | ReportStep
    | ReportTurn
    | Fail
)


class Handled(NamedTuple):
    """One call of an engine, with its answer; a new engine gives the same answers to the same events."""

    now_s: float
    event: Event
    commands: Sequence[Command]


class Span(NamedTuple):
    """One action of a node with its start and end in seconds.

    They are monotonic at the node, unix seconds in reports, virtual in a simulator. ``worked_s`` is the duration
    without the rests of a quota of processor time; 0 where no quota holds.
    """

    action: Action
    start_s: float
    end_s: float
    worked_s: float = 0.0

    @property
    def is_compute(self) -> bool:
        """Whether the action used the processor."""
        return self.action.op.scope is not Scope.MESSAGE
