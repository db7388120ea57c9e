"""A whole run in one process on a virtual clock: one ``NodeEngine`` per node, one ``RunStateMachine``.

Delays replace the real driver's threads and sockets. A *carrier* gives actions and messages an effect: none (what-if),
or real tensors (checks of correctness). A *transport* decides when messages arrive, an *observer* is notified during
the run.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple, Protocol

from ringtune.costs.action_costs import Rest
from ringtune.engine import events as ev
from ringtune.engine.events import Handled, Span
from ringtune.engine.node_engine import NodeEngine
from ringtune.errors import DeadlineError
from ringtune.run_control import events as rd
from ringtune.run_control.events import Move
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.actions import Action, Op, Payload, TensorKey, message
from ringtune.schedule.lowering import PARCELS, credit_boundary
from ringtune.schedule.operation_tables import BlockScores, Operations, ScheduledTable
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from ringtune.techniques.operations import expected_table, score_keys
from sim.ledger import HEAD, HIDDEN
from sim.links import Delays, MessageCost, Transport


class VirtualClock:
    """A queue of callbacks in the order of (time, order of scheduling), so that a run is reproducible."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0
        self.is_stopped = False

    def at(self, time_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call ``callback(*args)`` at ``time_s``; a time in the past means now."""
        self._number = number = self._number + 1
        heappush(self._queue, (time_s if time_s > self.now_s else self.now_s, number, callback, args))

    def stop(self) -> None:
        """End ``run`` after the present callback."""
        self.is_stopped = True

    def run(self) -> None:
        """Run the callbacks until none is left or the clock is stopped."""
        queue = self._queue
        while queue and not self.is_stopped:
            self.now_s, _, callback, args = heappop(queue)
            callback(*args)


class Carrier(Protocol):
    """The effects of actions and messages besides their time: none, or real tensors."""

    def granted(self, node: str, turn: Turn) -> None:
        """Note that a turn is granted to ``node``."""

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """Carry out a compute action; return its values for the report."""

    def ended(self, node: str, turn: int) -> str:
        """Note that ``node`` has done a turn; return once why it continues without a technique."""

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

    def rest(self, node: str) -> None:
        """Keep the trained tensors of ``node``, for a move."""

    def move(self, command: Move) -> None:
        """Build the part of a node in another placement, with kept tensors of others."""

    def put_parcel(self, node: str, key: TensorKey, content: Any) -> None:
        """Give an accepted parcel to ``node``."""


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


class Observer(Protocol):
    """Notifications of a virtual run, in the order of virtual time."""

    def granted(self, turn: Turn) -> None:
        """A turn is granted to every node."""

    def ran(self, node: str, action: Action, start_s: float, end_s: float) -> None:
        """A compute action is done."""

    def sent(self, key: TensorKey, source: str, target: str, sent_s: float, arrival_s: float) -> None:
        """A message is sent."""

    def arrived(self, key: TensorKey, source: str, target: str, now_s: float) -> None:
        """A message is in the inbox."""

    def accepted(self, node: str, key: TensorKey) -> None:
        """A parcel is taken from the inbox."""

    def logged(self, command: rd.Command, now_s: float) -> None:
        """The coordinator has logged a step, a turn, an evaluation or a phase."""


@dataclass(slots=True)
class RingResult:
    """The result of a virtual run; the recordings are empty where ``record`` was off.

    Attributes:
        order: by node, all actions and messages in order.
        finish: the end of the run; None if it did not end.
        wall_s: end of the last compute action.
        peak_inbox: by node, the largest number of tensors in its inbox.
    """

    order: dict[str, list[Action]] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    messages: list[TimedMessage] = field(default_factory=list)
    handled: dict[str, list[Handled]] = field(default_factory=dict)
    logged: list[rd.Command] = field(default_factory=list)
    finish: rd.Finish | None = None
    wall_s: float = 0.0
    num_actions: int = 0
    peak_inbox: dict[str, int] = field(default_factory=dict)


NO_REST: Final = Rest(0.0, 1.0)


def _nothing(event: ev.Event, now_s: float) -> list[ev.Command]:
    return []


class VirtualNode:
    """One node's engine with its inboxes and recordings, and the rests of its processor.

    Args:
        engine: its state machine; None while it has no place in the placement.
    """

    def __init__(self, name: str, engine: NodeEngine | None) -> None:
        self.name = name
        self.engine = engine
        self.handle: Callable[[ev.Event, float], list[ev.Command]] = engine.handle if engine is not None else _nothing
        self.inbox: dict[TensorKey, Any] = {}
        self.heads: dict[int, Any] = {}
        self.order: list[Action] = []
        self.spans: list[Span] = []
        self.handled: list[Handled] = []
        self.peak_inbox = 0
        self.is_running = False
        self.commands: list[ev.Command] = []  # the last commands of the engine
        self.last_s: dict[str, float] = {}  # time of the last message of each source
        self.ends_s = 0.0  # end of the running action; messages may delay it
        self.rest, self.left_s = NO_REST, 0.0
        self.free_s = 0.0  # start of the rest; if in the future, messages use the processor until then

    def moved(self, engine: NodeEngine | None) -> VirtualNode:
        """Return the node with the engine of its next placement; recordings and processor are kept."""
        node = VirtualNode(self.name, engine)
        node.order, node.spans, node.handled, node.peak_inbox = self.order, self.spans, self.handled, self.peak_inbox
        node.rest, node.free_s, node.left_s = self.rest, self.free_s, self.left_s
        return node

    def take(self, seconds: float, now_s: float) -> None:
        """Take processor time for a message: from the running action, or from the rest before the next one."""
        if self.is_running:
            self.ends_s += seconds
        else:
            self.free_s = max(self.free_s, now_s - self.rest.max_s) + seconds

    def disturb(self, seconds: float, now_s: float) -> None:
        """Take processor time for a message from the rest of an idle node; nothing is delayed."""
        if self.rest.max_s:
            self.free_s = min(now_s, max(self.free_s, now_s - self.rest.max_s) + seconds)

    def begin(self, seconds: float, now_s: float) -> float:
        """Begin an action, later if messages use the processor, shorter after a rest; return its end in seconds."""
        self.is_running = True
        free_s, (max_s, min_share) = self.free_s, self.rest
        if not max_s or free_s >= now_s:
            self.left_s = 0.0
            self.ends_s = ends_s = (now_s if now_s > free_s else free_s) + seconds
            return ends_s
        rested_s = min(now_s - free_s, max_s)
        saved_s = min(rested_s, (1 - min_share) * seconds)
        self.left_s = rested_s - saved_s
        self.ends_s = ends_s = now_s + seconds - saved_s
        return ends_s


class TableChooser(Protocol):
    """Scores of nodes at the end of a score turn, and the table chosen from them."""

    def scores(self, part: Plan, node: str, turn: Turn) -> tuple[BlockScores, ...]:
        """The scores that a node reports in a placement at the end of a turn; empty if it is no score turn."""

    def table(self, step: int, scores: Sequence[BlockScores]) -> Operations:
        """Choose the table from ``step`` on."""


class ExpectedTables:
    """Scores of zero, and the expected table at every decision.

    Args:
        known: tables that a real run of the plan has chosen, in place of expected ones.
    """

    def __init__(self, plan: Plan, known: Sequence[ScheduledTable] = ()) -> None:
        self._plan = plan
        self._known = {table.step: table.operations for table in known}

    def scores(self, part: Plan, node: str, turn: Turn) -> tuple[BlockScores, ...]:
        """Return a zero for every score that the node owes."""
        choice = self._plan.course.choice
        values = ((0.0,) * choice.subnets,) * len(choice.scores) if choice is not None else ()
        return tuple(BlockScores(turn.owner, *key, values) for key in score_keys(part, turn, node))

    def table(self, step: int, scores: Sequence[BlockScores]) -> Operations:
        """Return the known table or the expected one, whatever the scores."""
        return self._known.get(step) or expected_table(self._plan.course)


_NEW: Final = tuple.__new__  # makes an event in a third of the time; every action and message has one
_HEAD_OP: Final = Op.HEAD
_HEAD_VALUES: Final = (("count", 1.0), ("loss_sum", 0.0))


class Conditions(NamedTuple):
    """Seconds, transport and observer of one part of a plan; as for ``VirtualRing``."""

    action_s: Callable[[str, Action], float]
    transport: Transport
    observer: Observer | None


class VirtualRing:
    """A run of ``plan`` on a virtual clock.

    Args:
        action_s: seconds of a compute action at a node.
        message_s: seconds of a message from source to target; messages of a link keep their order.
        control_s: seconds of a call between coordinator and node.
        carrier: effects of actions and messages; None = they only take time.
        wait_s: time limit of engines and state machine.
        drop: messages for which it returns True never arrive (fault injection).
        start: where the run continues; by default at its beginning.
        drain_at_s: time at which the user drains the run; None = never.
        transport: in place of ``message_s`` and ``control_s``.
        record: keep order, spans, messages and engine recordings; a long run is faster and smaller without.
        rest: by node, the gain of a rest for the next action; by default none.
        chooser: scores and operation tables where the run chooses them; by default the expected table.
        fails_to_move: error text of a node's move; empty = it moves (fault injection).
        fetches: a node's answer to ``FetchAhead``, given after its seconds; by default all weights are present.
        enters: the conditions from a move on, for the part of the plan that holds then; by default unchanged. The
            former observer is notified of the move itself.
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
        drop: Callable[[TimedMessage], bool] | None = None,
        items_ahead: int = 16,
        start: StartPoint | None = None,
        patience_evals: int = 0,
        drain_at_s: float | None = None,
        replans: Sequence[tuple[float, Placement]] = (),
        transport: Transport | None = None,
        observer: Observer | None = None,
        record: bool = True,
        rest: Callable[[str], Rest] = lambda node: NO_REST,
        chooser: TableChooser | None = None,
        choose_s: Callable[[], float] = lambda: 0.0,
        move_s: Callable[[rd.Move], float] = lambda move: 0.0,
        fails_to_move: Callable[[rd.Move], str] = lambda move: "",
        fetches: Callable[[rd.FetchAhead], rd.FetchedAhead] = lambda command: rd.FetchedAhead(
            command.node, command.part.placement.placement_number
        ),
        enters: Callable[[Plan, float], Conditions] | None = None,
    ) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.result = RingResult()
        self._action_s, self._drop = action_s, drop
        self._transport = transport or Delays(message_s, control_s)
        self._carrier = carrier
        self._observer, self._record = observer, record
        more: dict[str, Any] = {"items_ahead": items_ahead, "patience_evals": patience_evals}
        self._rounds = RunStateMachine(lambda facts: plan, wait_s=wait_s, start=start, **more)
        self._wait_s, self._part = wait_s, plan.at(start.placement_number if start else plan.placement.placement_number)
        self._move_s, self._fails_to_move, self._fetches, self._enters = move_s, fails_to_move, fetches, enters
        self._nodes = {node: VirtualNode(node, self._engine(self._part, node, start)) for node in plan.nodes}
        for name, each in self._nodes.items():
            each.rest = rest(name)
        self._timers: dict[tuple[str, str], int] = {}
        self._chooser, self._choose_s, self._score_turns = chooser or ExpectedTables(plan), choose_s, dict[int, Turn]()
        self._drain_at_s, self._replans = drain_at_s, replans
        self._obeys: dict[type, Callable[[VirtualNode, Any], None]] = {
            ev.RunAction: self._run,
            ev.Accept: self._accept,
            ev.SendTensor: self._send_tensor,
            ev.SendHead: self._send_head,
            ev.AcceptHead: self._accept_head,
            ev.SendParcel: self._send_tensor,
            ev.AcceptParcel: self._accept,
            ev.SetTimer: self._on_timer,
            ev.ReportStep: self._on_report_step,
            ev.ReportTurn: self._on_report_turn,
            ev.Fail: self._on_fail,
        }

    def run(self) -> RingResult:
        """Run to the end, or until no event is left."""
        result = self.result
        self._tell_rounds(rd.Started(tuple(sorted(self.plan.nodes))))
        if self._drain_at_s is not None:
            self.clock.at(self._drain_at_s, self._tell_rounds, rd.DrainRequested("stopped by the user"))
        for at_s, placement in self._replans:
            self.clock.at(at_s, self._tell_rounds, rd.Replanned(placement))
        self.clock.run()
        for name, node in self._nodes.items():
            result.order[name], result.spans[name], result.handled[name] = node.order, node.spans, node.handled
            result.peak_inbox[name] = node.peak_inbox
        return result

    def run_to_end(self) -> RingResult:
        """Run to the end, or until the clock is stopped; without the collector of reference cycles.

        A run makes no cycles, and the search took a tenth of its time. Raises ``DeadlineError``.
        """
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            result = self.run()
        finally:
            if was_enabled:
                gc.enable()
        if not self.clock.is_stopped and (result.finish is None or result.finish.error):
            waits = "; ".join(f"node {node} {self.waiting_for(node)}" for node in self.plan.nodes)
            digest = self.plan.digest[:12]
            raise DeadlineError(f"the virtual run of plan {digest} does not end: {waits}; please report it")
        return result

    def waiting_for(self, node: str) -> str:
        """Describe the message that a node's oldest unfinished micro-batch awaits."""
        engine = self._nodes[node].engine
        return engine.waiting_for() if engine is not None else "its placement"

    def _engine(self, part: Plan, node: str, start: StartPoint | None) -> NodeEngine | None:
        return NodeEngine(part, node, wait_s=self._wait_s, start=start) if node in part.nodes else None

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
            case rd.Rest(node):
                if self._carrier is not None:
                    self._carrier.rest(node)
                self._answer_rounds(node, rd.Rested(node, self._part.placement.placement_number))
            case rd.FetchAhead(node):
                answer = self._fetches(command)
                self._answer_rounds(node, answer, after_s=answer.seconds)
            case rd.Move():
                self._move(command)
            case rd.Collect(node):
                self._answer_rounds(node, rd.Collected(node))
            case rd.ChooseOperations(step, scores):
                chosen = rd.OperationsChosen(step, self._chooser.table(step, scores))
                self.clock.at(self.clock.now_s + self._choose_s(), self._tell_rounds, chosen)
            case rd.Grant(turns):
                for turn in turns:
                    if turn.kind is StepKind.SCORE:
                        self._score_turns[turn.index] = turn
                    if self._observer is not None:
                        self._observer.granted(turn)
                for name in self._part.nodes:
                    self.clock.at(self._control_s("", name), self._grant, self._nodes[name], turns)
            case rd.Release(node, reason):
                self.clock.at(self._control_s("", node), self._tell, self._nodes[node], ev.StopRequested(reason))
            case ev.SetTimer(timer, at_s):
                self._set_timer("", timer, at_s, self._tell_rounds, ev.TimerFired(timer))
            case ev.CancelTimer(timer):
                self._timers.pop(("", timer), None)
            case rd.Finish():
                self.result.finish = command
            case _:
                if isinstance(command, rd.LogMove):
                    self._part = command.part
                if self._record:
                    self.result.logged.append(command)
                if self._observer is not None:
                    self._observer.logged(command, self.clock.now_s)
                if isinstance(command, rd.LogMove) and not command.problem and self._enters is not None:
                    self._action_s, self._transport, self._observer = self._enters(command.part, self.clock.now_s)

    def _move(self, command: rd.Move) -> None:
        """Give a node the engine of its next placement; messages in transit to the old one are lost."""
        node, placement_number = command.node, command.part.placement.placement_number
        answer: rd.Moved | rd.MoveFailed = rd.Moved(node, placement_number)
        if problem := self._fails_to_move(command):
            answer = rd.MoveFailed(node, placement_number, "CapacityError", problem)
        else:
            if self._carrier is not None:
                self._carrier.move(command)
            self._nodes[node] = self._nodes[node].moved(self._engine(command.part, node, command.start))
        self._answer_rounds(node, answer, after_s=self._move_s(command))

    def _control_s(self, source: str, target: str) -> float:
        return self._transport.control_s(source, target, self.clock.now_s)

    def _answer_rounds(self, node: str, event: rd.Event, *, after_s: float = 0.0) -> None:
        there_s = self._control_s("", node) - self.clock.now_s
        self.clock.at(self._control_s(node, "") + there_s + after_s, self._tell_rounds, event)

    def _grant(self, node: VirtualNode, turns: tuple[Turn, ...]) -> None:
        for turn in turns:
            if self._carrier is not None:
                self._carrier.granted(node.name, turn)
            self._tell(node, ev.TurnGranted(turn))

    # ---- engines ----------------------------------------------------------------------------------

    def _tell(self, node: VirtualNode, event: ev.Event) -> None:
        now_s = self.clock.now_s
        node.commands = commands = node.handle(event, now_s)
        if self._record:
            node.handled.append(Handled(now_s, event, commands))
        for command in commands:
            self._obeys[type(command)](node, command)

    def _run(self, node: VirtualNode, command: ev.RunAction) -> None:
        (action,) = command
        if self._record:
            node.order.append(action)
        start_s = self.clock.now_s
        ends_s = node.begin(self._action_s(node.name, action), start_s)
        self.clock.at(ends_s, self._done, node, action, start_s)

    def _done(self, node: VirtualNode, action: Action, start_s: float) -> None:
        result, now_s = self.result, self.clock.now_s
        if node.ends_s > now_s:
            self.clock.at(node.ends_s, self._done, node, action, start_s)
            return
        node.is_running, node.free_s = False, now_s - node.left_s  # the rest that it did not use is left for the next
        if self._carrier is not None:
            values = self._carrier.run(node.name, action)
        else:  # a head yields a count, so that reports are complete
            values = _HEAD_VALUES if action[0] is _HEAD_OP else ()
        result.num_actions += 1
        result.wall_s = now_s
        if self._record:
            node.spans.append(Span(action, start_s, now_s))
        if self._observer is not None:
            self._observer.ran(node.name, action, start_s, now_s)
        self._tell(node, _NEW(ev.ActionDone, (action, values)))

    def _accept(self, node: VirtualNode, command: ev.Accept | ev.AcceptParcel) -> None:
        key, source = command
        if self._record:
            node.order.append(message(Op.RECEIVE, key, source))
        content, boundary = node.inbox.pop(key), key[3]
        is_parcel = type(command) is ev.AcceptParcel
        if self._carrier is not None:
            put = self._carrier.put_parcel if is_parcel else self._carrier.put
            put(node.name, key, content)
        if is_parcel:
            boundary = credit_boundary(self.plan.course, key.payload)
            if self._observer is not None:
                self._observer.accepted(node.name, key)
        elif key[0] != HIDDEN:
            return
        at_s = self._transport.credit_s(node.name, source, self.clock.now_s)
        self.clock.at(at_s, self._tell, self._nodes[source], _NEW(ev.CreditArrived, (boundary, node.name)))

    def _send_tensor(self, node: VirtualNode, command: ev.SendTensor | ev.SendParcel) -> None:
        key, target = command
        if self._record:
            node.order.append(message(Op.SEND, key, target))
        content = None
        if self._carrier is not None:
            take = self._carrier.take_parcel if key[0] in PARCELS else self._carrier.take
            content = take(node.name, key)
        self._send(key, node, target, content)

    def _send_head(self, node: VirtualNode, command: ev.SendHead) -> None:
        turn, target = command
        if self._record:
            node.order.append(Action(Op.SEND, 0, -1, turn, 0, target, Payload.HEAD))
        self._send(
            TensorKey(Payload.HEAD, turn, -1, 0),
            node,
            target,
            None if self._carrier is None else self._carrier.take_head(node.name),
        )

    def _accept_head(self, node: VirtualNode, command: ev.AcceptHead) -> None:
        turn, source = command
        if self._record:
            node.order.append(Action(Op.RECEIVE, 0, -1, turn, 0, source, Payload.HEAD))
        content = node.heads.pop(turn)
        if self._carrier is not None:
            self._carrier.put_head(node.name, content)

    def _on_timer(self, node: VirtualNode, command: ev.SetTimer) -> None:
        self._set_timer(node.name, command.timer, command.at_s, self._tell, node, ev.TimerFired(command.timer))

    def _on_report_step(self, node: VirtualNode, command: ev.ReportStep) -> None:
        seq, step, kind, values = command
        self._report(node, rd.StepReported(node.name, seq, step, kind, values))

    def _on_report_turn(self, node: VirtualNode, command: ev.ReportTurn) -> None:
        turn = self._score_turns.get(command.turn)
        scores = self._chooser.scores(self._part, node.name, turn) if turn is not None else ()
        if self._carrier is not None and (problem := self._carrier.ended(node.name, command.turn)):
            self._report(node, rd.TechniqueFailed(node.name, problem))
        self._report(node, rd.TurnReported(node.name, command.turn, scores))

    def _on_fail(self, node: VirtualNode, command: ev.Fail) -> None:
        self._report(node, rd.NodeFailed(node.name, command.error, command.message))

    def _report(self, node: VirtualNode, event: rd.Event) -> None:
        self.clock.at(self._control_s(node.name, ""), self._tell_rounds, event)

    # ---- messages and timers ------------------------------------------------------------------------

    def _send(self, key: TensorKey, node: VirtualNode, target: str, content: Any) -> None:
        now_s, source = self.clock.now_s, node.name
        arrival_s, cost = self._transport.send(key, source, target, now_s)
        if self._record or self._drop is not None:
            message = TimedMessage(key, source, target, now_s, arrival_s)
            if self._record:
                self.result.messages.append(message)
            if self._drop is not None and self._drop(message):
                return
        if self._observer is not None:
            self._observer.sent(key, source, target, now_s, arrival_s)
        if cost is None:
            self.clock.at(arrival_s, self._deliver, key, source, self._nodes[target], content)
            return
        node.take(cost.from_source_s, now_s)
        if any(type(command) is ev.RunAction for command in node.commands):
            arrival_s += cost.late_at_source_s
        self.clock.at(arrival_s, self._receive, key, source, self._nodes[target], content, cost)

    def _receive(self, key: TensorKey, source: str, node: VirtualNode, content: Any, cost: MessageCost) -> None:
        """Receive a message that costs processor time: later where the node computes, else from the node's rest."""
        now_s = self.clock.now_s
        if node.is_running:
            node.take(cost.from_target_s, now_s)
            now_s += cost.late_at_target_s
        elif node.free_s < now_s:
            node.disturb(cost.from_target_s, now_s)
        node.last_s[source] = now_s = max(now_s, node.last_s.get(source, 0.0))
        self.clock.at(now_s, self._deliver, key, source, node, content)

    def _deliver(self, key: TensorKey, source: str, node: VirtualNode, content: Any) -> None:
        if self._observer is not None:
            self._observer.arrived(key, source, node.name, self.clock.now_s)
        payload = key[0]
        if payload == HEAD:
            node.heads[key.seq] = content
            self._tell(node, ev.HeadArrived(key.seq, source))
            return
        node.inbox[key] = content
        if payload in PARCELS:
            self._tell(node, ev.ParcelArrived(key, source))
            return
        if len(node.inbox) > node.peak_inbox:
            node.peak_inbox = len(node.inbox)
        self._tell(node, _NEW(ev.TensorArrived, (key, source)))

    def _set_timer(self, who: str, timer: str, at_s: float, callback: Callable[..., None], *args: Any) -> None:
        generation = self._timers.get((who, timer), 0) + 1
        self._timers[who, timer] = generation
        if at_s < math.inf:  # one that is never due would only lie in the queue
            self.clock.at(at_s, self._fire, who, timer, generation, callback, args)

    def _fire(
        self, who: str, timer: str, generation: int, callback: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if self._timers.get((who, timer)) == generation:
            callback(*args)
