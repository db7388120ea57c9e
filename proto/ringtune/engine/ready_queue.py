"""The list scheduler of an engine: work of a node, versions of its units, its head, and actions ready to run.

Work waits in queues in the order of (seq, micro). A flag for each queue says whether an event may have made an entry
ready; else the queue is not searched.

``HeadTracker``: a head that arrives for turn 5 of this node serves turn 5 and the turns of this node that follow
without a gap. Equal versions do not prove that a head may be used: after an evaluation an owner still has a head of the
right version that it has handed over. Where every owner has a copy of the head (``schedule.stages``) none is handed
over, and only its updates count.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from ringtune.engine import events as ev
from ringtune.engine.events import TensorArrived
from ringtune.engine.exchange import ParcelExchange
from ringtune.engine.paths import Credits, ItemState, MicroBatchState, Path, PathAction, max_embeds
from ringtune.errors import FrameError
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import Legs, credit_boundary
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.versions import in_flight, max_open_items, weight_version


class UnitVersions:
    """Versions of the hosted blocks, and of an owner's embedding.

    Attributes:
        embedding: version of the embedding, a copy or an invertible adapter as this node has it.
    """

    def __init__(self, plan: Plan, node: str) -> None:
        self._piece, self._head = plan.slice_of(node), plan.course.head
        self._blocks: dict[int, int] = {}
        self.embedding = 0

    def begin(self, plan: Plan, step: int, *, has_head: bool) -> None:
        """Set the versions that the units have at ``step``; without the head an invertible adapter is a new one."""
        units = range(self._piece.start, self._piece.stop)
        self._blocks = {unit: weight_version(plan.course, unit, step) for unit in units}
        is_new = plan.course.invertible and not has_head
        self.embedding = 0 if is_new else weight_version(plan.course, EMBEDDING, step)

    def updated(self, update: Action) -> None:
        """Count an update; the head is counted by ``HeadTracker``."""
        if update.start == EMBEDDING:
            self.embedding += 1
        elif update.start != self._head:
            for unit in range(update.start, update.stop):
                self._blocks[unit] += 1

    def are(self, versions: Mapping[int, int], place: PathAction) -> bool:
        """Whether each unit of the place has its version in ``versions``."""
        blocks = self._blocks
        if blocks == versions:  # all that is hosted here, which is the usual case
            return True
        return all(versions.get(unit) == blocks.get(unit) for unit in range(place.start, place.stop))


class HeadTracker:
    """The state of one node's head: version, turn for which it was received, and hand-overs.

    Args:
        is_holder: whether it has the head at the start of the run.
        is_copy: whether every owner has a copy, so that none is handed over.
        first_turn: index of the run's first turn.
    """

    def __init__(self, node: str, *, is_holder: bool, is_copy: bool = False, first_turn: int = 0) -> None:
        self._node = node
        self._is_copy = is_copy
        self._version = 0
        is_holder = is_holder and not is_copy
        before = first_turn - 1
        self._held_since: int | None = before if is_holder else None
        self._holds_since: dict[int, int] = {before: before} if is_holder else {}
        self._arrived: dict[int, str] = {}
        self._handovers: deque[tuple[Turn, int, int]] = deque()
        self._first_versions: dict[int, int] = {}

    def begin(self, version: int) -> None:
        """Set the version of the head at the start of the run."""
        self._version = version

    def granted(self, turn: Turn, version: int) -> None:
        """Note a granted turn, of which the first item needs a head of ``version``.

        This node's own turn needs the head. Another owner's turn right after an own one gets the head from here.
        """
        if self._is_copy:
            return
        self._first_versions[turn.index] = version
        if turn.owner == self._node:
            self._holds_since[turn.index] = self._holds_since.get(turn.index - 1, turn.index)
        elif turn.index - 1 in self._holds_since:
            self._handovers.append((turn, self._holds_since[turn.index - 1], version))

    def arrived(self, turn: int, source: str) -> None:
        """Note that the head for ``turn`` is in the inbox."""
        self._arrived[turn] = source

    def updated(self) -> None:
        """Count one update of the head."""
        self._version += 1

    def counts_for(self, state: ItemState) -> bool:
        """Whether the present head has the version for the item and was received for its run of own turns."""
        return self._version == state.head_version and self._held_since == self._holds_since.get(state.item.turn)

    def take(
        self, turns: Mapping[int, Turn], is_used_before: Callable[[int], bool], commands: list[ev.Command]
    ) -> Turn | None:
        """Take each arrived head with a known turn, once no item before that turn uses the old head."""
        taken = None
        for index in sorted(self._arrived):
            turn = turns.get(index)
            if turn is not None and not is_used_before(index):
                commands.append(ev.AcceptHead(index, self._arrived.pop(index)))
                self._version, self._held_since, taken = self._first_versions[index], index, turn
        return taken

    def pass_on(self, commands: list[ev.Command]) -> None:
        """Send the head once it has the version for the next owner's turn."""
        while self._handovers:
            turn, held_since, version = self._handovers[0]
            if self._held_since != held_since or self._version != version:
                break
            self._handovers.popleft()
            commands.append(ev.SendHead(turn.index, turn.owner))

    def forget(self, turn: int) -> None:
        """Drop the records of a turn."""
        self._holds_since.pop(turn, None)
        self._first_versions.pop(turn, None)


_FORWARD_RANK: Final = Op.FORWARD.rank
_EMBED, _HEAD, _FIT, _GRAD = Op.EMBED, Op.HEAD, Op.FIT, Payload.GRAD  # a name is read faster than an attribute


class ReadyQueue:
    """Items and micro-batches of one node that are not done.

    Attributes:
        exchange: updates that need parcels of other nodes, or send some.
        versions: of the units here.
        states: items that are not done, in order.
        is_host: whether the node hosts blocks.
        may_update: whether an update may have become possible since one was looked for.
    """

    def __init__(self, plan: Plan, node: str, head: HeadTracker) -> None:
        course, placement, piece = plan.course, plan.placement, plan.slice_of(node)
        is_owner = plan.owner(node) is not None
        self._course, self._head, self._head_unit = course, head, course.head
        self._credits = Credits(placement.credits)
        self.exchange = ParcelExchange(plan, node, self._credits)
        self._private_blocks = placement.private_blocks
        self.is_host = piece.num_blocks > 0
        self._floor = 0 if is_owner and placement.private_blocks else piece.start
        self.versions = UnitVersions(plan, node)
        # things leave a queue when they are behind it
        self.states: deque[ItemState] = deque()
        self._updating: deque[ItemState] = deque()
        self._graphs: deque[ItemState] = deque()  # only the first ones may keep graphs
        self._heads: deque[ItemState] = deque()
        self._backwards: deque[ItemState] = deque()
        self._upward: list[MicroBatchState] = []
        self._embeds: deque[MicroBatchState] = deque()
        self._embeds_in_flight = 0
        self._max_embeds = max_embeds(plan, node)
        self._max_graphs = in_flight(course, piece.start) if self.is_host else 1
        self._max_updating = max_open_items(course, piece.start, piece.stop)
        self._flows: dict[tuple[int, int], MicroBatchState] = {}
        self._early: dict[tuple[int, int], list[TensorArrived]] = {}
        self._paths: dict[Legs, Path] = {}
        self._going_on: MicroBatchState | None = None
        # what may have become possible since it was last looked for
        self._is_starved = False
        self.may_update = self._may_run_head = self._may_go_down = False
        self._is_helper = bool(placement.helped_by(node))

    # ---- arrivals -----------------------------------------------------------------------------------

    def paths(self, ways: Sequence[Legs]) -> list[Path | None]:
        """Return the path of each micro-batch with these legs, computed once; None for one without legs."""
        paths: list[Path | None] = []
        for at, legs in enumerate(ways):
            if at and legs is ways[at - 1]:
                paths.append(paths[-1])
                continue
            path = self._paths.get(legs)
            if path is None and legs:
                pairs_boundary = credit_boundary(self._course, Payload.PAIRS)
                path = self._paths[legs] = Path(legs, self._private_blocks, self._credits, pairs_boundary)
            paths.append(path)
        return paths

    def take_on(self, state: ItemState) -> None:
        """Add an item and its micro-batches to the queues."""
        self.states.append(state)
        if state.holds_graph:  # what goes backward here holds later updates up, even if it updates nothing here
            self._updating.append(state)
            self._graphs.append(state)
            self._free_room()  # an item that has no backward here may block no graphs from the start
        if state.heads:
            self._heads.append(state)
        if state.goes_backward:
            self._backwards.append(state)
        self.exchange.take_on(state)
        for flow in state.flows:
            key = (flow.seq, flow.micro)
            self._flows[key] = flow
            if key in self._early:
                for event in self._early.pop(key):
                    self.note_tensor(event, None)
            if flow.path.first.is_upward:
                self._upward.append(flow)
            if flow.path.has_embedding:
                self._embeds.append(flow)

    def recheck(self) -> None:
        """Mark every queue, after a turn, an update, a head or a parcel."""
        self.may_update = self._may_run_head = self._may_go_down = True

    def took_head(self, course: Course, step: int) -> None:
        """Note a head of ``step``, with which an invertible adapter came."""
        self.versions.embedding = weight_version(course, EMBEDDING, step)
        self.recheck()

    def note_tensor(self, event: TensorArrived, running: MicroBatchState | None) -> bool:
        """Note a tensor; return whether a micro-batch waits for it; raises ``FrameError``.

        ``running`` is the micro-batch of the running action.
        """
        (payload, seq, micro, boundary), source = event
        flow = self._flows.get((seq, micro))
        if flow is None:  # its turn is granted to others already
            early = self._early.setdefault((seq, micro), [])
            if event not in early:
                early.append(event)
            return False
        place, is_gradient = flow.place, payload == _GRAD
        if is_gradient and place is not None and (payload, boundary) in place.too_early:
            error = FrameError(
                f"node {source} sent the gradient of item {seq}, micro-batch {micro}, block {boundary} before this "
                f"node sent what it follows from; look at node {source}, and use one version on all machines"
            )
            error.peer = source
            raise error
        if flow is running and place is not None:  # a running action already has its own tensor
            place = place.next
        awaited = None if place is None else place.awaits
        if awaited is None or awaited[1] != boundary or awaited[0] != payload:
            return False  # it came before, and nothing waits for it any more
        flow.arrived = event
        if is_gradient:
            self._may_go_down = True
        elif boundary == self._head_unit:
            self._may_run_head = True
        return True

    def note_credit(self, source: str, boundary: int) -> tuple[bool, bool]:
        """Take a credit of ``source`` back; return whether it was missing, and whether an action may have waited."""
        channel = self._credits.known.get((source, boundary))
        copies = self.exchange.copies
        if not (copies.note_credit(source, boundary) if channel is None else channel.return_credit()):
            return False, False
        if channel is not None and boundary <= self._head_unit:
            is_awaited, self._is_starved = self._is_starved, False
            return True, is_awaited
        self._may_go_down = self.may_update = True
        return True, True

    # ---- progress -----------------------------------------------------------------------------------

    def began_embedding(self) -> None:
        """Note that the oldest embedding runs."""
        self._embeds.popleft()
        self._embeds_in_flight += 1

    def passed(self, flow: MicroBatchState, place: PathAction) -> None:
        """Move a micro-batch from a place that is done to the next."""
        if place.op is _FIT:
            self.exchange.helping.passed(flow)
            self.may_update = True
            return
        following = flow.place = place.next
        if place.is_upward:
            if place.goes_on:
                self._going_on = flow
            elif following is None or not following.is_upward:
                upward = self._upward
                upward.remove(flow)
                if flow.path.has_head:
                    self._may_run_head = True
                if not upward or upward[0].seq > flow.seq:
                    self.may_update = True
        elif place.op is _HEAD:
            flow.state.heads.popleft()
            self._embeds_in_flight -= flow.path.has_embedding
            if flow.path.head_room is not None:
                flow.path.head_room.return_credit()
            self._may_run_head = True
            if following is not None and following.receive is None:
                self._may_go_down = True
            if not flow.state.heads:
                self.may_update = True
        elif place.is_downward:
            self._went_backward(flow, place, following)
        if following is None:
            flow.state.flows_left -= 1

    def _went_backward(self, flow: MicroBatchState, place: PathAction, following: PathAction | None) -> None:
        """Note that a micro-batch has done a backward; the embedding's is counted apart from the blocks'."""
        self._may_go_down = True
        if place.is_of_embedding:
            flow.state.embedding_backwards.popleft()
        elif following is None or not following.is_downward or following.is_of_embedding:
            flow.state.backwards.popleft()
        else:
            return
        if not flow.state.backwards:
            self.may_update = True
        while self._backwards and not self._backwards[0].goes_backward:
            self._backwards.popleft()
            self._free_room()

    def updated(self, action: Action, state: ItemState) -> list[ev.Command]:
        """Note that an update or a save is done; return the commands that follow."""
        if action in state.helped:
            self.recheck()
            return self.exchange.helping.updated(action, state)
        (state.updates if action in state.updates else state.copies).remove(action)
        self.recheck()
        self._free_room()
        if action.op is not Op.SAVE:
            self.versions.updated(action)
        return []

    def _free_room(self) -> None:
        """Drop items that block no graphs any more."""
        while self._graphs and not self._graphs[0].takes_room:
            self._graphs.popleft()

    def retired(self) -> Iterator[ItemState]:
        """Remove finished items, in order, and yield them."""
        while self.states and self.states[0].is_done:
            state = self.states.popleft()
            for flow in state.flows:
                del self._flows[flow.seq, flow.micro]
            state.flows.clear()  # each knows its item
            yield state

    def needs_head_before(self, turn: int) -> bool:
        """Whether own items of earlier turns still use the present head."""
        head = self._head_unit
        return any(state.is_own and state.item.turn < turn and state.uses_head(head) for state in self.states)

    # ---- choice of the next action ------------------------------------------------------------------

    def next_update(self) -> tuple[Action, ItemState] | None:
        """Choose an update or a save that is possible; None if there is none."""
        update = self._next_own_update() or self.exchange.next_update(self._heads, self._backwards)
        self.may_update = update is not None
        return update

    def _next_own_update(self) -> tuple[Action, ItemState] | None:
        while self._updating and not self._updating[0].holds_graph:
            self._updating.popleft()
        upward_seq = self._upward[0].seq if self._upward else math.inf
        for state in itertools.islice(self._updating, self._max_updating):
            for update in state.updates:
                if self._is_possible(update, state, upward_seq):
                    return update, state
                if update.op is Op.SAVE:  # what is saved must not change before
                    return None
            if state.backwards or any(EMBEDDING < update.start < self._head_unit for update in state.updates):
                upward_seq = -1.0  # blocks are updated item after item, even where one has no backward
        return None

    def next_flow(self) -> MicroBatchState | None:
        """Choose the micro-batch to run: one in a cut forward, else of the lowest ready rank the oldest."""
        if self._going_on is not None:
            cut, self._going_on = self._going_on, None
            if cut.place is not None and self._is_next(cut, cut.place):
                return cut
        if self._may_run_head and (chosen := self._ready_head()) is not None:
            return chosen
        if self._may_go_down and (chosen := self._ready_backward()) is not None:
            return chosen
        if self._is_helper and (chosen := self.exchange.helping.next_fit()) is not None:
            return chosen
        chosen = None
        barrier, floor = math.inf, self._floor
        for flow in self._upward:
            place = flow.place
            if place is None or place.op is _EMBED:
                break  # earlier ones come first at every unit above
            if place.stop <= barrier and (place.receive is None or flow.arrived) and self._is_ready(flow, place):
                if place.rank == _FORWARD_RANK:
                    return flow
                if chosen is None:
                    chosen = flow
            if place.frontier < barrier:
                barrier = place.frontier
                if barrier <= floor:
                    break
        if self._embeds and self._embeds_in_flight < self._max_embeds:
            return self._or_embedding(chosen)
        return chosen

    def _is_next(self, flow: MicroBatchState, place: PathAction) -> bool:
        """Whether a micro-batch can move upward without overtaking an older one."""
        older = itertools.takewhile(lambda before: before is not flow, self._upward)
        return all(before.place and before.place.frontier >= place.stop for before in older) and self._is_ready(
            flow, place
        )

    def _is_possible(self, update: Action, state: ItemState, upward_seq: float) -> bool:
        """Whether the predecessors of an update or a save are done; item ``upward_seq`` is the oldest in forward."""
        if update.op is Op.SAVE:  # after all earlier updates; the owner saves the head too, so it has to have it
            seq = state.item.seq
            is_first = state is self._updating[0] and self.exchange.may_save(seq)
            return is_first and (not state.is_own or self._head.counts_for(state))
        if update.start == self._head_unit:
            return not state.heads and self.exchange.copies.may_send(self._head_unit)
        if update.start == EMBEDDING:
            return not state.goes_backward and self.exchange.copies.may_send(EMBEDDING)
        awaited_seq = state.awaited_seq
        if update in state.lagging:  # a host that does not wait for its helper; the next item may only pass forward
            awaited_seq += 1
            if any(it.backwards and it.item.seq == awaited_seq for it in self.states):
                return False
        return not state.backwards and awaited_seq < upward_seq and self.exchange.may_update(update)

    def _ready_head(self) -> MicroBatchState | None:
        """The oldest own micro-batch before its head, if the head can run."""
        while self._heads and not self._heads[0].heads:
            self._heads.popleft()
        if self._heads:
            state = self._heads[0]
            flow = state.heads[0]
            place = flow.place
            is_here = place is not None and place.op is _HEAD and (place.receive is None or flow.arrived is not None)
            if is_here and self._head.counts_for(state):
                return flow
        self._may_run_head = False
        return None

    def _ready_backward(self) -> MicroBatchState | None:
        """The oldest micro-batch that can go backward here."""
        for state in itertools.islice(self._backwards, self._max_graphs):
            versions = state.backward_versions
            for waiting in (state.backwards, state.embedding_backwards):
                if not waiting:
                    continue
                flow = waiting[0]
                place = flow.place
                if place is None or not place.is_downward or (place.receive is not None and flow.arrived is None):
                    continue
                if versions and not self.versions.are(versions, place):
                    continue
                if place.credit is None or place.credit.left > 0:
                    return flow
        self._may_go_down = False
        return None

    def _is_ready(self, flow: MicroBatchState, place: PathAction) -> bool:
        """Whether an upward action with its tensor here has room for a graph, a credit and the right versions."""
        if place.keeps_graph and flow.state not in itertools.islice(self._graphs, self._max_graphs):
            return False
        if place.credit is not None and place.credit.left <= 0:
            self._is_starved = True
            return False
        versions = flow.state.forward_versions
        return not versions or not place.has_version or self.versions.are(versions, place)

    def _or_embedding(self, flow_above: MicroBatchState | None) -> MicroBatchState | None:
        """Return the next embedding if it can run and is older than ``flow_above``; else ``flow_above``."""
        flow = self._embeds[0]
        if flow.state.follows_token:
            before = self._flows.get((flow.seq - 1, flow.micro))
            if before is not None and before.place is not None:
                return flow_above  # its token is not chosen yet
        if flow.state.embedding_version != self.versions.embedding:
            return flow_above
        if self._course.invertible and flow.path.trains_embedding and not self._head.counts_for(flow.state):
            return flow_above  # a head that arrives later would change weights of this graph
        if flow_above is not None and (flow_above.seq, flow_above.micro) < (flow.seq, flow.micro):
            return flow_above
        credit = flow.path.first.credit
        if credit is not None and credit.left <= 0:
            self._is_starved = True
            return flow_above
        return flow
