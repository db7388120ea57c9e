"""A whole run in one process on a virtual clock: one ``NodeEngine`` per node, one ``Rounds``.

What the real driver does with threads and sockets is done here with delays. A *carrier* decides what an
action or a message really does: nothing (what-if studies), or real tensors (checks of correctness).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ringtune import events as ev
from ringtune import rounds as rd
from ringtune.engine import NodeEngine
from ringtune.plan import Plan
from ringtune.schedule import Action, Op, Payload
from ringtune.turns import StartPoint, Turn
from sim.clock import VirtualClock


class Carrier(Protocol):
    """What actions and messages really do."""

    def granted(self, node: str, turn: Turn) -> None:
        """A turn was granted to ``node``."""

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """Carry a compute action out; returns the numbers it yields."""

    def take(self, node: str, payload: str, seq: int, micro: int, boundary: int) -> Any:
        """Take a tensor out of ``node`` to send it."""

    def put(self, node: str, payload: str, seq: int, micro: int, content: Any) -> None:
        """Give a tensor that arrived to its micro-batch at ``node``."""

    def take_head(self, node: str) -> Any:
        """Copy the head with its optimizer state."""

    def put_head(self, node: str, content: Any) -> None:
        """Load a head."""


class NullCarrier:
    """Carries nothing: instant, empty actions."""

    def granted(self, node: str, turn: Turn) -> None:
        """Nothing to prepare."""

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """A head yields a count, so that reports are complete."""
        return (("count", 1.0), ("loss_sum", 0.0)) if action.op is Op.HEAD else ()

    def take(self, node: str, payload: str, seq: int, micro: int, boundary: int) -> Any:
        """Nothing."""
        return None

    def put(self, node: str, payload: str, seq: int, micro: int, content: Any) -> None:
        """Nothing."""

    def take_head(self, node: str) -> Any:
        """Nothing."""
        return None

    def put_head(self, node: str, content: Any) -> None:
        """Nothing."""


class Span(NamedTuple):
    """A compute action with its virtual time in seconds."""

    action: Action
    start_s: float
    end_s: float


class Message(NamedTuple):
    """A tensor or head that travelled, with its virtual times in seconds."""

    payload: str
    source: str
    target: str
    seq: int
    micro: int
    boundary: int
    sent_s: float
    arrived_s: float


class Handled(NamedTuple):
    """One call of an engine: time, event, answer. Feeding the events again gives the same answers."""

    now_s: float
    event: ev.Event
    commands: list[ev.Command]


@dataclass(slots=True)
class RingResult:
    """What happened.

    Attributes:
        order: everything each node did, in order, as table actions.
        spans: compute actions per node.
        messages: tensors and heads between nodes.
        handled: the recording of every engine.
        logged: what the rounds logged, in order.
        finish: how the run ended; None if it never did.
        peak_inbox: most tensors that waited in each node's inbox at once.
    """

    order: dict[str, list[Action]] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    handled: dict[str, list[Handled]] = field(default_factory=dict)
    logged: list[rd.Command] = field(default_factory=list)
    finish: rd.Finish | None = None
    wall_s: float = 0.0
    peak_inbox: dict[str, int] = field(default_factory=dict)


class VirtualRing:
    """A run of ``plan`` on a virtual clock.

    Args:
        plan: what to run.
        action_s: seconds that a compute action takes at a node.
        message_s: seconds that a message takes from source to target; messages of a link keep their order.
        control_s: seconds of a call between coordinator and node.
        carrier: what actions and messages do.
        wait_s: deadline of every wait of engines and rounds.
        drop: messages for which it returns True never arrive (fault injection).
        items_ahead: as for ``Rounds``.
        start: where the run goes on; by default its very beginning.
        drain_at_s: when the user asks to stop after the granted turns; None = never.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        action_s: Callable[[str, Action], float] = lambda node, action: 1.0,
        message_s: Callable[[str, str, str], float] = lambda source, target, payload: 0.0,
        control_s: Callable[[str], float] = lambda node: 0.0,
        carrier: Carrier | None = None,
        wait_s: float = 1e6,
        drop: Callable[[Message], bool] = lambda message: False,
        items_ahead: int = 16,
        start: StartPoint | None = None,
        drain_at_s: float | None = None,
    ) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.result = RingResult()
        self._action_s, self._message_s, self._control_s, self._drop = action_s, message_s, control_s, drop
        self._carrier: Carrier = carrier or NullCarrier()
        self._rounds = rd.Rounds(lambda facts: plan, wait_s=wait_s, items_ahead=items_ahead, start=start)
        self._engines = {node: NodeEngine(plan, node, wait_s=wait_s, start=start) for node in plan.nodes}
        self._inbox: dict[tuple[str, str, int, int, int], Any] = {}
        self._heads: dict[tuple[str, int], Any] = {}
        self._link_free_s: dict[tuple[str, str, str], float] = {}
        self._timers: dict[tuple[str, str], int] = {}
        self._drain_at_s = drain_at_s
        for node in plan.nodes:
            self.result.order[node], self.result.spans[node], self.result.handled[node] = [], [], []
            self.result.peak_inbox[node] = 0

    def run(self) -> RingResult:
        """Run to the end (or to a dead stop) and say what happened."""
        self._tell_rounds(rd.Started(tuple(sorted(self.plan.nodes))))
        if self._drain_at_s is not None:
            self.clock.at(self._drain_at_s, lambda: self._tell_rounds(rd.DrainAsked("stopped by the user")))
        self.clock.run()
        self.result.wall_s = max((s[-1].end_s for s in self.result.spans.values() if s), default=0.0)
        return self.result

    def waiting_for(self, node: str) -> str:
        """What a node's oldest unfinished micro-batch waits for."""
        return self._engines[node].waiting_for()

    # ---- rounds -----------------------------------------------------------------------------------

    def _tell_rounds(self, event: rd.Event) -> None:
        for command in self._rounds.handle(event, self.clock.now_s):
            self._obey_rounds(command)

    def _obey_rounds(self, command: rd.Command) -> None:
        match command:
            case rd.Inspect(node):
                self._answer_rounds(node, rd.Inspected(node, None))
            case rd.Prepare(node, _):
                self._answer_rounds(node, rd.Prepared(node))
            case rd.Collect(node):
                self._answer_rounds(node, rd.Collected(node))
            case rd.Grant(turns):
                for node in self.plan.nodes:
                    self._grant(node, turns)
            case rd.Release(node, reason):
                self._ordered("coordinator", node, "control", self._control_s(node), self._stop_engine(node, reason))
            case ev.SetTimer(timer, at_s):
                self._set_timer("coordinator", timer, at_s, lambda: self._tell_rounds(ev.TimerFired(timer)))
            case ev.CancelTimer(timer):
                self._timers.pop(("coordinator", timer), None)
            case rd.Finish():
                self.result.finish = command
            case _:
                self.result.logged.append(command)

    def _answer_rounds(self, node: str, event: rd.Event) -> None:
        self._ordered(node, "coordinator", "control", 2 * self._control_s(node), lambda: self._tell_rounds(event))

    def _grant(self, node: str, turns: tuple[Turn, ...]) -> None:
        def deliver() -> None:
            for turn in turns:
                self._carrier.granted(node, turn)
                self._tell(node, ev.TurnGranted(turn))

        self._ordered("coordinator", node, "control", self._control_s(node), deliver)

    def _stop_engine(self, node: str, reason: str) -> Callable[[], None]:
        return lambda: self._tell(node, ev.StopRequested(reason))

    # ---- engines ----------------------------------------------------------------------------------

    def _tell(self, node: str, event: ev.Event) -> None:
        commands = self._engines[node].handle(event, self.clock.now_s)
        self.result.handled[node].append(Handled(self.clock.now_s, event, commands))
        for command in commands:
            self._obey(node, command)

    def _obey(self, node: str, command: ev.Command) -> None:
        match command:
            case ev.RunAction(action):
                self._run(node, action)
            case ev.Accept(payload, seq, micro, boundary, source):
                self._log(node, Action(Op.RECEIVE, seq, micro, boundary, 0, source, payload))
                self._carrier.put(node, payload, seq, micro, self._inbox.pop((node, payload, seq, micro, boundary)))
                if payload == Payload.HIDDEN:
                    credit = ev.CreditArrived(boundary, node)
                    delay_s = self._message_s(node, source, "credit")
                    self._ordered(node, source, "credit", delay_s, lambda: self._tell(source, credit))
            case ev.SendTensor(payload, seq, micro, boundary, target):
                self._log(node, Action(Op.SEND, seq, micro, boundary, 0, target, payload))
                content = self._carrier.take(node, payload, seq, micro, boundary)
                self._send(node, target, payload, seq, micro, boundary, content)
            case ev.SendHead(turn, target):
                self._log(node, Action(Op.SEND, 0, -1, turn, 0, target, Payload.HEAD))
                self._send(node, target, Payload.HEAD, turn, 0, 0, self._carrier.take_head(node))
            case ev.AcceptHead(turn, source):
                self._log(node, Action(Op.RECEIVE, 0, -1, turn, 0, source, Payload.HEAD))
                self._carrier.put_head(node, self._heads.pop((node, turn)))
            case ev.SetTimer(timer, at_s):
                self._set_timer(node, timer, at_s, lambda: self._tell(node, ev.TimerFired(timer)))
            case ev.CancelTimer(timer):
                self._timers.pop((node, timer), None)
            case ev.ReportStep(seq, step, kind, values):
                self._report(node, rd.StepReported(node, seq, step, kind, values))
            case ev.ReportTurn(turn):
                self._report(node, rd.TurnReported(node, turn))
            case ev.Fail(error, message):
                self._report(node, rd.NodeFailed(node, error, message))

    def _report(self, node: str, event: rd.Event) -> None:
        self._ordered(node, "coordinator", "control", self._control_s(node), lambda: self._tell_rounds(event))

    def _run(self, node: str, action: Action) -> None:
        self._log(node, action)
        start_s = self.clock.now_s
        end_s = start_s + self._action_s(node, action)

        def done() -> None:
            values = self._carrier.run(node, action)
            self.result.spans[node].append(Span(action, start_s, end_s))
            self._tell(node, ev.ActionDone(action, values))

        self.clock.at(end_s, done)

    def _send(self, node: str, target: str, payload: str, seq: int, micro: int, boundary: int, content: Any) -> None:
        delay_s = self._message_s(node, target, payload)
        arrived_s = self._arrival_s(node, target, "data", delay_s)
        message = Message(payload, node, target, seq, micro, boundary, self.clock.now_s, arrived_s)
        self.result.messages.append(message)
        if self._drop(message):
            return

        def deliver() -> None:
            if payload == Payload.HEAD:
                self._heads[target, seq] = content
                self._tell(target, ev.HeadArrived(seq, node))
                return
            self._inbox[target, payload, seq, micro, boundary] = content
            waiting = sum(key[0] == target for key in self._inbox)
            self.result.peak_inbox[target] = max(self.result.peak_inbox[target], waiting)
            self._tell(target, ev.TensorArrived(payload, seq, micro, boundary, node))

        self.clock.at(arrived_s, deliver)

    # ---- time -------------------------------------------------------------------------------------

    def _log(self, node: str, action: Action) -> None:
        self.result.order[node].append(action)

    def _arrival_s(self, source: str, target: str, lane: str, delay_s: float) -> float:
        """Messages of one lane of a link arrive in the order in which they were sent."""
        key = (source, target, lane)
        arrived_s = max(self.clock.now_s + delay_s, self._link_free_s.get(key, 0.0))
        self._link_free_s[key] = arrived_s
        return arrived_s

    def _ordered(self, source: str, target: str, lane: str, delay_s: float, callback: Callable[[], None]) -> None:
        self.clock.at(self._arrival_s(source, target, lane, delay_s), callback)

    def _set_timer(self, who: str, timer: str, at_s: float, callback: Callable[[], None]) -> None:
        generation = self._timers.get((who, timer), 0) + 1
        self._timers[who, timer] = generation

        def fire() -> None:
            if self._timers.get((who, timer)) == generation:
                callback()

        self.clock.at(at_s, fire)
