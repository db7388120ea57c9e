"""Seconds and bytes of each action and message of a run, from a profile; shared by planner and simulator.

An action over several blocks costs the sum of its blocks. The lowest trainable block is cheaper than the others,
because its graph begins at its adapter. Where operations divide a block into subnets, its pattern gives the share that
is computed, with a graph or without::

    pattern 1123, F    constant part of a block + 2/4 of the subnets of GRAPH + 1/4 of the subnets of FORWARD
                  f    constant part of a block + 3/4 of the subnets of FORWARD
                  B    constant part of a block + 2/4 of the subnets of BACKWARD

``costs.activation_costs`` adds the seconds of recomputation and of projections.

``TopShare``: where the head reads only the first n of T tokens, the last block computes keys and values of all tokens,
and the rest of n tokens. Multiplications of a block of width d with a feed-forward part of width f::

    all tokens    T (4 d^2 + 2 d f + 2 T d)
    n of them     T 2 d^2 + n (2 d^2 + 2 d f + 2 T d)

With T = 64, n = 1, d = 768 and f = 3072, 18 % are left. Gradients of the inputs take as many as the forward.

``NodeWork``: with operation tables, the work of each node as a share of the work with all operations full. D2FT counts
a forward-only operation as 40 % of the compute and half of the communication of a full one, a shortcut as 0. In a ring
a hidden state passes every slice that is not skipped as a whole, so here bytes are those of the messages sent.

``move_s``: an upper estimate of the seconds of a move.

Source: D2FT, section IV-A (costs of operations in compute and in communication).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringtune.costs.activation_costs import projected_gains, saving_s, trained_parts
from ringtune.costs.memory_sizes import embedding_grad_bytes, handed_over_bytes, head_bytes, scores_adapters
from ringtune.costs.offload_costs import OffloadCosts
from ringtune.costs.profile import WHOLE_WORKS, LinkFacts, ModelFacts, NodeFacts, Profile, Work, WorkTable, WorkTime
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Graph, Leg, Op, Payload, Scope
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import PARCELS, lowest_units, subnet_rows, way
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT, pattern_of, share
from ringtune.schedule.placement import Helper, Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import shares
from ringtune.schedule.turns import Item, StepKind, follows_token, microbatch_rows
from ringtune.schedule.units import EMBEDDING, Range, Units


class IdleGain(NamedTuple):
    """Effect of idle time on a node under a quota: its next action is faster by at most ``max_s``.

    It keeps at least ``min_share`` of its time. Example: 30 ms become 23 ms with ``max_s`` 0.007, and at least 12 ms at
    a quota of 0.4 cores for one thread.
    """

    max_s: float
    min_share: float


class TopShare:
    """Computed share of the last block of a course."""

    def __init__(self, course: Course, model: ModelFacts) -> None:
        self._asked, self._rows = course.top_tokens, course.microbatch_sizes()[0]
        self._hidden, self._inner = model.hidden_size, model.intermediate_size

    def of(self, size: float) -> float:
        """Return the share for a micro-batch of ``size`` padded tokens; 1 where all are computed.

        Of T tokens of width d n are computed, with a feed-forward part of width f: of 2 d + (2 d + 2 f + 2 T)
        multiplications each, keys and values (2 d) are of all tokens.
        """
        tokens = size / self._rows
        if not 0 < self._asked < tokens:
            return 1.0
        keys, others = 2 * self._hidden, 2 * self._hidden + 2 * self._inner + 2 * tokens
        return (keys + others * self._asked / tokens) / (keys + others)


WIRE_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int8": 1}
_SCALE_BYTES = 4
_DEFAULT_OPTIMIZER = "adamw"
_FULL_TRAINING = "full"
"""The adapter configuration that trains the blocks' own weights; its measured times include their gradients."""


def wire_token_bytes(width: int, wire_dtype: str) -> int:
    """Bytes of ``width`` values of one token on the wire; in int8 with the token's scale."""
    return width * WIRE_ITEM_BYTES[wire_dtype] + (_SCALE_BYTES if wire_dtype == "int8" else 0)


def work_points(node: NodeFacts) -> tuple[WorkTime, ...]:
    """Return the measured points of a node; empty if nothing was measured.

    If only a block was measured, its times hold for any size, and all other works take 0 s.
    """
    if node.work_times or not node.block_forward_s > 0:
        return node.work_times
    graph_s, backward_s = node.block_graph_s or node.block_forward_s, node.block_backward_s
    times = dict.fromkeys(WHOLE_WORKS, 0.0) | {
        Work.FORWARD: node.block_forward_s,
        Work.GRAPH: graph_s,
        Work.GRAPH_LOWEST: graph_s,
        Work.BACKWARD: backward_s,
        Work.BACKWARD_LOWEST: backward_s,
    }
    return tuple(
        WorkTime(work=work, rows=0, tokens=0, median_s=each_s, low_s=each_s, high_s=each_s, samples=1)
        for work, each_s in times.items()
    )


def padded_size(owner: NodeFacts, *, max_length: int, rows: int, kind: StepKind) -> float:
    """Padded tokens of a micro-batch: ``rows`` times the owner's mean padded length.

    The length is at most ``max_length``, and ``max_length`` if the mean is unknown.
    """
    tokens = owner.eval_tokens if kind.evaluates else owner.train_tokens
    return rows * (min(tokens, max_length) or max_length)


def micro_sizes(course: Course, item: Item, owner: NodeFacts) -> tuple[float, ...]:
    """Padded tokens of each micro-batch of an item; one token where it was chosen by the item before."""
    rows = microbatch_rows(course, item)
    if follows_token(course, item):
        return (1.0,) * len(rows)
    return tuple(padded_size(owner, max_length=course.max_length, rows=count, kind=item.kind) for count in rows)


class NodeCosts:
    """Seconds of one node's actions.

    ``head`` is the head's unit; ``top`` the computed share of the last block, None = all of it; ``scores_adapters``
    whether scores need no gradient of a base weight.
    """

    def __init__(
        self, node: NodeFacts, head: int, top: TopShare | None = None, *, scores_adapters: bool = False
    ) -> None:
        points = work_points(node)
        if not points:
            raise PlanError(f"node {node.node} has no measured times; measure it with 'ringtune measure'")
        self._table = WorkTable(points, where=f"node {node.node}")
        self._head, self._top = head, top
        self._scores_what_trains = scores_adapters or node.shape.adapter == _FULL_TRAINING
        self._embedding_share = node.model.embedding_train_bytes / max(1, node.model.adapter_block_bytes)
        self._partial: dict[tuple[Op, str, float, float, float], float] = {}

    def seconds(
        self,
        op: Op,
        start: int,
        stop: int,
        *,
        size: float,
        lowest: int,
        kind: StepKind,
        patterns: Sequence[str] = (),
        passing: int = 0,
    ) -> float:
        """Seconds of one action; 0 for an action on a message; raises ``PlanError``.

        Args:
            op: of the action.
            start: first unit.
            stop: one past the last unit.
            size: padded tokens of the micro-batch.
            lowest: lowest unit that gets a gradient for this micro-batch.
            kind: of the item.
            patterns: of the blocks from ``start`` on, for this micro-batch; an empty pattern, and no patterns, mean all
                full.
            passing: blocks of a backward that compute no gradient of their weights, which would take as many
                multiplications as their forward.
        """
        if start == EMBEDDING and op is not Op.EMBED:  # its backward takes as long as its forward
            if op is Op.UPDATE:
                return self._embedding_share * self._table.seconds(Work.UPDATE)
            return self._table.seconds(Work.EMBED, size)
        if passing:
            whole_s = self.seconds(op, start, stop, size=size, lowest=lowest, kind=kind, patterns=patterns)
            return max(0.0, whole_s - passing * self._table.seconds(Work.FORWARD, size))
        timing = op.timing
        work = timing.evaluating if timing.evaluating and not kind.has_backward else timing.work
        if timing.head and start == self._head:
            work = timing.head
        if not work or (timing.is_optional and work not in self._table):
            return 0.0
        each_s = self._table.seconds(work, size if timing.is_sized else 0.0)
        if op.scope is not Scope.RANGE:
            return each_s * (stop - start) if op.scope is Scope.UNITS else each_s
        count = float(stop - start)
        if self._top is not None and start < stop == self._head:
            count -= 1 - self._top.of(size)
        if any(patterns):
            first_s = self.pattern_s(op, (timing.lowest if start <= lowest else "") or work, patterns[0], size)
            return first_s + sum(self.pattern_s(op, work, pattern, size) for pattern in patterns[1:])
        if kind is StepKind.SCORE and timing.scoring and not self._scores_what_trains:
            return (stop - start) * (each_s + self._table.seconds(timing.scoring, size))
        if not timing.lowest or start > lowest:
            return count * each_s
        if stop - start == 1:
            return count * self._table.seconds(timing.lowest, size)
        return (count - 1) * each_s + self._table.seconds(timing.lowest, size)

    def pattern_s(self, op: Op, work: str, pattern: str, size: float) -> float:
        """Seconds of one block with a pattern, for an op that is timed as ``work``."""
        full, forward_only = share(pattern, FULL), share(pattern, FORWARD_ONLY)
        key = (op, work, full, forward_only, size)
        seconds = self._partial.get(key)
        if seconds is None:
            active = full + forward_only if op.graph is Graph.NONE else full
            seconds = self._table.seconds(work, size) - (1 - active) * self._table.share_s(Work(work), size)
            if op.timing.beside and forward_only:
                seconds += forward_only * self._table.share_s(Work(op.timing.beside), size)
            self._partial[key] = seconds
        return seconds

    def work(self, work: Work, size: float = 0.0) -> float:
        """Seconds of a work; 0 if it was not measured."""
        return self._table.seconds(work, size) if work in self._table else 0.0


class CourseCosts:
    """Seconds and bytes of the actions and messages of a course, on any of the nodes; raises ``PlanError``.

    Args:
        profile: facts of the nodes and of all links that are used; without any link messages take no time, as on one
            machine.
        nodes: to cost; by default every node of the profile.
        stops: ends of the stages (``Placement.stages``), if some have several hosts.
        optimizer: of the job; the head is sent with its optimizer state.

    Attributes:
        head_bytes: of the head, and of an invertible adapter, with their optimizer state.
    """

    def __init__(
        self,
        course: Course,
        profile: Profile,
        *,
        nodes: Sequence[str] | None = None,
        recompute: Sequence[Range] = (),
        helpers: Sequence[Helper] = (),
        stops: Sequence[int] = (),
        optimizer: str = _DEFAULT_OPTIMIZER,
    ) -> None:
        facts = profile.by_name
        names = list(facts if nodes is None else nodes)
        if missing := [node for node in names if node not in facts]:
            raise PlanError(f"the profile lacks node {', '.join(missing)}; measure anew with 'ringtune measure'")
        model = facts[names[0]].model
        self.course = course
        self._recompute, self._stops = tuple(recompute), tuple(stops)
        self._projected = course.projected
        self._saves = bool(self._recompute or self._projected)
        top = TopShare(course, model) if course.top_tokens else None
        of_adapters = scores_adapters(course)
        self.nodes: Mapping[str, NodeCosts] = {
            node: NodeCosts(facts[node], course.head, top, scores_adapters=of_adapters) for node in names
        }
        self._facts = {node: facts[node] for node in names}
        self._links = profile.link_by_pair
        self.head_bytes = handed_over_bytes(course, model, optimizer)
        self._head_weight_bytes, self._model = head_bytes(course, model, optimizer)[0], model
        self._gains = projected_gains(course, model)
        self._offload = OffloadCosts(course, facts[names[0]], helpers) if helpers else None

    @staticmethod
    def of(plan: Plan, profile: Profile, *, optimizer: str = _DEFAULT_OPTIMIZER) -> CourseCosts:
        """Build the costs of a plan on its nodes and its placement; raises ``PlanError``."""
        placement = plan.placement
        return CourseCosts(
            plan.course,
            profile,
            nodes=plan.nodes,
            recompute=placement.recompute,
            helpers=placement.helpers,
            stops=[stage[0].stop for stage in placement.stages],
            optimizer=optimizer,
        )

    def sizes(self, item: Item) -> tuple[float, ...]:
        """Padded tokens of each micro-batch of an item."""
        return micro_sizes(self.course, item, self._facts[item.owner])

    def size(self, owner: str, rows: int, kind: StepKind) -> float:
        """Padded tokens of a micro-batch of ``rows`` rows of ``owner``."""
        return padded_size(self._facts[owner], max_length=self.course.max_length, rows=rows, kind=kind)

    def action_s(
        self,
        node: str,
        action: Action,
        *,
        size: float,
        lowest: int,
        kind: StepKind,
        patterns: Sequence[str] = (),
        trained: Units | None = None,
    ) -> float:
        """Seconds of a compute action with the node's overhead for each action; see ``NodeCosts.seconds``.

        Times that were recorded in a run include the overhead. ``trained`` are the units with a gradient of their
        weights; they matter only where all parameters train.
        """
        facts = self._facts[node]
        op, start, stop = action.op, action.start, action.stop
        costs, passing = self.nodes[node], 0
        if op is Op.BACKWARD and trained is not None and self.course.method.full_parameters:
            passing = max(0, stop - max(0, start)) - len(trained.within(start, stop).blocks)
        work_s = costs.seconds(op, start, stop, size=size, lowest=lowest, kind=kind, patterns=patterns, passing=passing)
        if self._saves and start > EMBEDDING:
            work_s += self._saving_s(costs, action, size, lowest, kind, patterns, trained)
        if self._offload is not None:
            work_s = self._offload.action_s(node, action, work_s, costs, size=size, kind=kind)
        return work_s if facts.has_messages else work_s + facts.handling_s

    def _saving_s(
        self,
        costs: NodeCosts,
        action: Action,
        size: float,
        lowest: int,
        kind: StepKind,
        patterns: Sequence[str],
        trained: Units | None,
    ) -> float:
        """Additional seconds of an action because of recomputation and projections."""
        start = action.start
        projected = () if kind is StepKind.SCORE else trained_parts(self.course, self._projected, trained)

        def seconds(op: Op, first: int, last: int) -> float:
            covered = patterns[first - start : last - start]
            return costs.seconds(op, first, last, size=size, lowest=lowest, kind=kind, patterns=covered)

        return saving_s(action.op, start, action.stop, self._recompute, projected, seconds, gains=self._gains)

    def tensor_bytes(self, payload: str, boundary: int, size: float) -> float:
        """Payload bytes of a hidden state with its mask, or of a gradient, of ``size`` padded tokens."""
        course, is_hidden = self.course, payload == Payload.HIDDEN
        with_mask = is_hidden and boundary < course.head
        token_bytes = wire_token_bytes(course.width(boundary, is_gradient=not is_hidden), course.wire_dtype)
        return size * (token_bytes + (1 if with_mask else 0))

    def message_bytes(self, payload: str, boundary: int, size: float) -> float:
        """Bytes of a message: hidden state with mask, gradient, head with optimizer state, or parcel."""
        if payload == Payload.HEAD:
            return self.head_bytes
        if payload == Payload.UNIT_GRAD:
            return self.unit_grad_bytes(boundary)
        if payload == Payload.REPLICA_GRAD:
            return self._model.adapter_block_bytes * (min(at for at in self._stops if at > boundary) - boundary)
        if self._offload is not None and payload in PARCELS:
            return self._offload.parcel_bytes(payload, boundary, size)
        return self.tensor_bytes(payload, boundary, self.sent_size(boundary, size))

    def sent_size(self, boundary: int, size: float) -> float:
        """Padded tokens that are sent over a boundary, of ``size``; to the head at most ``head_tokens`` a row."""
        most = self.course.microbatch_sizes()[0] * self.course.head_tokens
        return min(size, most or size) if boundary == self.course.head else size

    def unit_grad_bytes(self, unit: int) -> float:
        """Bytes of a message with the gradient of embedding or head, for a mean batch."""
        if unit == self.course.head:
            return self._head_weight_bytes
        owner_shares = zip(self.course.owners, shares(self.course.owners, self.course.turns), strict=True)
        tokens = sum(
            share * self.size(each.node, self.course.batch_rows(each), StepKind.TRAIN) for each, share in owner_shares
        )
        return embedding_grad_bytes(self._model, tokens)

    def link(self, source: str, target: str) -> LinkFacts | None:
        """Return the measured link; None if the profile has no links at all; raises ``PlanError``."""
        if not self._links:
            return None
        link = self._links.get((source, target))
        if link is None:
            raise PlanError(f"the profile lacks link {source} -> {target}; measure anew with 'ringtune measure'")
        return link

    def around_message_s(self, source: str, target: str, payload: str, size: float, *, num_bytes: float = 0.0) -> float:
        """Seconds to encode a message at the source and to decode it at the target.

        ``Work.HAND_OVER`` of the source covers both for a head; for gradients of units and weights of helpers it is
        scaled by bytes. Pairs count 0 here: they are packed and unpacked in actions.
        """
        if payload == Payload.HEAD:
            return self.nodes[source].work(Work.HAND_OVER)
        if payload == Payload.PAIRS:
            return 0.0
        if payload in PARCELS:
            return self.nodes[source].work(Work.HAND_OVER) * num_bytes / max(1.0, self.head_bytes)
        return self.nodes[source].work(Work.ENCODE, size) + self.nodes[target].work(Work.DECODE, size)

    def taken_s(self, source: str, target: str, payload: str, num_bytes: float, size: float) -> tuple[float, float]:
        """Seconds that a message takes from the computation of its source and of its target.

        Other threads send and receive. If the compute threads leave less than one core free (because of cores or a
        quota), they slow the computation down. The node's ``message_s_per_byte``, measured in a ring in which all nodes
        compute, is used if known. Times that were recorded in a run include this.
        """
        link, head = self.link(source, target), payload == Payload.HEAD or payload in PARCELS
        taken = []
        for node, work, cpu_s_per_byte in (
            (source, Work.ENCODE, link.send_cpu_s_per_byte if link else 0.0),
            (target, Work.DECODE, link.receive_cpu_s_per_byte if link else 0.0),
        ):
            facts = self._facts[node]
            is_known = facts.cpu_cores > 0 and not facts.has_messages
            crowded = min(1.0, max(0.0, facts.threads + 1 - facts.cpu_cores)) if is_known else 0.0
            codec_s = 0.0 if head else self.nodes[node].work(work, size)
            if is_known and facts.message_s_per_byte:
                taken.append(crowded * codec_s + num_bytes * facts.message_s_per_byte)
            else:
                taken.append(crowded * (codec_s + num_bytes * cpu_s_per_byte / facts.cpu_cores) if crowded else 0.0)
        return taken[0], taken[1]

    def idle_gain(self, node: str) -> IdleGain:
        """Effect of idle time at ``node``; none where times were recorded in a run."""
        facts = self._facts[node]
        if facts.has_messages or not facts.rested_s > 0 or not 0 < facts.cpu_cores < facts.threads:
            return IdleGain(0.0, 1.0)
        return IdleGain(facts.rested_s, facts.cpu_cores / facts.threads)


BASE_S: Final = 2.0
"""Fixed seconds of a move: to reach a turn boundary, build an empty model, open links; assumed, not measured."""
READ_BYTES_PER_S: Final = 40e6
"""Rate of reading base weights from a memory card; assumed, not measured."""


def move_s(before: Placement, after: Placement, model: NodeFacts) -> float:
    """Seconds of a move: the largest slice of the next placement is read from disk; 0 if no slice changes.

    Trained weights are a thousandth of that, and are not counted.
    """
    old = {piece.node: (piece.start, piece.stop) for piece in before.hosts}
    if old == {piece.node: (piece.start, piece.stop) for piece in after.hosts}:
        return 0.0
    most = max((piece.num_blocks for piece in after.hosts), default=0)
    return BASE_S + most * model.model.block_bytes / READ_BYTES_PER_S


FORWARD_COMPUTE: Final = 0.4
"""Compute of a forward-only operation, as a share of a full one's."""

FORWARD_SENT: Final = 0.5
"""Communication of a forward-only operation, as a share of a full one's."""

_BLOCK_OPS = (Op.FORWARD, Op.FORWARD_FREE, Op.BACKWARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWork:
    """Work of one node in items, done or predicted.

    Attributes:
        full: rows x blocks with forward and backward, weighted by the share of subnets.
        forward_only: rows x blocks with the forward only.
        work_s: seconds of forwards and backwards of blocks, by the profile; 0 without one.
        sent_bytes: bytes of hidden states and gradients, by the profile's mean lengths; without one the number of rows
            sent.
    """

    full: float = 0.0
    forward_only: float = 0.0
    skipped: float = 0.0
    work_s: float = 0.0
    sent_bytes: float = 0.0

    def __add__(self, other: NodeWork) -> NodeWork:
        names = [entry.name for entry in dataclasses.fields(self)]
        return NodeWork(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def times(self, count: float) -> NodeWork:
        """Return the work of ``count`` equal items."""
        return NodeWork(**{name: count * value for name, value in dataclasses.asdict(self).items()})

    @property
    def paper_compute(self) -> float:
        """Compute as D2FT counts it, in full operations."""
        return self.full + FORWARD_COMPUTE * self.forward_only

    @property
    def paper_sent(self) -> float:
        """Communication as D2FT counts it, in full operations."""
        return self.full + FORWARD_SENT * self.forward_only

    def shares(self) -> dict[str, float]:
        """Return the shares of full, forward-only and skipped operations."""
        total = (self.full + self.forward_only + self.skipped) or 1.0
        counts = {"full": self.full, "forward_only": self.forward_only, "skipped": self.skipped}
        return {name: count / total for name, count in counts.items()}


def total(parts: Iterable[NodeWork]) -> NodeWork:
    """Add up the work of items."""
    return sum(parts, NodeWork())


@functools.lru_cache(maxsize=64)
def all_full(plan: Plan) -> Plan:
    """Return the plan without operation tables, so that all operations are full."""
    return Plan(dataclasses.replace(plan.course, operations=None, choice=None), plan.placements)


def done_of(plan: Plan, item: Item, costs: CourseCosts | None = None) -> dict[str, NodeWork]:
    """Work of each node for a train item.

    ``plan`` has the decisions of the item's turn. Without ``costs`` of the course seconds are 0, and bytes are
    rows.
    """
    work_of = {node: NodeWork() for node in plan.nodes}
    course, rows, lowest = plan.course, subnet_rows(plan.course, item), lowest_units(plan.course, item)
    subnets = course.subnets
    for micro, size in enumerate(course.microbatch_sizes(item.rows)):
        row, legs = rows[micro] if rows else "", way(plan, item, micro)
        tokens = costs.size(item.owner, size, item.kind) if costs else float(size)
        for node in work_of:
            mine = legs.get(node, ())
            work_of[node] += _operations(plan, node, mine, row, subnets, size)
            work_of[node] += NodeWork(
                work_s=sum(_work_s(costs, node, leg, item, tokens, lowest[micro], row, subnets) for leg in mine),
                sent_bytes=sum(
                    costs.message_bytes(leg.payload, leg.start, tokens) if costs else tokens
                    for leg in mine
                    if leg.op is Op.SEND
                ),
            )
    return work_of


def _operations(plan: Plan, node: str, legs: Iterable[Leg], row: str, subnets: int, rows: int) -> NodeWork:
    """Count the operations of a node's blocks for one micro-batch; a full one without a graph is forward-only."""
    op_of = {block: leg.op for leg in legs if leg.op in _BLOCK_OPS[:2] for block in range(leg.start, leg.stop)}
    full = forward_only = skipped = 0.0
    for block in range(plan.slice_of(node).start, plan.slice_of(node).stop):
        pattern, op = pattern_of(row, block, subnets), op_of.get(block)
        if op is None:
            skipped += rows
            continue
        active = share(pattern, FULL)
        full += rows * active if op is Op.FORWARD else 0.0
        forward_only += rows * (share(pattern, FORWARD_ONLY) + (0.0 if op is Op.FORWARD else active))
        skipped += rows * share(pattern, SHORTCUT)
    return NodeWork(full=full, forward_only=forward_only, skipped=skipped)


def _work_s(
    costs: CourseCosts | None, node: str, leg: Leg, item: Item, tokens: float, lowest: int, row: str, subnets: int
) -> float:
    if costs is None or leg.op not in _BLOCK_OPS:
        return 0.0
    patterns = tuple(pattern_of(row, block, subnets) for block in range(leg.start, leg.stop)) if row else ()
    action = leg.bind(item.seq, 0)
    return costs.action_s(node, action, size=tokens, lowest=lowest, kind=item.kind, patterns=patterns)
