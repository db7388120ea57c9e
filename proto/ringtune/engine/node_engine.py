"""One node's state machine: what to compute, send and accept next. No clock, no socket, no tensor.

The engine carries out the lowering of ``schedule`` as a list scheduler: among the actions whose inputs are
here and whose weights have the right version it picks by priority

1. updates, 2. head, 3. backward, 4. forward with graph, 5. frozen forward and embedding,

and within a class the oldest micro-batch. Frozen work goes block by block, so it delays the critical path
by one block at most. Four rules make every result independent of timing:

* in order: at each unit, and in backward, micro-batches pass in the order of (seq, micro);
* right version: a forward starts only if each block in its range had exactly ``forward_version`` updates, an update
  only after the last forward that must not see it, a backward only after the update of the item before;
* few graphs: ``in_flight`` items (1, unless a method is stale on purpose) keep graphs here; a further forward with
  graph waits;
* credits: a stretch that ends in sending a hidden state starts only with a credit of its (link, boundary).

Source: RingAda, section III-B.2 (strictly interleaved forward and backward where adapters are unfrozen,
consecutive forwards where they are frozen).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from ringtune.engine import events as ev
from ringtune.engine.awaited import awaited_by
from ringtune.engine.credits import Credits
from ringtune.engine.flows import Flow, ItemState, Path, Place
from ringtune.engine.head_keeping import HeadKeeping
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.lowering import Legs, legs, route
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn, items
from ringtune.schedule.versions import in_flight, weight_version

WAIT_TIMER = "wait"
_FORWARD_RANK: Final = Op.FORWARD.rank
_NEW: Final = tuple.__new__


class NodeEngine:
    """The engine of one node in one run.

    Args:
        plan: the plan of the run.
        node: which node this is; has to be in the plan.
        wait_s: longest time without any progress, in seconds, before the run is given up.
        start: where the run goes on; by default its very beginning.

    Raises:
        PlanError: the plan does not know the node.
    """

    __slots__ = (
        "_backwards",
        "_credits",
        "_early",
        "_embeds",
        "_embeds_in_flight",
        "_floor",
        "_flows",
        "_graphs",
        "_handlers",
        "_head",
        "_head_may_move",
        "_head_unit",
        "_heads",
        "_is_host",
        "_is_owner",
        "_is_starved",
        "_last_progress_s",
        "_max_embeds",
        "_max_graphs",
        "_may_go_down",
        "_may_run_head",
        "_may_update",
        "_next_turn",
        "_paths",
        "_running",
        "_running_flow",
        "_running_state",
        "_start_point",
        "_states",
        "_stopped",
        "_timer_is_set",
        "_turn_items_left",
        "_turns",
        "_updating",
        "_upward",
        "_versions",
        "_wait_s",
        "node",
        "plan",
    )

    def __init__(self, plan: Plan, node: str, *, wait_s: float = 300.0, start: StartPoint | None = None) -> None:
        if node not in plan.nodes:
            raise PlanError(f"node {node!r} is not in the plan, which has {', '.join(plan.nodes)}")
        self.plan = plan
        self.node = node
        self._wait_s = wait_s
        self._is_owner = plan.owner(node) is not None
        placement, piece = plan.placement, plan.slice_of(node)
        self._is_host = piece.num_blocks > 0
        self._floor = 0 if self._is_owner and placement.private_blocks else piece.start
        self._start_point = start or StartPoint.of(plan.course)
        self._head_unit = plan.course.head
        self._versions: dict[int, int] = {}
        self._max_graphs = in_flight(plan.course, piece.start) if self._is_host else 1
        self._head = HeadKeeping(node, is_holder=self._start_point.holder == node)
        self._turns: dict[int, Turn] = {}
        self._next_turn = 0
        self._turn_items_left: dict[int, int] = {}
        # items and micro-batches that are not done, each in order; a thing leaves a queue when that is behind it
        self._states: deque[ItemState] = deque()
        self._updating: deque[ItemState] = deque()
        self._graphs: deque[ItemState] = deque()
        self._heads: deque[ItemState] = deque()
        self._backwards: deque[ItemState] = deque()
        self._upward: list[Flow] = []
        self._embeds: deque[Flow] = deque()
        self._embeds_in_flight = 0
        self._max_embeds = placement.credits * max(1, len(route(plan, node))) if self._is_owner else 0
        self._flows: dict[tuple[int, int], Flow] = {}
        self._early: dict[tuple[int, int], str] = {}
        self._credits = Credits(placement.credits)
        # what may have become possible since it was last looked for
        self._is_starved = False
        self._may_update = False
        self._may_run_head = False
        self._may_go_down = False
        self._head_may_move = False
        self._paths: dict[Legs, Path] = {}
        self._running: Action | None = None
        self._running_flow: Flow | None = None
        self._running_state: ItemState | None = None
        self._last_progress_s = 0.0
        self._timer_is_set = False
        self._stopped = False
        self._handlers: dict[type, Callable[[Any, float, list[ev.Command]], bool]] = {
            ev.TurnGranted: self._on_turn,
            ev.TensorArrived: self._on_tensor,
            ev.HeadArrived: self._on_head,
            ev.CreditArrived: self._on_credit,
            ev.ActionDone: self._on_done,
            ev.TimerFired: self._on_timer,
            ev.StopRequested: self._on_stop,
        }

    # ---- the only entry ---------------------------------------------------------------------------

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Command]:
        """Take one event at time ``now_s`` (monotonic seconds), answer with commands in order."""
        commands: list[ev.Command] = []
        if self._stopped:
            return commands
        # a handler says whether anything may have become possible by the event
        if self._handlers[type(event)](event, now_s, commands) and self._running is None:
            if self._head_may_move:
                self._hand_over(commands)
            self._start_next(commands)
        if not self._timer_is_set and self._states and not self._stopped:
            self._timer_is_set = True
            commands.append(ev.SetTimer(WAIT_TIMER, self._last_progress_s + self._wait_s))
        return commands

    @property
    def is_idle(self) -> bool:
        """Whether every granted item is done at this node."""
        return not self._states and self._running is None

    # ---- events -----------------------------------------------------------------------------------

    def _on_turn(self, event: ev.TurnGranted, now_s: float, commands: list[ev.Command]) -> bool:
        turn = event.turn
        if turn.index < self._next_turn:
            return False
        plan = self.plan.decided(turn.unfreeze_at)
        if self._next_turn == 0:
            self._begin(plan)
        self._next_turn = turn.index + 1
        self._last_progress_s = now_s
        self._turns[turn.index] = turn
        self._head.granted(turn, weight_version(plan.course, self._head_unit, turn.first_step))
        self._head_may_move = self._may_update = self._may_run_head = self._may_go_down = True
        left = 0
        for item in items(plan.course, turn):
            paths = [self._path(each) if each else None for each in legs(plan, item, self.node)]
            state = ItemState(plan, item, self.node, paths)
            if not state.is_done:
                left += 1
                self._take_on(state)
        self._turn_items_left[turn.index] = left
        if left == 0:
            self._finish_turn(turn.index, commands)
        return True

    def _begin(self, plan: Plan) -> None:
        """Versions where the run begins or goes on; the first turn says what was unfrozen."""
        piece, step = plan.slice_of(self.node), self._start_point.step
        self._versions = {unit: weight_version(plan.course, unit, step) for unit in range(piece.start, piece.stop)}
        self._head.begin(weight_version(plan.course, self._head_unit, step))

    def _path(self, each: Legs) -> Path:
        path = self._paths.get(each)
        if path is None:
            path = self._paths[each] = Path(each, self.plan.placement.private_blocks, self._credits)
        return path

    def _take_on(self, state: ItemState) -> None:
        """Put an item and its micro-batches into every queue that they have to leave."""
        self._states.append(state)
        if state.holds_graph:  # what goes backward here holds later updates up, even if it updates nothing here
            self._updating.append(state)
        if state.holds_graph:
            self._graphs.append(state)
        if state.heads:
            self._heads.append(state)
        if state.backwards:
            self._backwards.append(state)
        for flow in state.flows:
            key = (flow.seq, flow.micro)
            self._flows[key] = flow
            if key in self._early:
                flow.source = self._early.pop(key)
            if flow.path.first.is_upward:
                self._upward.append(flow)
            if flow.path.has_embedding:
                self._embeds.append(flow)

    def _on_tensor(self, event: ev.TensorArrived, now_s: float, commands: list[ev.Command]) -> bool:
        self._last_progress_s = now_s
        (payload, seq, micro, boundary), source = event
        flow = self._flows.get((seq, micro))
        if flow is None:  # its turn is granted to others already
            self._early[seq, micro] = source
            return False
        awaited = flow.awaited(is_running=flow is self._running_flow)
        if awaited is None or awaited[1] != boundary or awaited[0] != payload:
            return False  # it came before, and nothing waits for it any more
        flow.source = source
        if payload == Payload.GRAD:
            self._may_go_down = True
        elif boundary == self._head_unit:
            self._may_run_head = True
        return True

    def _on_head(self, event: ev.HeadArrived, now_s: float, commands: list[ev.Command]) -> bool:
        self._last_progress_s = now_s
        self._head.arrived(event.turn, event.source)
        self._head_may_move = True
        return True

    def _on_credit(self, event: ev.CreditArrived, now_s: float, commands: list[ev.Command]) -> bool:
        self._last_progress_s = now_s
        boundary, source = event
        self._credits.channel(source, boundary).came_back()
        is_awaited, self._is_starved = self._is_starved, False
        return is_awaited

    def _on_stop(self, event: ev.StopRequested, now_s: float, commands: list[ev.Command]) -> bool:
        self._stopped = True
        return False

    def _on_timer(self, event: ev.TimerFired, now_s: float, commands: list[ev.Command]) -> bool:
        self._timer_is_set = False
        if not self._states:
            return False
        overdue = now_s - self._last_progress_s >= self._wait_s
        if overdue and self._running is None and not self._waits_for_its_turn:
            self._stopped = True
            commands.append(ev.Fail("DeadlineError", f"node {self.node} {self.waiting_for()}"))
        elif overdue or self._running is not None:
            self._last_progress_s = now_s
        return False

    @property
    def _waits_for_its_turn(self) -> bool:
        """Whether others may be at work: an owner that hosts nothing sees no progress of turns that are not its own.

        Such a turn may take long; those who have a part in it, and the coordinator, see when it does not go on.
        """
        state = self._states[0]
        has_begun = len(state.heads) < len(state.flows) or state.item.seq > self._turns[state.item.turn].first_seq
        return not self._is_host and state.is_own and not has_begun

    def _on_done(self, event: ev.ActionDone, now_s: float, commands: list[ev.Command]) -> bool:
        action, flow, state = event.action, self._running_flow, self._running_state
        if (action is not self._running and action != self._running) or state is None:
            raise PlanError(f"node {self.node} was told of {action}, but {self._running} is under way")
        self._last_progress_s = now_s
        self._running = self._running_flow = self._running_state = None
        for name, value in event.values:
            state.values[name] = state.values.get(name, 0.0) + value
        if flow is None:
            self._on_updated(action, state)
        else:
            self._go_on(flow, commands)
        if state.is_own and (action.op is Op.HEAD or flow is None):
            self._report_step(action, state, commands)
        if not state.flows_left and not state.updates:
            self._retire(commands)
        return True

    def _on_updated(self, action: Action, state: ItemState) -> None:
        state.updates.remove(action)
        self._may_update = self._may_run_head = self._may_go_down = self._head_may_move = True
        if action.op is Op.SAVE:
            return
        if action.start == self._head_unit:
            self._head.updated()
            return
        for unit in range(action.start, action.stop):
            self._versions[unit] += 1

    def _report_step(self, action: Action, state: ItemState, commands: list[ev.Command]) -> None:
        """The owner reports an item once, when its head is through (and updated)."""
        if state.heads or any(update.start == self._head_unit for update in state.updates):
            return
        if action.op is Op.HEAD or action.start == self._head_unit:
            item = state.item
            commands.append(ev.ReportStep(item.seq, item.step, item.kind.value, tuple(sorted(state.values.items()))))

    # ---- decisions --------------------------------------------------------------------------------

    def _go_on(self, flow: Flow, commands: list[ev.Command]) -> None:
        """An action of a micro-batch is done; a send that follows is no work and comes at once."""
        place = flow.place
        if place is None:
            raise PlanError(f"node {self.node} was told of an action of a micro-batch that is through")
        send = place.send
        if send is not None:
            payload, boundary, target = send
            key = _NEW(TensorKey, (payload, flow.seq, flow.micro, boundary))
            commands.append(_NEW(ev.SendTensor, (key, target)))
        following = flow.place = place.next
        if place.is_upward:
            if following is None or not following.is_upward:
                upward = self._upward
                upward.remove(flow)
                self._may_run_head = True
                if not upward or upward[0].seq > flow.seq:
                    self._may_update = True
        elif place.op is Op.HEAD:
            flow.state.heads.popleft()
            self._embeds_in_flight -= 1
            self._may_run_head = self._may_go_down = True
            if not flow.state.heads:
                self._may_update = self._head_may_move = True
        elif place.frees_graph:
            self._may_go_down = True
            if following is None or not following.frees_graph:
                flow.state.backwards.popleft()
                if not flow.state.backwards:
                    self._may_update = True
        if following is None:
            flow.state.flows_left -= 1

    def _hand_over(self, commands: list[ev.Command]) -> None:
        """A turn, a head or the end of an action with it may let it move; nothing else does."""
        self._head_may_move = False
        if self._head.take(self._turns, self._needs_head_before, commands):
            self._may_update = self._may_run_head = True
        self._head.pass_on(commands)

    def _needs_head_before(self, turn: int) -> bool:
        """Whether items of earlier turns of ours still use the head that we have."""
        return any(
            state.is_own and state.item.turn < turn and state.uses_head(self._head_unit) for state in self._states
        )

    def _start_next(self, commands: list[ev.Command]) -> None:
        """Pick the best ready action and start it."""
        if self._may_update and self._updating and self._start_update(commands):
            return
        flow = self._best_flow()
        if flow is None or flow.place is None:
            return
        place = flow.place
        if place.receive is not None:
            payload, boundary, _ = place.receive
            key = _NEW(TensorKey, (payload, flow.seq, flow.micro, boundary))
            commands.append(_NEW(ev.Accept, (key, flow.source)))
            flow.source = ""
        if place.credit is not None:
            place.credit.left -= 1
        if place.op is Op.EMBED:
            self._embeds.popleft()
            self._embeds_in_flight += 1
        # what Action(...) does in the end, in a third of the time: this is every action of every node
        action = _NEW(Action, (place.op, flow.seq, flow.micro, place.start, place.stop, "", ""))
        self._running, self._running_flow, self._running_state = action, flow, flow.state
        commands.append(_NEW(ev.RunAction, (action,)))

    def _start_update(self, commands: list[ev.Command]) -> bool:
        """Start an update or a save that has become possible; only the end of an action or a head makes any so."""
        while self._updating and not self._updating[0].holds_graph:
            self._updating.popleft()
        upward_seq = self._upward[0].seq if self._upward else math.inf
        for state in itertools.islice(self._updating, self._max_graphs):
            for update in state.updates:
                if self._is_possible(update, state, upward_seq):
                    self._running, self._running_flow, self._running_state = update, None, state
                    commands.append(ev.RunAction(update))
                    return True
                if update.start < self._head_unit:
                    upward_seq = -1.0
            if state.backwards:
                upward_seq = -1.0  # blocks are updated item after item, even where one has no backward
        self._may_update = False
        return False

    def _is_possible(self, update: Action, state: ItemState, upward_seq: float) -> bool:
        """Whether all that has to come before an update or a save is done; ``upward_seq`` is still on its way up."""
        if update.op is Op.SAVE:  # after all earlier updates; the owner saves the head too, so it has to have it
            return state is self._updating[0] and (not state.is_own or self._head.counts_for(state))
        if update.start == self._head_unit:
            return not state.heads
        return not state.backwards and state.awaited_seq < upward_seq

    def _best_flow(self) -> Flow | None:
        """The micro-batch to go on with: the lowest rank that is ready, and of those the oldest."""
        if self._may_run_head:
            flow = self._ready_head()
            if flow is not None:
                return flow
        if self._may_go_down:
            flow = self._ready_backward()
            if flow is not None:
                return flow
        found = None
        barrier, floor = math.inf, self._floor
        for flow in self._upward:
            place = flow.place
            if place is None or place.op is Op.EMBED:
                break  # earlier ones come first at every unit above
            if place.stop <= barrier and (place.receive is None or flow.source) and self._is_ready(flow, place):
                if place.rank == _FORWARD_RANK:
                    return flow
                if found is None:
                    found = flow
            if place.frontier < barrier:
                barrier = place.frontier
                if barrier <= floor:
                    break
        return self._or_embedding(found) if self._embeds else found

    def _ready_head(self) -> Flow | None:
        """The oldest micro-batch of ours whose head is still to come, if that can run."""
        while self._heads and not self._heads[0].heads:
            self._heads.popleft()
        if self._heads:
            state = self._heads[0]
            flow = state.heads[0]
            place = flow.ready
            if place is not None and place.op is Op.HEAD and self._head.counts_for(state):
                return flow
        self._may_run_head = False
        return None

    def _ready_backward(self) -> Flow | None:
        """The oldest micro-batch that goes backward here and can."""
        while self._backwards and not self._backwards[0].backwards:
            self._backwards.popleft()
        for state in itertools.islice(self._backwards, self._max_graphs):
            if state.backwards:
                flow, wanted = state.backwards[0], state.backward_versions
                place = flow.ready
                if place is not None and place.frees_graph and (not wanted or self._has_versions(wanted, place)):
                    return flow
        self._may_go_down = False
        return None

    def _is_ready(self, flow: Flow, place: Place) -> bool:
        """Whether an upward action can start, its tensor being here and earlier micro-batches past it."""
        if place.keeps_graph and not self._has_room_for_graph(flow.state):
            return False
        if place.credit is not None and place.credit.left <= 0:
            self._is_starved = True
            return False
        wanted = flow.state.forward_versions
        return not wanted or place.op is Op.SKIP or self._has_versions(wanted, place)

    def _has_room_for_graph(self, state: ItemState) -> bool:
        graphs = self._graphs
        while graphs and not graphs[0].holds_graph:
            graphs.popleft()
        return state in itertools.islice(graphs, self._max_graphs)

    def _has_versions(self, wanted: Mapping[int, int], place: Place) -> bool:
        """Whether each unit of the action has had the wanted updates."""
        versions = self._versions
        if versions == wanted:  # all that is hosted here, which is the usual case
            return True
        return all(wanted.get(unit) == versions.get(unit) for unit in range(place.start, place.stop))

    def _or_embedding(self, found: Flow | None) -> Flow | None:
        """The next embedding if it may begin and is older than what was found."""
        if self._embeds_in_flight >= self._max_embeds:
            return found
        flow = self._embeds[0]
        if found is not None and (found.seq, found.micro) < (flow.seq, flow.micro):
            return found
        credit = flow.path.first.credit
        if credit is not None and credit.left <= 0:
            self._is_starved = True
            return found
        return flow

    def _retire(self, commands: list[ev.Command]) -> None:
        """Forget finished items, in order; report finished turns."""
        while self._states and self._states[0].is_done:
            state = self._states.popleft()
            for flow in state.flows:
                del self._flows[flow.seq, flow.micro]
            state.flows.clear()  # each knows its item
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
        """What the oldest unfinished micro-batch waits for, and from whom."""
        flows = (flow for state in self._states for flow in state.flows)
        flow = next((flow for flow in flows if flow.place is not None), None)
        if flow is None:
            return f"waited {self._wait_s:g} s with no micro-batch under way"
        before = self._turns.get(flow.state.item.turn - 1)
        awaited = awaited_by(
            flow, has_head=self._head.counts_for(flow.state), head_from=before.owner if before else "?"
        )
        return f"waited {self._wait_s:g} s for {awaited}"
