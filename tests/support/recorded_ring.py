"""A run on the virtual clock that is recorded, and whose messages may have a content and be lost.

A *carrier* gives actions and messages an effect, such as real tensors; without one they only take time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringtune.engine import events as ev
from ringtune.engine.events import Handled, Span
from ringtune.run_control import events as rd
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.actions import Action, Op, Payload, TensorKey, message
from ringtune.schedule.lowering import PARCELS
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import ITEMS_AHEAD, StartPoint, Turn
from sim.links import MessageCost, Transport
from sim.ring import RingResult, VirtualNode, VirtualRing


class Delays:
    """Delays from functions.

    Args:
        message_s: seconds from source to target; ``payload`` is ``credit`` for a credit.
        control_s: seconds of a call between coordinator and node.
    """

    def __init__(
        self,
        message_s: Callable[[str, str, str], float] = lambda source, target, payload: 0.0,
        control_s: Callable[[str], float] = lambda node: 0.0,
    ) -> None:
        self._message_s, self._control_s = message_s, control_s
        self._free_s: dict[tuple[str, str, str], float] = {}

    def send(self, key: TensorKey, source: str, target: str, now_s: float) -> tuple[float, MessageCost | None]:
        """``now_s`` plus ``message_s``, but not before an earlier message of the link; no cost for the processors."""
        return self._in_order(source, target, "data", now_s + self._message_s(source, target, key.payload)), None

    def credit_s(self, source: str, target: str, now_s: float) -> float:
        """``now_s`` plus ``message_s``, but not before an earlier credit of the link."""
        return self._in_order(source, target, "credit", now_s + self._message_s(source, target, "credit"))

    def control_s(self, source: str, target: str, now_s: float) -> float:
        """``now_s`` plus ``control_s``, but not before an earlier message of the pair; the coordinator has no name."""
        return self._in_order(source, target, "control", now_s + self._control_s(source or target))

    def _in_order(self, source: str, target: str, lane: str, at_s: float) -> float:
        key = (source, target, lane)
        self._free_s[key] = at_s = max(at_s, self._free_s.get(key, 0.0))
        return at_s


class Carrier:
    """The effects of actions and messages besides their time; here none."""

    def granted(self, node: str, turn: Turn) -> None:
        """Note that a turn is granted to ``node``."""

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """Carry out a compute action; return its values for the report: of a head a count, so that it is complete."""
        return (("count", 1.0), ("loss_sum", 0.0)) if action.op is Op.HEAD else ()

    def ended(self, node: str, turn: int) -> str:
        """Note that ``node`` has done a turn; return once why it continues without a technique."""
        return ""

    def take(self, node: str, key: TensorKey) -> Any:
        """Remove a tensor from ``node`` to send it."""

    def put(self, node: str, key: TensorKey, content: Any) -> None:
        """Give an accepted tensor to its micro-batch at ``node``."""

    def take_head(self, node: str) -> Any:
        """Copy the head with its optimizer state."""

    def put_head(self, node: str, content: Any) -> None:
        """Load a head."""

    def take_parcel(self, node: str, key: TensorKey) -> Any:
        """Make a parcel of ``node``."""

    def put_parcel(self, node: str, key: TensorKey, content: Any) -> None:
        """Give an accepted parcel to ``node``."""

    def rest(self, node: str) -> None:
        """Keep the trained tensors of ``node``, for a move."""

    def move(self, command: rd.Move) -> None:
        """Build the part of a node in another placement, with kept tensors of others."""


class TimedMessage(NamedTuple):
    """A message between nodes, with its virtual times in seconds."""

    key: TensorKey
    source: str
    target: str
    sent_s: float
    arrived_s: float

    @property
    def payload(self) -> str:
        """The kind of content."""
        return self.key.payload


def _of_lists() -> defaultdict[str, list[Any]]:
    return defaultdict(list)


@dataclass
class RecordedResult(RingResult):
    """The result of a virtual run, with its recordings.

    Attributes:
        order: by node, all actions and messages in order.
        peak_inbox: by node, the largest number of tensors in its inbox.
    """

    order: defaultdict[str, list[Action]] = field(default_factory=_of_lists)
    spans: defaultdict[str, list[Span]] = field(default_factory=_of_lists)
    messages: list[TimedMessage] = field(default_factory=list)
    handled: defaultdict[str, list[Handled]] = field(default_factory=_of_lists)
    logged: list[rd.Command] = field(default_factory=list)
    peak_inbox: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class RecordedRing(VirtualRing):
    """A ``VirtualRing`` that is recorded.

    Args:
        plan: of the run.
        action_s: as for ``VirtualRing``; by default a second.
        message_s: seconds of a message from source to target; messages of a link keep their order.
        control_s: seconds of a call between coordinator and node.
        transport: in place of ``message_s`` and ``control_s``.
        carrier: effects of actions and messages; None = they only take time.
        drop: messages for which it returns True never arrive.
        items_ahead, patience_evals: as for ``RunStateMachine``.
        drain_at_s: time at which the user drains the run; None = never.
        replans: times at which the driver finds a placement.
        choose_s: seconds of a choice of a table.
        fails_to_move: error text of a node's move; empty = it moves.
        fetches: a node's answer to ``FetchAhead``, given after its seconds; by default all weights are present.
        values: further arguments of ``VirtualRing``.
    """

    result: RecordedResult

    def __init__(
        self,
        plan: Plan,
        *,
        action_s: Callable[[str, Action], float] = lambda node, action: 1.0,
        message_s: Callable[[str, str, str], float] = lambda source, target, payload: 0.0,
        control_s: Callable[[str], float] = lambda node: 0.0,
        transport: Transport | None = None,
        carrier: Carrier | None = None,
        wait_s: float = 1e6,
        drop: Callable[[TimedMessage], bool] = lambda message: False,
        items_ahead: int = ITEMS_AHEAD,
        patience_evals: int = 0,
        start: StartPoint | None = None,
        drain_at_s: float | None = None,
        replans: Sequence[tuple[float, Placement]] = (),
        choose_s: Callable[[], float] = lambda: 0.0,
        fails_to_move: Callable[[rd.Move], str] = lambda move: "",
        fetches: Callable[[rd.FetchAhead], rd.FetchedAhead] | None = None,
        **values: Any,
    ) -> None:
        transport = _Recording(transport or Delays(message_s, control_s), self.sent)
        super().__init__(plan, action_s=action_s, transport=transport, wait_s=wait_s, start=start, **values)
        self._rounds = RunStateMachine(
            lambda facts: plan, wait_s=wait_s, start=start, items_ahead=items_ahead, patience_evals=patience_evals
        )
        self.result = RecordedResult()
        self._carrier, self._drop, self._choose_s = carrier or Carrier(), drop, choose_s
        self._drain_at_s, self._replans, self._fails_to_move, self._fetches = (
            drain_at_s,
            replans,
            fails_to_move,
            fetches,
        )
        self._contents: dict[tuple[TensorKey, str], Any] = {}  # on the way to a node, or in its inbox
        self._inboxes: dict[VirtualNode, set[TensorKey]] = {}
        self._dropped: set[tuple[TensorKey, str]] = set()

    def run(self) -> RecordedResult:
        """Run to the end, or until no event is left."""
        self._tell_rounds(rd.Started(tuple(sorted(self.plan.nodes))))
        if self._drain_at_s is not None:
            self.clock.at(self._drain_at_s, self._tell_rounds, rd.DrainRequested("stopped by the user"))
        for at_s, placement in self._replans:
            self.clock.at(at_s, self._tell_rounds, rd.Replanned(placement))
        self.clock.run()
        for name in self._nodes:  # also of one that did nothing
            _ = self.result.order[name], self.result.spans[name], self.result.handled[name]
        return self.result

    # ---- the coordinator ----------------------------------------------------------------------------

    def _obey_rounds(self, command: rd.Command) -> None:
        match command:
            case rd.Rest(node):
                self._carrier.rest(node)
            case rd.FetchAhead(node) if self._fetches is not None:
                answer = self._fetches(command)
                self._answer_rounds(node, answer, after_s=answer.seconds)
                return
            case rd.ChooseOperations(step, scores):
                chosen = rd.OperationsChosen(step, self._chooser.table(step, scores))
                self.clock.at(self.clock.now_s + self._choose_s(), self._tell_rounds, chosen)
                return
        super()._obey_rounds(command)

    def _logged(self, command: rd.Command) -> None:
        self.result.logged.append(command)
        super()._logged(command)

    def _move(self, command: rd.Move) -> None:
        if problem := self._fails_to_move(command):
            number = command.part.placement.placement_number
            failed = rd.MoveFailed(command.node, number, "CapacityError", problem)
            self._answer_rounds(command.node, failed, after_s=self._move_s(command))
            return
        self._carrier.move(command)
        super()._move(command)

    def _report(self, node: VirtualNode, event: rd.Event) -> None:
        if isinstance(event, rd.TurnReported) and (problem := self._carrier.ended(node.name, event.turn)):
            super()._report(node, rd.TechniqueFailed(node.name, problem))
        super()._report(node, event)

    # ---- engines ------------------------------------------------------------------------------------

    def _grant(self, node: VirtualNode, turns: tuple[Turn, ...]) -> None:
        for turn in turns:
            self._carrier.granted(node.name, turn)
            super()._grant(node, (turn,))

    def _tell(self, node: VirtualNode, event: ev.Event) -> None:
        now_s = self.clock.now_s
        node.commands = commands = node.handle(event, now_s)
        self.result.handled[node.name].append(Handled(now_s, event, commands))
        for command in commands:
            self._obeys[type(command)](node, command)

    def _run(self, node: VirtualNode, command: ev.RunAction) -> None:
        self.result.order[node.name].append(command.action)
        super()._run(node, command)

    def _carried_out(self, node: VirtualNode, action: Action, start_s: float) -> tuple[tuple[str, float], ...]:
        values = self._carrier.run(node.name, action)
        self.result.spans[node.name].append(Span(action, start_s, self.clock.now_s))
        return values

    # ---- messages -----------------------------------------------------------------------------------

    def _send_tensor(self, node: VirtualNode, command: ev.SendTensor | ev.SendParcel) -> None:
        key, target = command
        self.result.order[node.name].append(message(Op.SEND, key, target))
        take = self._carrier.take_parcel if key.payload in PARCELS else self._carrier.take
        self._contents[key, target] = take(node.name, key)
        super()._send_tensor(node, command)

    def _send_head(self, node: VirtualNode, command: ev.SendHead) -> None:
        turn, target = command
        self.result.order[node.name].append(Action(Op.SEND, 0, -1, turn, 0, target, Payload.HEAD))
        self._contents[_head_key(turn), target] = self._carrier.take_head(node.name)
        super()._send_head(node, command)

    def _accept(self, node: VirtualNode, command: ev.Accept | ev.AcceptParcel) -> None:
        key, source = command
        self.result.order[node.name].append(message(Op.RECEIVE, key, source))
        self._inboxes[node].remove(key)
        put = self._carrier.put_parcel if isinstance(command, ev.AcceptParcel) else self._carrier.put
        put(node.name, key, self._contents.pop((key, node.name)))
        super()._accept(node, command)

    def _accept_head(self, node: VirtualNode, command: ev.AcceptHead) -> None:
        turn, source = command
        self.result.order[node.name].append(Action(Op.RECEIVE, 0, -1, turn, 0, source, Payload.HEAD))
        self._carrier.put_head(node.name, self._contents.pop((_head_key(turn), node.name)))

    def sent(self, message: TimedMessage) -> None:
        """Note a message, which may be lost."""
        self.result.messages.append(message)
        if self._drop(message):
            self._dropped.add((message.key, message.target))

    def _deliver(self, key: TensorKey, source: str, node: VirtualNode) -> None:
        if (key, node.name) in self._dropped:
            return
        if key.payload != Payload.HEAD:
            inbox = self._inboxes.setdefault(node, set())
            inbox.add(key)
            if key.payload not in PARCELS:
                self.result.peak_inbox[node.name] = max(len(inbox), self.result.peak_inbox[node.name])
        super()._deliver(key, source, node)


def _head_key(turn: int) -> TensorKey:
    return TensorKey(Payload.HEAD, turn, -1, 0)


class _Recording:
    """A transport that tells a ring of each message."""

    def __init__(self, transport: Transport, sent: Callable[[TimedMessage], None]) -> None:
        self._transport, self._sent = transport, sent
        self.credit_s, self.control_s = transport.credit_s, transport.control_s

    def send(self, key: TensorKey, source: str, target: str, now_s: float) -> tuple[float, MessageCost | None]:
        arrival_s, cost = self._transport.send(key, source, target, now_s)
        self._sent(TimedMessage(key, source, target, now_s, arrival_s))
        return arrival_s, cost
