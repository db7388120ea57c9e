"""A whole run in one process on a virtual clock: one ``NodeEngine`` per node, one ``RunStateMachine``.

Delays replace the real driver's threads and sockets: actions and messages take time and have no content. A *transport*
decides when messages arrive, an *observer* is notified during the run. Tests give messages a content and faults
(``tests.support.recorded_ring``).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple, Protocol

from ringtune.costs.action_costs import IdleGain
from ringtune.engine import events as ev
from ringtune.engine.node_engine import NodeEngine
from ringtune.errors import DeadlineError
from ringtune.run_control import events as rd
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.lowering import PARCELS, credit_boundary
from ringtune.schedule.operation_tables import BlockScores, Operations, ScheduledTable
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from ringtune.techniques.operations import expected_table, score_keys
from sim.ledger import HEAD, HIDDEN
from sim.links import MessageCost, Transport


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


@dataclass
class RingResult:
    """The result of a virtual run.

    Attributes:
        finish: the end of the run; None if it did not end.
        wall_s: end of the last compute action.
    """

    finish: rd.Finish | None = None
    wall_s: float = 0.0
    num_actions: int = 0


NO_IDLE_GAIN: Final = IdleGain(0.0, 1.0)


def _nothing(event: ev.Event, now_s: float) -> list[ev.Command]:
    return []


class VirtualNode:
    """One node's engine, and the idle time of its processor.

    Args:
        engine: its state machine; None while it has no place in the placement.
    """

    def __init__(self, name: str, engine: NodeEngine | None) -> None:
        self.name = name
        self.engine = engine
        self.handle: Callable[[ev.Event, float], list[ev.Command]] = engine.handle if engine is not None else _nothing
        self.is_running = False
        self.commands: list[ev.Command] = []  # the last commands of the engine
        self.last_s: dict[str, float] = {}  # time of the last message of each source
        self.ends_s = 0.0  # end of the running action; messages may delay it
        self.idle_gain, self.left_s = NO_IDLE_GAIN, 0.0
        self.free_s = 0.0  # start of the idle time; if in the future, messages use the processor until then

    def moved(self, engine: NodeEngine | None) -> VirtualNode:
        """Return the node with the engine of its next placement; its processor is kept."""
        node = VirtualNode(self.name, engine)
        node.idle_gain, node.free_s, node.left_s = self.idle_gain, self.free_s, self.left_s
        return node

    def take(self, seconds: float, now_s: float) -> None:
        """Take processor time for a message: from the running action, or from the idle time before the next one."""
        if self.is_running:
            self.ends_s += seconds
        else:
            self.free_s = max(self.free_s, now_s - self.idle_gain.max_s) + seconds

    def disturb(self, seconds: float, now_s: float) -> None:
        """Take processor time for a message from the idle time of a node; nothing is delayed."""
        if self.idle_gain.max_s:
            self.free_s = min(now_s, max(self.free_s, now_s - self.idle_gain.max_s) + seconds)

    def begin(self, seconds: float, now_s: float) -> float:
        """Begin an action, later if messages use the processor, shorter after idle time; return its end in seconds."""
        self.is_running = True
        free_s, (max_s, min_share) = self.free_s, self.idle_gain
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
        transport: when messages arrive.
        wait_s: time limit of engines and state machine.
        start: where the run continues; by default at its beginning.
        idle_gain: by node, what idle time gains for the next action; by default nothing.
        chooser: scores and operation tables where the run chooses them; by default the expected table.
        move_s: seconds of a node's move; all its weights are present before.
        enters: the conditions from a move on, for the part of the plan that holds then; by default unchanged. The
            former observer is notified of the move itself.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        action_s: Callable[[str, Action], float],
        transport: Transport,
        observer: Observer | None = None,
        wait_s: float = math.inf,
        start: StartPoint | None = None,
        idle_gain: Callable[[str], IdleGain] = lambda node: NO_IDLE_GAIN,
        chooser: TableChooser | None = None,
        move_s: Callable[[rd.Move], float] = lambda move: 0.0,
        enters: Callable[[Plan, float], Conditions] | None = None,
    ) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.result = RingResult()
        self._action_s, self._transport, self._observer = action_s, transport, observer
        self._rounds = RunStateMachine(lambda facts: plan, wait_s=wait_s, start=start)
        self._wait_s, self._part = wait_s, plan.at(start.placement_number if start else plan.placement.placement_number)
        self._move_s, self._enters = move_s, enters
        self._nodes = {node: VirtualNode(node, self._engine(self._part, node, start)) for node in plan.nodes}
        for name, each in self._nodes.items():
            each.idle_gain = idle_gain(name)
        self._timers: dict[tuple[str, str], int] = {}
        self._chooser, self._score_turns = chooser or ExpectedTables(plan), dict[int, Turn]()
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
        self._tell_rounds(rd.Started(tuple(sorted(self.plan.nodes))))
        self.clock.run()
        return self.result

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
                self._answer_rounds(node, rd.Rested(node, self._part.placement.placement_number))
            case rd.FetchAhead(node, part):
                self._answer_rounds(node, rd.FetchedAhead(node, part.placement.placement_number))
            case rd.Move():
                self._move(command)
            case rd.Collect(node):
                self._answer_rounds(node, rd.Collected(node))
            case rd.ChooseOperations(step, scores):
                chosen = rd.OperationsChosen(step, self._chooser.table(step, scores))
                self.clock.at(self.clock.now_s, self._tell_rounds, chosen)
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
                self._logged(command)

    def _logged(self, command: rd.Command) -> None:
        if isinstance(command, rd.LogMove):
            self._part = command.part
        if self._observer is not None:
            self._observer.logged(command, self.clock.now_s)
        if isinstance(command, rd.LogMove) and not command.problem and self._enters is not None:
            self._action_s, self._transport, self._observer = self._enters(command.part, self.clock.now_s)

    def _move(self, command: rd.Move) -> None:
        """Give a node the engine of its next placement; messages in transit to the old one are lost."""
        node = command.node
        self._nodes[node] = self._nodes[node].moved(self._engine(command.part, node, command.start))
        answer = rd.Moved(node, command.part.placement.placement_number)
        self._answer_rounds(node, answer, after_s=self._move_s(command))

    def _control_s(self, source: str, target: str) -> float:
        return self._transport.control_s(source, target, self.clock.now_s)

    def _answer_rounds(self, node: str, event: rd.Event, *, after_s: float = 0.0) -> None:
        there_s = self._control_s("", node) - self.clock.now_s
        self.clock.at(self._control_s(node, "") + there_s + after_s, self._tell_rounds, event)

    def _grant(self, node: VirtualNode, turns: tuple[Turn, ...]) -> None:
        for turn in turns:
            self._tell(node, ev.TurnGranted(turn))

    # ---- engines ----------------------------------------------------------------------------------

    def _tell(self, node: VirtualNode, event: ev.Event) -> None:
        now_s = self.clock.now_s
        node.commands = commands = node.handle(event, now_s)
        for command in commands:
            self._obeys[type(command)](node, command)

    def _run(self, node: VirtualNode, command: ev.RunAction) -> None:
        (action,) = command
        start_s = self.clock.now_s
        ends_s = node.begin(self._action_s(node.name, action), start_s)
        self.clock.at(ends_s, self._done, node, action, start_s)

    def _done(self, node: VirtualNode, action: Action, start_s: float) -> None:
        result, now_s = self.result, self.clock.now_s
        if node.ends_s > now_s:
            self.clock.at(node.ends_s, self._done, node, action, start_s)
            return
        node.is_running, node.free_s = False, now_s - node.left_s  # idle time that it did not use is left for the next
        values = self._carried_out(node, action, start_s)
        result.num_actions += 1
        result.wall_s = now_s
        if self._observer is not None:
            self._observer.ran(node.name, action, start_s, now_s)
        self._tell(node, _NEW(ev.ActionDone, (action, values)))

    def _carried_out(self, node: VirtualNode, action: Action, start_s: float) -> tuple[tuple[str, float], ...]:
        """Return the values of an action that ends now: a head yields a count, so that reports are complete."""
        return _HEAD_VALUES if action[0] is _HEAD_OP else ()

    def _accept(self, node: VirtualNode, command: ev.Accept | ev.AcceptParcel) -> None:
        key, source = command
        boundary = key[3]
        if type(command) is ev.AcceptParcel:
            boundary = credit_boundary(self.plan.course, key.payload)
            if self._observer is not None:
                self._observer.accepted(node.name, key)
        elif key[0] != HIDDEN:
            return
        at_s = self._transport.credit_s(node.name, source, self.clock.now_s)
        self.clock.at(at_s, self._tell, self._nodes[source], _NEW(ev.CreditArrived, (boundary, node.name)))

    def _send_tensor(self, node: VirtualNode, command: ev.SendTensor | ev.SendParcel) -> None:
        self._send(command[0], node, command[1])

    def _send_head(self, node: VirtualNode, command: ev.SendHead) -> None:
        self._send(TensorKey(Payload.HEAD, command.turn, -1, 0), node, command.target)

    def _accept_head(self, node: VirtualNode, command: ev.AcceptHead) -> None:
        """Do nothing: a head has no content, and is sent without credits."""

    def _on_timer(self, node: VirtualNode, command: ev.SetTimer) -> None:
        self._set_timer(node.name, command.timer, command.at_s, self._tell, node, ev.TimerFired(command.timer))

    def _on_report_step(self, node: VirtualNode, command: ev.ReportStep) -> None:
        seq, step, kind, values = command
        self._report(node, rd.StepReported(node.name, seq, step, kind, values))

    def _on_report_turn(self, node: VirtualNode, command: ev.ReportTurn) -> None:
        turn = self._score_turns.get(command.turn)
        scores = self._chooser.scores(self._part, node.name, turn) if turn is not None else ()
        self._report(node, rd.TurnReported(node.name, command.turn, scores))

    def _on_fail(self, node: VirtualNode, command: ev.Fail) -> None:
        self._report(node, rd.NodeFailed(node.name, command.error, command.message))

    def _report(self, node: VirtualNode, event: rd.Event) -> None:
        self.clock.at(self._control_s(node.name, ""), self._tell_rounds, event)

    # ---- messages and timers ------------------------------------------------------------------------

    def _send(self, key: TensorKey, node: VirtualNode, target: str) -> None:
        now_s, source = self.clock.now_s, node.name
        arrival_s, cost = self._transport.send(key, source, target, now_s)
        if self._observer is not None:
            self._observer.sent(key, source, target, now_s, arrival_s)
        if cost is None:
            self.clock.at(arrival_s, self._deliver, key, source, self._nodes[target])
            return
        node.take(cost.from_source_s, now_s)
        if any(type(command) is ev.RunAction for command in node.commands):
            arrival_s += cost.late_at_source_s
        self.clock.at(arrival_s, self._receive, key, source, self._nodes[target], cost)

    def _receive(self, key: TensorKey, source: str, node: VirtualNode, cost: MessageCost) -> None:
        """Receive a message that costs processor time: later where the node computes, else from its idle time."""
        now_s = self.clock.now_s
        if node.is_running:
            node.take(cost.from_target_s, now_s)
            now_s += cost.late_at_target_s
        elif node.free_s < now_s:
            node.disturb(cost.from_target_s, now_s)
        node.last_s[source] = now_s = max(now_s, node.last_s.get(source, 0.0))
        self.clock.at(now_s, self._deliver, key, source, node)

    def _deliver(self, key: TensorKey, source: str, node: VirtualNode) -> None:
        if self._observer is not None:
            self._observer.arrived(key, source, node.name, self.clock.now_s)
        payload = key[0]
        if payload == HEAD:
            self._tell(node, ev.HeadArrived(key.seq, source))
        elif payload in PARCELS:
            self._tell(node, ev.ParcelArrived(key, source))
        else:
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
