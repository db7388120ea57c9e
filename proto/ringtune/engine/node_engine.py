"""The state machine of one node: what to compute, send and accept next. No clock, no socket, no tensor.

The engine carries out the lowering of ``schedule`` as a list scheduler: of the actions that have their inputs and the
right version of weights it starts one of the highest priority

1. updates, 2. head, 3. backward, 4. forward with graph, 5. frozen forward and embedding,

and within a class that of the oldest micro-batch. Frozen blocks run one at a time, so frozen work delays the critical
path by one block at most. Four rules make every result independent of timing:

* in order: at each unit, and in backward, micro-batches pass in the order of (seq, micro);
* right version: a forward starts only if each block in its range had exactly ``forward_version`` updates, an update
  only after the last forward that must not see it, a backward only after the update of the item before;
* few graphs: at most ``in_flight`` items (1, unless the method has stale weights) keep graphs here; a further forward
  with graph waits;
* credits: a forward after which a hidden state is sent starts only with a credit of that (link, boundary).

Source: RingAda, section III-B.2 (strictly interleaved forward and backward where adapters are unfrozen, consecutive
forwards where they are frozen).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ringtune.engine import events as ev
from ringtune.engine.failure_texts import Awaited, awaited_by
from ringtune.engine.paths import ItemState, MicroBatchState
from ringtune.engine.ready_queue import HeadTracker, ReadyQueue
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.lowering import fit_legs, legs
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn, items
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.versions import head_version

WAIT_TIMER = "wait"
_NEW: Final = tuple.__new__
_EMBED, _HEAD, _SHIP, _FIT = Op.EMBED, Op.HEAD, Op.SHIP, Op.FIT  # a name is read faster than an attribute


class NodeEngine:
    """The engine of one node in one run; ``handle`` is the only way in; raises ``PlanError``."""

    def __init__(self, plan: Plan, node: str, *, wait_s: float = 300.0, start: StartPoint | None = None) -> None:
        if node not in plan.nodes:
            raise PlanError(f"node {node!r} is not in the plan, which has {', '.join(plan.nodes)}")
        self.plan = plan
        self.node = node
        self._wait_s = wait_s
        self._start_point = start or StartPoint.of(plan.course)
        self._head_unit = plan.course.head
        self._next_turn = self._start_point.first_turn
        self._head = HeadTracker(
            node,
            is_holder=self._start_point.holder == node,
            is_copy=plan.course.method.full_parameters,
            first_turn=self._next_turn,
        )
        self._ready_queue = ReadyQueue(plan, node, self._head)
        self._turns: dict[int, Turn] = {}
        self._turn_items_left: dict[int, int] = {}
        self._head_may_move = False
        self._running: Action | None = None
        self._running_flow: MicroBatchState | None = None
        self._running_state: ItemState | None = None
        self._last_progress_s = 0.0
        self._timer_is_set = False
        self._stopped = False
        self._handlers: dict[type, Callable[[Any, float, list[ev.Command]], bool]] = {
            ev.TurnGranted: self._on_turn,
            ev.TensorArrived: self._on_tensor,
            ev.HeadArrived: self._on_head,
            ev.ParcelArrived: self._on_parcel,
            ev.CreditArrived: self._on_credit,
            ev.ActionDone: self._on_done,
            ev.TimerFired: self._on_timer,
            ev.StopRequested: self._on_stop,
        }

    # ---- the only entry ---------------------------------------------------------------------------

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Command]:
        """Take one event at time ``now_s`` (monotonic seconds); return the commands in order."""
        commands: list[ev.Command] = []
        if self._stopped:
            return commands
        # a handler returns whether the event may permit an action
        if self._handlers[type(event)](event, now_s, commands) and self._running is None:
            if self._head_may_move:
                self._hand_over(commands)
            self._start_next(commands)
        if not self._timer_is_set and self._ready_queue.states and not self._stopped:
            self._timer_is_set = True
            commands.append(ev.SetTimer(WAIT_TIMER, self._last_progress_s + self._wait_s))
        return commands

    # ---- events -----------------------------------------------------------------------------------

    def _on_turn(self, event: ev.TurnGranted, now_s: float, commands: list[ev.Command]) -> bool:
        turn = event.turn
        if turn.index < self._next_turn:
            return False
        plan = turn.settled(self.plan)
        if self._next_turn == self._start_point.first_turn:
            start = self._start_point
            self._ready_queue.versions.begin(plan, start.step, has_head=start.holder == self.node)
            self._head.begin(head_version(plan.course, start.step))
        self._next_turn = turn.index + 1
        self._last_progress_s = now_s
        self._turns[turn.index] = turn
        self._head.granted(turn, head_version(plan.course, turn.first_step))
        self._head_may_move = True
        self._ready_queue.recheck()
        left = 0
        for item in items(plan.course, turn):
            paths = self._ready_queue.paths(legs(plan, item, self.node))
            fits = self._ready_queue.paths(fit_legs(plan, item, self.node))
            state = ItemState(plan, item, self.node, paths, fits)
            if not state.is_done:
                left += 1
                self._ready_queue.take_on(state)
        self._turn_items_left[turn.index] = left
        commands.extend(self._ready_queue.exchange.sums.leaving())
        if left == 0:
            self._finish_turn(turn.index, commands)
        return True

    def _on_tensor(self, event: ev.TensorArrived, now_s: float, commands: list[ev.Command]) -> bool:
        self._last_progress_s = now_s
        return self._ready_queue.note_tensor(event, self._running_flow)

    def _on_head(self, event: ev.HeadArrived, now_s: float, commands: list[ev.Command]) -> bool:
        self._last_progress_s = now_s
        self._head.arrived(event.turn, event.source)
        self._head_may_move = True
        return True

    def _on_parcel(self, event: ev.ParcelArrived, now_s: float, commands: list[ev.Command]) -> bool:
        self._last_progress_s = now_s
        self._ready_queue.exchange.note_parcel(event)
        self._ready_queue.recheck()
        return True

    def _on_credit(self, event: ev.CreditArrived, now_s: float, commands: list[ev.Command]) -> bool:
        boundary, source = event
        is_missing, is_awaited = self._ready_queue.note_credit(source, boundary)
        if is_missing:  # a credit that no action needs must not extend the wait
            self._last_progress_s = now_s
        return is_awaited

    def _on_stop(self, event: ev.StopRequested, now_s: float, commands: list[ev.Command]) -> bool:
        self._stopped = True
        return False

    def _on_timer(self, event: ev.TimerFired, now_s: float, commands: list[ev.Command]) -> bool:
        self._timer_is_set = False
        if not self._ready_queue.states:
            return False
        overdue = now_s >= self._last_progress_s + self._wait_s  # rounded as the timer is
        if overdue and self._running is None and not self._waits_for_its_turn:
            self._stopped = True
            commands.append(ev.Fail("DeadlineError", f"node {self.node} {self.waiting_for()}"))
        elif overdue or self._running is not None:
            self._last_progress_s = now_s
        return False

    @property
    def _waits_for_its_turn(self) -> bool:
        """Whether this node may wait without an error: at an owner without blocks, in turns of other owners.

        The nodes that work in such a turn, and the coordinator, detect a turn that stops.
        """
        state = self._ready_queue.states[0]
        if self._ready_queue.is_host or not state.is_own:
            return not self._ready_queue.is_host
        return len(state.heads) == len(state.flows) and state.item.seq == self._turns[state.item.turn].first_seq

    def _on_done(self, event: ev.ActionDone, now_s: float, commands: list[ev.Command]) -> bool:
        (action, values), flow, state = event, self._running_flow, self._running_state
        if (action is not self._running and action != self._running) or state is None:
            raise PlanError(f"node {self.node} was told of {action}, but {self._running} is under way")
        self._last_progress_s = now_s
        self._running = self._running_flow = self._running_state = None
        for name, value in values:
            state.values[name] = state.values.get(name, 0.0) + value
        place = flow.place if flow is not None else None
        if flow is None or place is None:
            commands.extend(self._on_updated(action, state))
        else:
            if place.send is not None:
                payload, boundary, target = place.send
                sends: Any = ev.SendParcel if place.op is _SHIP else ev.SendTensor
                commands.append(_NEW(sends, (_NEW(TensorKey, (payload, flow.seq, flow.micro, boundary)), target)))
            self._ready_queue.passed(flow, place)
        if place is None or place.is_downward:
            commands.extend(self._ready_queue.exchange.sums.leaving())
        if state.is_own and not state.heads and (place is None or place.op is _HEAD):
            self._head_may_move = True
            self._report_step(action, state, commands)
        if (flow is None or flow.place is None) and state.is_done:
            self._retire(commands)
        return True

    def _on_updated(self, action: Action, state: ItemState) -> list[ev.Command]:
        following = self._ready_queue.updated(action, state)
        self._head_may_move = True
        is_embedding = action.start == EMBEDDING and self.plan.course.invertible
        if action.op is not Op.SAVE and (action.start == self._head_unit or is_embedding):
            self._head.updated()
        return following

    def _report_step(self, action: Action, state: ItemState, commands: list[ev.Command]) -> None:
        """Report an own item once, after its head's last action: its update in training, else the forward."""
        if any(update.start == self._head_unit for update in state.updates):
            return
        if action.op is Op.HEAD or action.start == self._head_unit:
            item = state.item
            commands.append(ev.ReportStep(item.seq, item.step, item.kind.value, tuple(sorted(state.values.items()))))

    # ---- decisions --------------------------------------------------------------------------------

    def _hand_over(self, commands: list[ev.Command]) -> None:
        """Take and send heads; called after a turn, a head, or an action that may permit it."""
        self._head_may_move = False
        turn = self._head.take(self._turns, self._ready_queue.needs_head_before, commands)
        if turn is not None:
            self._ready_queue.took_head(turn.settled(self.plan).course, turn.first_step)
        self._head.pass_on(commands)

    def _start_next(self, commands: list[ev.Command]) -> None:
        """Start the ready action of the highest priority."""
        backlog = self._ready_queue
        if backlog.may_update and (update := backlog.next_update()) is not None:
            (self._running, self._running_state), self._running_flow = update, None
            commands.extend(backlog.exchange.messages_before(*update))
            commands.append(ev.RunAction(update[0]))
            return
        flow = backlog.next_flow()
        if flow is None or flow.place is None:
            return
        place = flow.place
        if place.receive is not None and flow.arrived is not None:
            accepts: Any = ev.AcceptParcel if place.op is _FIT else ev.Accept
            commands.append(_NEW(accepts, flow.arrived))  # both are a key and a source
            flow.arrived = None
        if place.credit is not None:
            place.credit.left -= 1
        if place.op is _EMBED:
            backlog.began_embedding()
        # equal to Action(...) in a third of the time; every action of every node is made here
        action = _NEW(Action, (place.op, flow.seq, flow.micro, place.start, place.stop, "", ""))
        self._running, self._running_flow, self._running_state = action, flow, flow.state
        commands.append(_NEW(ev.RunAction, (action,)))

    def _retire(self, commands: list[ev.Command]) -> None:
        """Drop finished items, in order; report finished turns."""
        for state in self._ready_queue.retired():
            turn = state.item.turn
            self._turn_items_left[turn] -= 1
            if self._turn_items_left[turn] == 0:
                self._finish_turn(turn, commands)

    def _finish_turn(self, index: int, commands: list[ev.Command]) -> None:
        del self._turn_items_left[index]
        oldest_open = min(self._turn_items_left, default=self._next_turn)
        for past in [known for known in self._turns if known < oldest_open - 1]:
            del self._turns[past]
            self._head.forget(past)
        commands.append(ev.ReportTurn(index))

    # ---- explanation ------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """Describe the message that the oldest unfinished micro-batch awaits: seconds, content, sender."""
        awaited = self.awaited()
        reason = f"for {awaited.text}" if awaited is not None else "with no micro-batch under way"
        return f"waited {self._wait_s:g} s {reason}"

    def awaited(self) -> Awaited | None:
        """Return the message that the oldest unfinished micro-batch awaits; None = no micro-batch is under way."""
        parcel = self._ready_queue.exchange.awaited(self._ready_queue.states)
        if parcel is not None:
            return parcel
        flows = (flow for state in self._ready_queue.states for flow in state.flows)
        flow = next((flow for flow in flows if flow.place is not None), None)
        if flow is None:
            return None
        before = self._turns.get(flow.state.item.turn - 1)
        head_from = before.owner if before else self._start_point.holder
        if self.plan.course.method.full_parameters or head_from == self.node:
            head_from = ""
        return awaited_by(flow, has_head=self._head.counts_for(flow.state), head_from=head_from)
