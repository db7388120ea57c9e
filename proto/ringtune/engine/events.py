"""Events, commands, spans and recordings of the engine of a node: values only.

Every driver (agent, simulator, tests) turns its world into these events and carries these commands out. Both have a
JSON form, so that a recorded run can be fed to an engine again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringtune.schedule.actions import Action, Scope, TensorKey
from ringtune.schedule.turns import Turn

# ---- events: something happened ------------------------------------------------------------------


class TurnGranted(NamedTuple):
    """The coordinator says that ``turn`` may be worked on."""

    turn: Turn


class TensorArrived(NamedTuple):
    """A whole, checked tensor is in the inbox."""

    key: TensorKey
    source: str


class HeadArrived(NamedTuple):
    """The head for ``turn`` is in the inbox."""

    turn: int
    source: str


class ParcelArrived(NamedTuple):
    """A whole parcel of ``source``, which is opaque to the wire, is in the inbox."""

    key: TensorKey
    source: str


class CreditArrived(NamedTuple):
    """``source`` took one of this node's hidden states at ``boundary`` out of its inbox.

    With the boundary ``schedule.lowering.credit_boundary`` of a kind of parcel it took one of these.
    """

    boundary: int
    source: str


class ActionDone(NamedTuple):
    """The compute action that was asked for is complete.

    ``values`` are numbers that the action yields, for the report: an H gives ``loss_sum``, ``count``
    and, for evaluation, ``correct``.
    """

    action: Action
    values: tuple[tuple[str, float], ...] = ()


class TimerFired(NamedTuple):
    """The deadline that was set has passed."""

    timer: str


class StopRequested(NamedTuple):
    """The run is over for this node, whatever its state."""

    reason: str


Event = (
    TurnGranted | TensorArrived | HeadArrived | ParcelArrived | CreditArrived | ActionDone | TimerFired | StopRequested
)

# ---- commands: do this ---------------------------------------------------------------------------


class RunAction(NamedTuple):
    """Carry one compute action out; at most one is under way at a time."""

    action: Action


class Accept(NamedTuple):
    """Move a tensor from the inbox to its micro-batch; for a hidden state return a credit to ``source``."""

    key: TensorKey
    source: str


class SendTensor(NamedTuple):
    """Send the micro-batch's hidden state or gradient, and forget it."""

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
    """Send a parcel; its content may change once it is on its way."""

    key: TensorKey
    target: str


class AcceptParcel(NamedTuple):
    """Take a parcel out of the inbox, and return a credit to ``source``."""

    key: TensorKey
    source: str


class SetTimer(NamedTuple):
    """Tell the engine ``TimerFired(timer)`` at time ``at_s``; replaces a timer of the same name."""

    timer: str
    at_s: float


class CancelTimer(NamedTuple):
    """Forget a timer."""

    timer: str


class ReportStep(NamedTuple):
    """Tell the coordinator the numbers of an own finished item, summed over its micro-batches."""

    seq: int
    step: int
    kind: str
    values: tuple[tuple[str, float], ...]


class ReportTurn(NamedTuple):
    """Tell the coordinator that this node has done all its actions of a turn."""

    turn: int


class Fail(NamedTuple):
    """Give the run up; ``error`` is a class name of ``ringtune.errors``."""

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
    | CancelTimer
    | ReportStep
    | ReportTurn
    | Fail
)


class Handled(NamedTuple):
    """One call of an engine: time, event, answer. Feeding the events again gives the same answers."""

    now_s: float
    event: Event
    commands: Sequence[Command]


class Span(NamedTuple):
    """One action of a node with its start and end, in seconds of the recorder's clock.

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
