"""One node's state machine: what to compute, send and accept next. No clock, no socket, no tensor.

The engine carries out the lowering of ``schedule`` as a list scheduler: among the actions whose inputs are
here and whose weights have the right version it picks by priority

1. updates, 2. head, 3. backward, 4. forward with graph, 5. frozen forward and embedding,

and within a class the oldest micro-batch. Frozen work goes block by block, so it delays the critical path
by one block at most. Four rules make every result independent of timing:

* in order: at each block, embedding and head, and in backward, micro-batches pass in the order of (seq, micro);
* right version: a forward starts only if each block in its range had exactly ``forward_version`` updates, an update
  only after the last forward that must not see it, a backward only after the update of the item before;
* few graphs: ``warm_up`` items (1, except for PipeAdapter) keep graphs here; a further forward with graph waits;
* credits: a stretch that ends in sending a hidden state starts only with a credit of its (link, boundary).

Source: RingAda, section III-B.2 (strictly interleaved forward and backward where adapters are unfrozen,
consecutive forwards where they are frozen).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from ringtune.engine import events as ev
from ringtune.engine.awaited import awaited_by
from ringtune.engine.credits import Credits
from ringtune.engine.flows import NO_RANK, Flow, ItemState, Path, Place
from ringtune.engine.head_keeping import HeadKeeping
from ringtune.errors import PlanError
from ringtune.schedule.lowering import Action, Leg, Op, item_legs, route, warm_up, weight_version
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn, items

WAIT_TIMER = "wait"
_EMBED_RANK = 4


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

    def __init__(self, plan: Plan, node: str, *, wait_s: float = 300.0, start: StartPoint | None = None) -> None:
        if node not in plan.nodes:
            raise PlanError(f"node {node!r} is not in the plan, which has {', '.join(plan.nodes)}")
        self.plan = plan
        self.node = node
        self._wait_s = wait_s
        self._is_owner = plan.owner(node) is not None
        piece = plan.slice_of(node)
        self._floor = 0 if self._is_owner and plan.private_blocks else piece.start
        self._start_point = start or StartPoint.of(plan)
        step, is_holder = self._start_point.step, self._start_point.holder == node
        self._versions: dict[int, int] = {}
        self._max_graphs = warm_up(plan, piece.start)
        self._forward_step = step - 1
        self._head = HeadKeeping(node, step=step, is_holder=is_holder)
        self._turns: dict[int, Turn] = {}
        self._next_turn = 0
        self._turn_items_left: dict[int, int] = {}
        self._states: deque[ItemState] = deque()
        self._updating: deque[ItemState] = deque()
        self._may_update = False
        self._head_may_move = False
        self._best_rank = NO_RANK
        self._flows: deque[Flow] = deque()
        self._embeds: deque[Flow] = deque()
        self._embeds_in_flight = 0
        self._max_embeds = plan.credits * max(1, len(route(plan, node))) if self._is_owner else 0
        self._credits = Credits(plan.credits)
        self._inbox: dict[tuple[str, int, int, int], str] = {}
        self._paths: dict[tuple[Leg, ...], Path] = {}
        self._running: Action | None = None
        self._running_flow: Flow | None = None
        self._running_state: ItemState | None = None
        self._last_progress_s = 0.0
        self._timer_is_set = False
        self._stopped = False
        self._handlers: dict[type, Callable[[Any, float, list[ev.Command]], None]] = {
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
        self._handlers[type(event)](event, now_s, commands)
        if self._running is None and not self._stopped:
            if self._head_may_move:
                self._hand_over(commands)
            self._start_next(commands)
            if type(event) is ev.ActionDone:
                self._retire(commands)
        if self._states and not self._timer_is_set and not self._stopped:
            self._timer_is_set = True
            commands.append(ev.SetTimer(WAIT_TIMER, self._last_progress_s + self._wait_s))
        return commands

    @property
    def is_idle(self) -> bool:
        """Whether every granted item is done at this node."""
        return not self._states and self._running is None

    # ---- events -----------------------------------------------------------------------------------

    def _on_turn(self, event: ev.TurnGranted, now_s: float, commands: list[ev.Command]) -> None:
        turn = event.turn
        if turn.index < self._next_turn:
            return
        plan = self.plan.unfrozen_at(turn.unfreeze_at)
        if not self._versions:
            self._versions = self._first_versions(plan)
        self._next_turn = turn.index + 1
        self._last_progress_s = now_s
        self._turns[turn.index] = turn
        self._head.granted(turn)
        self._head_may_move = True
        left = 0
        for item in items(self.plan, turn):
            legs = item_legs(plan, item, self.node)
            path = self._paths.get(legs)
            if path is None:
                path = self._paths[legs] = Path.of(legs, plan.num_blocks, plan.private_blocks)
            state = ItemState.of(plan, item, self.node, path)
            if state.is_done:
                continue
            left += 1
            self._states.append(state)
            if state.updates:
                self._updating.append(state)
                self._may_update = True
            flows = [Flow(state, micro) for micro in range(state.num_micro)] if path.legs else []
            self._flows.extend(flows)
            if item.owner == self.node:
                self._embeds.extend(flows)
        self._turn_items_left[turn.index] = left
        self._note_best_rank()
        if left == 0:
            self._finish_turn(turn.index, commands)

    def _note_best_rank(self) -> None:
        """No micro-batch here has anything to do of a lower rank than this: a search may end with it."""
        self._best_rank = min((state.path.best_rank for state in self._states), default=NO_RANK)

    def _first_versions(self, plan: Plan) -> dict[int, int]:
        """Updates of the slice's blocks where the run begins or goes on; the first turn says what was unfrozen."""
        piece, step = plan.slice_of(self.node), self._start_point.step
        return {block: weight_version(plan, block, step) for block in range(piece.start, piece.stop)}

    def _on_tensor(self, event: ev.TensorArrived, now_s: float, commands: list[ev.Command]) -> None:
        self._last_progress_s = now_s
        self._inbox[event.payload, event.seq, event.micro, event.boundary] = event.source

    def _on_head(self, event: ev.HeadArrived, now_s: float, commands: list[ev.Command]) -> None:
        self._last_progress_s = now_s
        self._head.arrived(event.turn, event.source)
        self._head_may_move = True

    def _on_credit(self, event: ev.CreditArrived, now_s: float, commands: list[ev.Command]) -> None:
        self._last_progress_s = now_s
        self._credits.came_back((event.source, event.boundary))

    def _on_stop(self, event: ev.StopRequested, now_s: float, commands: list[ev.Command]) -> None:
        self._stopped = True

    def _on_timer(self, event: ev.TimerFired, now_s: float, commands: list[ev.Command]) -> None:
        self._timer_is_set = False
        if not self._states:
            return
        overdue = now_s - self._last_progress_s >= self._wait_s
        if overdue and self._running is None and not self._waits_for_its_turn:
            self._stopped = True
            commands.append(ev.Fail("DeadlineError", f"node {self.node} {self.waiting_for()}"))
        elif overdue or self._running is not None:
            self._last_progress_s = now_s

    @property
    def _waits_for_its_turn(self) -> bool:
        """Whether others may be at work: an owner that hosts nothing sees no progress of turns that are not its own.

        Such a turn may take long; those who have a part in it, and the coordinator, see when it does not go on.
        """
        state = self._states[0]
        is_bystander = self.plan.slice_of(self.node).num_blocks == 0 and state.item.owner == self.node
        has_begun = state.next_head > 0 or state.item.seq > self._turns[state.item.turn].first_seq
        return is_bystander and not has_begun

    def _on_done(self, event: ev.ActionDone, now_s: float, commands: list[ev.Command]) -> None:
        action, flow, state = event.action, self._running_flow, self._running_state
        if (action is not self._running and action != self._running) or state is None:
            raise PlanError(f"node {self.node} was told of {action}, but {self._running} is under way")
        self._last_progress_s = now_s
        self._running = self._running_flow = self._running_state = None
        for name, value in event.values:
            state.values[name] = state.values.get(name, 0.0) + value
        if action.op in (Op.UPDATE, Op.SAVE):
            self._on_updated(action, state)
        elif flow is not None:
            if action.op is Op.HEAD:
                state.heads_left -= 1
                self._embeds_in_flight -= 1
                self._may_update = self._head_may_move = True
            elif action.op is Op.BACKWARD:
                state.backwards_left -= 1
                self._may_update = True
            elif action.op is Op.FORWARD and action.micro == state.num_micro - 1:
                self._forward_step = state.item.step
                self._may_update = True
            self._go_on(flow, commands)
        if state.item.owner == self.node:
            self._report_step(action, state, commands)

    def _on_updated(self, action: Action, state: ItemState) -> None:
        state.updates.remove(action)
        self._may_update = self._head_may_move = True
        if action.op is Op.SAVE:
            return
        if action.start == self.plan.num_blocks:
            self._head.updated()
            return
        for block in range(action.start, action.stop):
            self._versions[block] += 1

    def _report_step(self, action: Action, state: ItemState, commands: list[ev.Command]) -> None:
        """The owner reports an item once, when its head is through (and updated)."""
        item = state.item
        if state.heads_left or action.op not in (Op.HEAD, Op.UPDATE):
            return
        head_update_left = any(update.start == self.plan.num_blocks for update in state.updates)
        is_last = action.op is Op.HEAD or action.start == self.plan.num_blocks
        if is_last and not head_update_left:
            commands.append(ev.ReportStep(item.seq, item.step, item.kind.value, tuple(sorted(state.values.items()))))

    # ---- decisions --------------------------------------------------------------------------------

    def _go_on(self, flow: Flow, commands: list[ev.Command]) -> None:
        """The leg is done; a send that follows is no work and comes at once."""
        legs = flow.state.path.legs
        position = flow.position + 1
        if position < len(legs):
            leg = legs[position]
            if leg.op is Op.SEND:
                commands.append(ev.SendTensor(leg.payload, flow.seq, flow.micro, leg.start, leg.peer))
                position += 1
        flow.move(position)
        if position == len(legs):
            flow.state.flows_left -= 1

    def _hand_over(self, commands: list[ev.Command]) -> None:
        """A turn, a head or the end of an action with it may let it move; nothing else does."""
        self._head_may_move = False
        if self._head.take(self._turns, self._needs_head_before, commands):
            self._may_update = True
        self._head.pass_on(commands)

    def _needs_head_before(self, turn: int) -> bool:
        """Whether items of earlier turns of ours still use the head that we have."""
        return any(
            state.item.owner == self.node and state.item.turn < turn and state.uses_head(self.plan.num_blocks)
            for state in self._states
        )

    def _start_next(self, commands: list[ev.Command]) -> None:
        """Pick the best ready action and start it."""
        if self._may_update and self._start_update(commands):
            return
        flow = self._best_flow()
        if flow is None or flow.place is None:
            return
        place = flow.place
        if place.receive is not None:
            key = (place.receive[0], flow.seq, flow.micro, place.receive[1])
            commands.append(ev.Accept(*key, source=self._inbox.pop(key)))
            flow.move(place.position)
        self._credits.take(place.credit)
        if place.op is Op.EMBED:
            self._embeds.popleft()
            self._embeds_in_flight += 1
        self._start(place.leg.bind(flow.seq, flow.micro), flow, flow.state, commands)

    def _start_update(self, commands: list[ev.Command]) -> bool:
        """Start an update or a save that has become possible; only the end of an action or a head makes any so."""
        while self._updating and not self._updating[0].updates:
            self._updating.popleft()
        for state in itertools.islice(self._updating, self._max_graphs):
            update = state.ready_update(self.plan.num_blocks, self._forward_step)
            if update is not None and self._may_save(update, state):
                self._start(update, None, state, commands)
                return True
        self._may_update = False
        return False

    def _may_save(self, action: Action, state: ItemState) -> bool:
        """A save comes after all earlier updates; the owner saves the head too, so it has to have it."""
        if action.op is not Op.SAVE:
            return True
        return state is self._updating[0] and (state.item.owner != self.node or self._head.counts_for(state.item))

    def _start(self, action: Action, flow: Flow | None, state: ItemState, commands: list[ev.Command]) -> None:
        self._running, self._running_flow, self._running_state = action, flow, state
        commands.append(ev.RunAction(action))

    def _best_flow(self) -> Flow | None:
        """The micro-batch to go on with: the lowest rank that is ready, and of those the oldest."""
        best, found = NO_RANK, None
        barrier = math.inf
        graphs = 0
        newest: ItemState | None = None
        floor, inbox = self._floor, self._inbox
        for flow in self._flows:
            if barrier <= floor:
                break
            state = flow.state
            if state is not newest:
                newest, graphs = state, graphs + state.holds_graph
            place = flow.place
            if place is None:
                continue
            if place.rank < best and place.end <= barrier and place.op is not Op.EMBED:
                receive = place.receive
                if (receive is None or (receive[0], flow.seq, flow.micro, receive[1]) in inbox) and self._is_ready(
                    flow, place, graphs
                ):
                    best, found = place.rank, flow
                    if best <= self._best_rank:
                        break
            if place.frontier < barrier:
                barrier = place.frontier
        if self._embeds and self._embeds_in_flight < self._max_embeds:
            flow = self._embeds[0]
            older = found is not None and (found.seq, found.micro) < (flow.seq, flow.micro)
            if best > _EMBED_RANK or (best == _EMBED_RANK and not older):
                place = flow.place
                if place is not None and self._credits.has(place.credit):
                    found = flow
        return found

    def _is_ready(self, flow: Flow, place: Place, graphs: int) -> bool:
        """Whether the leg can start, its tensor being here; ``graphs`` counts items up to its own."""
        state, op = flow.state, place.op
        if op is Op.HEAD:
            return state.next_head == flow.micro and self._head.counts_for(state.item)
        if op is Op.BACKWARD:
            return state.next_backward == flow.micro and self._has_versions(state, place)
        if op is Op.FORWARD and graphs > self._max_graphs:
            return False
        return self._credits.has(place.credit) and self._has_versions(state, place)

    def _has_versions(self, state: ItemState, place: Place) -> bool:
        versions = self._versions
        for block, version in state.versions.get(place.position) or state.needed_versions(place):
            if versions.get(block, 0) != version:
                return False
        return True

    def _retire(self, commands: list[ev.Command]) -> None:
        """Forget finished micro-batches and items; report finished turns."""
        while self._flows and self._flows[0].leg is None:
            self._flows.popleft()
        if self._states and self._states[0].is_done:
            while self._states and self._states[0].is_done and self._states[0] is not self._running_state:
                turn = self._states.popleft().item.turn
                self._turn_items_left[turn] -= 1
                if self._turn_items_left[turn] == 0:
                    self._finish_turn(turn, commands)
            self._note_best_rank()

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
        flow = next((flow for flow in self._flows if flow.leg is not None), None)
        if flow is None:
            return f"waited {self._wait_s:g} s with no micro-batch under way"
        item, place = flow.state.item, flow.place
        before = self._turns.get(item.turn - 1)
        awaited = awaited_by(
            flow,
            inbox=self._inbox,
            has_credit=place is None or self._credits.has(place.credit),
            has_head=self._head.counts_for(item),
            head_from=before.owner if before else "?",
        )
        return f"waited {self._wait_s:g} s for {awaited}"
