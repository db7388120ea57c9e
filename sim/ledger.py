"""The bytes that each node holds during a virtual run, item by item; the simulator reports their peak.

The planner's bound (``costs.memory_estimate``) has to lie above it for any timing. Counted are weights, adapters and
the head with their optimizer state, gradients, what forwards keep for backward, the work space of the block that runs,
what is kept of the ends of turns (from the beginning, as after some turns), and the tensors of a micro-batch::

    on the way and in the inbox --Accept--> with the micro-batch, through every f --send--> on the way
                                            F: the graph's input until its B    H: freed, and a gradient follows

Helpers add pairs and weights::

    B: pairs as computed --C: packed--> on the way --Accept--> A: unpacked, then freed
    U at the helper: weights --> on the way --Accept--> U at the host: freed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.full_parameters_costs import resting_units
from ringtune.costs.memory_estimate import kept_turn_terms
from ringtune.costs.memory_sizes import MemorySettings, Sizes, block_scores_bytes, needs_gradients
from ringtune.costs.memory_terms import Share
from ringtune.costs.profile import NodeFacts
from ringtune.schedule.actions import Action, Graph, Op, Payload, Scope, TensorKey
from ringtune.schedule.lowering import lowest_units, subnet_rows
from ringtune.schedule.operation_tables import FULL, patterns_of, share
from ringtune.schedule.placement import Helper, Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import in_ranges, within
from ringtune.schedule.turns import StepKind, Turn, follows_token, items
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.schedule.versions import trained

HIDDEN, GRAD, HEAD, UNIT_GRAD, REPLICA_GRAD = (
    Payload.HIDDEN,
    Payload.GRAD,
    Payload.HEAD,
    Payload.UNIT_GRAD,
    Payload.REPLICA_GRAD,
)
"""A name is read ten times as fast as the member of an enumeration, and all are asked for every message."""
_OF_MICRO_BATCH: Final = (HIDDEN, GRAD)
_NO_GRAPH, _KEEPS, _FREES = Graph.NONE, Graph.KEEPS, Graph.FREES


@dataclass(frozen=True, slots=True)
class ItemKind:
    """The properties of an item that set time and memory of its actions.

    Items of one turn have equal kinds if depth, rows, codes and the lowest units with a gradient are equal.

    Attributes:
        number: of its own for each kind that occurs, so that it is quick to look up by.
        trained: the units whose weights get a gradient.
        lowest: per micro-batch the lowest unit that gets a gradient.
        rows: per micro-batch the codes of all subnets; empty = everything is full.
        alike: per micro-batch the first one with equal ``lowest``, ``sizes`` and ``rows``.
    """

    number: int
    kind: StepKind
    trained: Units
    lowest: tuple[int, ...]
    sizes: tuple[float, ...]
    rows: tuple[str, ...] = ()
    subnets: int = 1
    alike: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Compare the micro-batches."""
        kinds = [*zip(self.lowest, self.sizes, self.rows or self.sizes, strict=False)]
        object.__setattr__(self, "alike", tuple(kinds.index(kind) for kind in kinds))

    def patterns(self, micro: int, start: int, stop: int) -> tuple[str, ...]:
        """The patterns of blocks [start, stop) for a micro-batch; none where everything is full."""
        return patterns_of(self.rows[micro], start, stop, self.subnets) if self.rows else ()


class Items:
    """Kind and sizes of every item that was granted and is not done.

    Attributes:
        costs: of the run.
        by_seq: the kind of each; asked for every action and message, so it is looked up without a call.
    """

    def __init__(self, costs: CourseCosts) -> None:
        self.costs = costs
        self.by_seq: dict[int, ItemKind] = {}
        self._known: dict[tuple[object, ...], ItemKind] = {}

    def granted(self, turn: Turn) -> None:
        """Note the items of a turn."""
        course = turn.settled(self.costs.course)
        subnets = course.subnets
        for item in items(course, turn):
            units, lowest = trained(course, item.kind, item.step), lowest_units(course, item)
            table = subnet_rows(course, item)
            key = (item.owner, item.kind, units, lowest, item.rows, table, subnets, follows_token(course, item))
            if key not in self._known:
                sizes = self.costs.sizes(item)
                self._known[key] = ItemKind(len(self._known), item.kind, units, lowest, sizes, table, subnets)
            self.by_seq[item.seq] = self._known[key]

    def forget(self, turn: Turn) -> None:
        """Drop the items of a turn that is done."""
        for seq in range(turn.first_seq, turn.end_seq):
            self.by_seq.pop(seq, None)


class OffloadBytes:
    """Bytes of pairs and weights at the nodes of a placement."""

    def __init__(self, placement: Placement, sizes: Mapping[str, Sizes]) -> None:
        self._helpers, self._sizes = placement.helpers, next(iter(sizes.values()))

    def of_backward(self, units: tuple[int, ...], size: float) -> tuple[tuple[int, ...], float]:
        """Units of a backward that get a gradient at their host, and the bytes of the pairs that the others give."""
        unhelped = tuple(unit for unit in units if self._of(unit) is None)
        return unhelped, (len(units) - len(unhelped)) * self._sizes.pair_bytes(size)

    def effect(self, held: NodeAccount, node: str, action: Action, item: ItemKind) -> Effect | None:
        """The effect of an action on its node's account; None if it is no action for a helper or at one."""
        units, helper = tuple(range(action.start, action.stop)), self._of(action.start)
        if helper is None:
            return None
        if action.op is Op.UPDATE:
            weights = (helper.stop - action.start) * self._sizes.helped.sent
            return Effect(held, takes=weights, updates=units) if node == helper.node else Effect(held, frees=weights)
        if action.op not in (Op.SHIP, Op.FIT):
            return None
        size = item.sizes[action.micro]
        computed = len(units) * self._sizes.pair_bytes(size)
        sent = (helper.stop - action.start) * self._sizes.sent_pair_bytes(size)
        if action.op is Op.SHIP:
            return Effect(held, takes=sent, frees=computed)
        return Effect(held, touches=computed, frees=sent, gradient=units)

    def _of(self, block: int) -> Helper | None:
        return next((helper for helper in self._helpers if helper.start <= block < helper.stop), None)


class NodeAccount:
    """The bytes that one node holds, and the most that it held.

    Args:
        rests: units whose optimizer state leaves memory after each update, to the disk or for ever.
        on_disk: whether to the disk: then it is in memory a tensor at a time.

    Attributes:
        graphs: number of graphs that wait for their backward, by item and micro-batch; none where there is no graph.
        outputs: micro-batches whose hidden state is the output of a graph, which has it in its own account.
    """

    def __init__(self, sizes: Sizes, *, rests: frozenset[int] = frozenset(), on_disk: bool = False) -> None:
        self.now_bytes = self.peak_bytes = 0.0
        self._sizes, self._rests, self._on_disk = sizes, rests, on_disk
        self._gradients: set[int] = set()  # units whose gradient waits for their update
        self._moments: set[int] = set()  # units whose optimizer state exists
        self.graphs: dict[tuple[int, int], int] = {}
        self.outputs: set[tuple[int, int]] = set()

    def add(self, num_bytes: float) -> None:
        """Add bytes to those that are held; negative bytes are freed."""
        self.now_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def give(self, units: Iterable[int]) -> None:
        """Add a gradient for each of these units that has none yet."""
        for unit in units:
            if unit not in self._gradients:
                self._gradients.add(unit)
                self.add(self._sizes.trained_bytes(unit))

    def free_grads(self, units: Iterable[int]) -> None:
        """Free the gradients of these units; the first update of a unit adds its moments.

        A unit without a gradient is left alone.
        """
        used = [unit for unit in units if unit in self._gradients]
        for unit in used:
            if self._on_disk and unit in self._rests:
                mapped_bytes = self._sizes.largest_state_bytes(unit)
                self.peak_bytes = max(self.peak_bytes, self.now_bytes + mapped_bytes)
            elif unit not in self._moments:
                self._moments.add(unit)
                self.add(self._sizes.state_bytes(unit))
        for unit in used:
            self._gradients.remove(unit)
            self.add(-self._sizes.trained_bytes(unit))
            if unit in self._rests and unit in self._moments:
                self._moments.remove(unit)
                self.add(-self._sizes.state_bytes(unit))


@dataclass(slots=True, eq=False)
class Effect:
    """The effect of a kind of action on its node's account.

    Attributes:
        takes: bytes that it takes.
        touches: bytes besides that it holds for a moment.
        frees: bytes that it frees in the end.
        input_bytes: of the hidden state that it ends: with the last graph of a micro-batch, or at once without graph.
        completes: whether their gradient becomes whole right before: that of an embedding is rows until then.
    """

    held: NodeAccount
    takes: float = 0.0
    touches: float = 0.0
    frees: float = 0.0
    graph: Graph = _NO_GRAPH
    input_bytes: float = 0.0
    gradient: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    completes: bool = False

    def apply(self, seq: int, micro: int) -> None:
        """Change the account by one action of an item's micro-batch that is done.

        The peak has all that the action took and touched, before it frees anything.
        """
        held = self.held
        if self.updates:
            if self.completes:
                held.give(self.updates)
            held.free_grads(self.updates)
        if self.gradient:
            held.give(self.gradient)
        held.now_bytes = now_bytes = held.now_bytes + self.takes
        if now_bytes + self.touches > held.peak_bytes:
            held.peak_bytes = now_bytes + self.touches
        held.now_bytes -= self.frees
        graph = self.graph
        if graph is _NO_GRAPH and not self.input_bytes:
            return
        # graphs of a micro-batch are counted; its hidden state is freed when nothing needs it any more
        flow, graphs = (seq, micro), held.graphs
        if graph is _KEEPS:
            graphs[flow] = graphs.get(flow, 0) + 1
            held.outputs.add(flow)
        elif graph is _FREES and graphs.get(flow, 0) > 1:
            graphs[flow] -= 1
        elif graph is _NO_GRAPH and flow in held.outputs:
            held.outputs.remove(flow)
        else:
            if graph is _FREES:
                graphs.pop(flow, None)
            held.now_bytes -= self.input_bytes


class MemoryLedger:
    """Accounts of every node of a plan.

    Args:
        embedding_bytes: what an owner's embedding takes, where it is not the whole table (rows as touched).
    """

    def __init__(
        self,
        plan: Plan,
        facts: Mapping[str, NodeFacts],
        granted: Items,
        settings: MemorySettings,
        *,
        embedding_bytes: float | None = None,
    ) -> None:
        self._head, self._by_seq, self._costs = plan.course.head, granted.by_seq, granted.costs
        self._has_passing = plan.course.method.full_parameters
        self._scores_gradients = needs_gradients(plan.course)
        self._recompute = plan.placement.recompute
        self._projected = plan.course.projected
        self._sizes = {node: Sizes.at(plan.course, facts[node], settings) for node in plan.nodes}
        self._token_bytes = next(iter(self._sizes.values())).token_bytes
        self._helping = OffloadBytes(plan.placement, self._sizes) if plan.placement.helpers else None
        self._held: dict[str, NodeAccount] = {}
        rests = resting_units(plan)
        for node, sizes in self._sizes.items():
            self._held[node] = held = NodeAccount(sizes, rests=rests, on_disk=plan.placement.state_on_disk)
            part = Share.of(plan, node)
            held.add(_fixed_bytes(sizes, part, embedding_bytes) + _scores_bytes(plan, node))
            held.add(sum(term.total_bytes for term in kept_turn_terms(plan.course, part, sizes)))

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most that each node held."""
        return {node: round(held.peak_bytes) for node, held in self._held.items()}

    @property
    def now_bytes(self) -> dict[str, int]:
        """The bytes that each node holds at the moment."""
        return {node: round(held.now_bytes) for node, held in self._held.items()}

    def sent(self, key: TensorKey, source: str, target: str, sent_s: float, arrival_s: float) -> None:
        """Move a tensor from its micro-batch to the link; it lies at its sender until it arrives.

        The hidden state that leaves a graph is there twice: the graph keeps its output. A head is counted with its
        owner.
        """
        payload, seq, micro, _ = key
        if payload != HIDDEN:
            return
        held = self._held[source]
        if (seq, micro) not in held.outputs:
            return
        held.outputs.remove((seq, micro))
        held.now_bytes = now_bytes = held.now_bytes + self._by_seq[seq].sizes[micro] * self._token_bytes
        if now_bytes > held.peak_bytes:
            held.peak_bytes = now_bytes

    def arrived(self, key: TensorKey, source: str, target: str, now_s: float) -> None:
        """Move a tensor from its sender to the inbox of its target; a head is counted with its owner."""
        payload, seq, micro, boundary = key
        if payload in _OF_MICRO_BATCH:
            num_bytes = self._by_seq[seq].sizes[micro] * self._token_bytes
        elif payload == UNIT_GRAD:
            self._held[target].add(self._sizes[target].unit_grad_bytes(boundary))
            return
        elif payload == REPLICA_GRAD:
            self._held[target].add(self._costs.message_bytes(payload, boundary, 0.0))
            return
        elif payload != HEAD:
            num_bytes = self._costs.message_bytes(
                payload, boundary, self._by_seq[seq].sizes[micro] if micro >= 0 else 0.0
            )
        else:
            return
        self._held[source].now_bytes -= num_bytes
        held = self._held[target]
        held.now_bytes = now_bytes = held.now_bytes + num_bytes
        if now_bytes > held.peak_bytes:
            held.peak_bytes = now_bytes

    def accepted(self, node: str, key: TensorKey) -> None:
        """Make a unit's gradient whole where it was taken out of the inbox; those of a replica are added up at once."""
        if key[0] == REPLICA_GRAD:
            self._held[node].add(-self._costs.message_bytes(key.payload, key.boundary, 0.0))
        if key[0] == UNIT_GRAD:
            held = self._held[node]
            held.give((key.boundary,))
            held.add(-self._sizes[node].unit_grad_bytes(key.boundary))

    def effect(self, node: str, action: Action, item: ItemKind) -> Effect | None:
        """The effect of an action on memory, equal for all actions of its kind; None if there is none."""
        op, _, micro, start, stop, _, _ = action
        held, sizes = self._held[node], self._sizes[node]
        if self._helping is not None and (effect := self._helping.effect(held, node, action, item)) is not None:
            return effect
        if op.scope is Scope.UNITS:
            return Effect(held, updates=tuple(range(start, stop)), completes=start == EMBEDDING)
        if op in (Op.EMBED, Op.READ):
            return Effect(held, takes=sizes.tensor_bytes(item.sizes[micro]))
        if op is Op.HEAD:
            return self._head_effect(held, sizes, item, micro)
        if not op.has_work_space:
            return None
        tensor_bytes = sizes.tensor_bytes(item.sizes[micro])
        if start == EMBEDDING:
            return Effect(held, frees=tensor_bytes)
        work_bytes = sizes.work_bytes(item.sizes[micro])
        all_bytes = self._graph_bytes(sizes, item, micro, start, stop)
        if self._has_passing:
            all_bytes -= self._left_out_bytes(sizes, item, micro, start, stop)
        again = sizes.kept_bytes(item.sizes[micro]) if within(self._recompute, start, stop) else 0.0
        if op.graph is Graph.KEEPS:
            return Effect(held, takes=all_bytes, touches=work_bytes + again, graph=Graph.KEEPS)
        if op.graph is Graph.FREES:
            units = tuple(unit for unit in range(start, stop) if unit in item.trained) if item.kind.has_update else ()
            reduced = sizes.scored_gradient_bytes if item.kind is StepKind.SCORE and self._scores_gradients else 0
            pairs_bytes = 0.0
            if self._helping is not None and item.kind.has_update:
                units, pairs_bytes = self._helping.of_backward(units, item.sizes[micro])
            used_up = 0 if start > item.lowest[micro] else tensor_bytes  # else it becomes the one of the block below
            return Effect(
                held,
                takes=pairs_bytes,
                touches=work_bytes + again + reduced,
                frees=all_bytes + used_up,
                graph=Graph.FREES,
                input_bytes=tensor_bytes,
                gradient=units,
            )
        return Effect(held, touches=work_bytes)

    def _graph_bytes(self, sizes: Sizes, item: ItemKind, micro: int, start: int, stop: int) -> float:
        """Bytes that blocks [start, stop) keep besides the input of the lowest one: their graphs, or inputs.

        Of subnets these are in proportion to those with a graph.
        """
        size = item.sizes[micro]
        each = sizes.kept_bytes(size)
        if item.kind is StepKind.SCORE and self._scores_gradients:
            each += sizes.kept_for_scores_bytes(size)
        begins = start <= item.lowest[micro] and sizes.lowest_token_bytes > 0 and item.kind is not StepKind.SCORE
        if self._recompute or self._projected or begins:
            return self._saved_bytes(sizes, item, micro, start, stop, each)
        if not item.rows:
            return (stop - start) * each
        left_out = sum(1 - share(pattern, FULL) for pattern in item.patterns(micro, start, stop))
        return (stop - start) * each - left_out * sizes.kept_in_subnets_bytes(size)

    def _left_out_bytes(self, sizes: Sizes, item: ItemKind, micro: int, start: int, stop: int) -> float:
        """Bytes that blocks [start, stop) keep less because the weights of some do not train at this step."""
        size, less_bytes = item.sizes[micro], 0.0
        for block in range(start, stop):
            if block not in item.trained and not in_ranges(block, self._recompute):
                is_projected = in_ranges(block, self._projected)
                whole_bytes = sizes.projected_bytes(size, block) if is_projected else sizes.kept_bytes(size)
                less_bytes += whole_bytes - sizes.kept_passing_bytes(size)
        return less_bytes

    def _saved_bytes(self, sizes: Sizes, item: ItemKind, micro: int, start: int, stop: int, each: float) -> float:
        """Bytes that blocks [start, stop) keep where not all of them keep as much; ``each`` is one that keeps all."""
        size, patterns = item.sizes[micro], item.patterns(micro, start, stop) or ("",) * (stop - start)
        is_scored = item.kind is StepKind.SCORE
        kept_bytes, inputs, has_graph_below = 0.0, -1, False  # the lowest input is the micro-batch's own
        for block, pattern in zip(range(start, stop), patterns, strict=True):
            is_again = in_ranges(block, self._recompute)
            inputs += is_again or not has_graph_below
            kept_bytes += is_again * (sizes.run_again_bytes(size) - sizes.tensor_bytes(size))
            has_graph_below = not is_again
            if not is_again:
                left_out = (1 - share(pattern, FULL)) * sizes.kept_in_subnets_bytes(size) if pattern else 0.0
                own_bytes = each - left_out
                if in_ranges(block, self._projected) and not is_scored:
                    own_bytes -= sizes.kept_bytes(size) - sizes.projected_bytes(size, block)
                is_lowest = block == item.lowest[micro] and not is_scored
                if is_lowest and sizes.lowest_token_bytes:  # its graph begins inside it
                    own_bytes = min(own_bytes, size * sizes.lowest_token_bytes)
                kept_bytes += own_bytes
        return kept_bytes + inputs * sizes.tensor_bytes(size)

    def _head_effect(self, held: NodeAccount, sizes: Sizes, item: ItemKind, micro: int) -> Effect:
        """The effect of a head: its hidden state, which is there already, makes way for the gradient of it."""
        tensor_bytes, work_bytes = (count(item.sizes[micro]) for count in (sizes.tensor_bytes, sizes.head_work_bytes))
        has_gradient = item.kind.has_backward and item.lowest[micro] < self._head
        left_bytes = tensor_bytes if has_gradient else 0.0
        return Effect(
            held,
            takes=left_bytes,
            touches=work_bytes - tensor_bytes - left_bytes,
            input_bytes=tensor_bytes,
            gradient=(self._head,) if item.trained.has_head and item.kind.has_update else (),
        )


def _scores_bytes(plan: Plan, node: str) -> int:
    """Bytes of what the hosted blocks' scores take where the run gathers some."""
    piece = plan.slice_of(node)
    scored = plan.course.trainable.ranges_within(piece.start, piece.stop)
    return sum(stop - start for start, stop in scored) * block_scores_bytes(plan.course)


def _fixed_bytes(sizes: Sizes, part: Share, embedding_bytes: float | None) -> float:
    """Bytes that a node holds throughout: hosted blocks and adapters; an owner's head, embedding and rows."""
    blocks = part.stop - part.start + (part.private_blocks if part.is_owner else 0)
    helped = sum(stop - start for start, stop in part.helped)
    fixed = blocks * (sizes.block_bytes + sizes.adapter_bytes) + sizes.shared_bytes
    fixed += helped * (sizes.helped.hosted - sizes.adapter_bytes)
    fixed += sizes.tables_bytes
    fixed += sizes.helped.held * sum(stop - start for ranges in part.helps for start, stop in ranges)
    if not part.is_owner:
        return fixed
    fixed += sizes.head_bytes + sizes.data_bytes + sizes.trained_bytes(EMBEDDING)
    return fixed + (sizes.embedding_bytes if embedding_bytes is None else embedding_bytes)
