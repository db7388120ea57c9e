"""From facts to a plan: who hosts which blocks, in which order the owners begin, and what it needs.

Slices are contiguous, in ring order (by name), and their sizes are in proportion to the nodes' speeds: the
slowest slice is as fast as whole blocks allow. Measured times vary from run to run, so among the splits whose
slowest slice is at most 15 % slower than the best one the most even is taken; what is left over goes to the
lower blocks, which train last. Memory is checked on the final whole-block slices, embedding and head included.

Source: RingAda, section III-B.1 (initialisation; the paper leaves the policy open).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringtune.errors import CapacityError, DataError, ModelError, PeerLostError, PlanError
from ringtune.job import Job
from ringtune.memory import MemoryEstimate, node_memory
from ringtune.model_family import CLASS_TASKS
from ringtune.plan import Owner, Phase, Plan, Slice
from ringtune.profile import ModelFacts, NodeFacts
from ringtune.units import format_bytes

_TOLERANCE = 1.15
_BELOW, _ABOVE = "(blocks below)", "(blocks above)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan and what it was checked against.

    Attributes:
        plan: the plan.
        memory: what each node of the plan holds at most.
    """

    plan: Plan
    memory: Mapping[str, MemoryEstimate]

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of each node."""
        return {node: estimate.total_bytes for node, estimate in self.memory.items()}


def make_plan(job: Job, facts: Mapping[str, NodeFacts], *, evaluation_only: bool = False) -> Planned:
    """Decide everything that a run needs.

    Args:
        job: what the user asked for.
        facts: of every node that takes part, by name.
        evaluation_only: plan no step, only one evaluation.

    Raises:
        CapacityError: no split fits; names a node with what it needs and has.
        DataError: nobody owns data, or the labels do not agree.
        ModelError: the nodes have different models.
        PlanError: the job breaks a rule of the plan.
    """
    nodes = [facts[name] for name in sorted(facts)]
    if not nodes:
        raise PlanError("there is no node to plan for; start one with 'ringtune node'")
    model = agreed_model(nodes)
    if job.privacy.private_blocks >= model.num_blocks:
        raise PlanError(
            f"privacy.private_blocks = {job.privacy.private_blocks} leaves nothing to share out of "
            f"{model.num_blocks} blocks; lower it"
        )
    draft = _draft(job, nodes, model)
    if draft.method == "pipeadapter":  # room for a whole item between two hosts, so that the warm-up fills the ring
        draft = dataclasses.replace(draft, credits=max(draft.credits, draft.microbatches))
    if evaluation_only:
        draft = dataclasses.replace(draft, num_steps=0, checkpoint_every=0)
    check = MemoryCheck(job, model, {node.node: node for node in nodes}, draft)
    split = _single if job.train.method == "single" else _proportional
    slices = split(nodes, check, start=draft.private_blocks, stop=draft.num_blocks)
    plan = dataclasses.replace(draft, phases=(Phase(slices=slices),))
    memory = plan_memory(job, plan, facts)
    for node, estimate in memory.items():
        if estimate.total_bytes > facts[node].memory_bytes:
            piece = plan.slice_of(node)
            raise check.refusal(node, piece.start, piece.stop)
    return Planned(plan=plan, memory=memory)


def keep_plan(job: Job, plan: Plan, facts: Mapping[str, NodeFacts]) -> Planned:
    """The plan of an earlier run, checked against the nodes as they are now.

    Args:
        job: of the run.
        plan: of the run.
        facts: of every node of the plan, by name.

    Raises:
        PeerLostError: a node is missing.
        ModelError: the nodes have different models, or not the plan's.
        DataError: an owner has other rows than the plan says.
        CapacityError: a node has less memory than it needs.
    """
    missing = [node for node in plan.nodes if node not in facts]
    if missing:
        raise PeerLostError(f"the run can't go on without node {', '.join(missing)}; start it again")
    model = agreed_model([facts[node] for node in plan.nodes])
    if (model.num_blocks, model.hidden_size) != (plan.num_blocks, plan.hidden_size):
        raise ModelError(
            f"the nodes have a model of {model.num_blocks} blocks of width {model.hidden_size}, the run began with "
            f"{plan.num_blocks} of {plan.hidden_size}; put the same folder back"
        )
    for owner in plan.owners:
        rows = (facts[owner.node].train_rows, facts[owner.node].eval_rows)
        if rows != (owner.train_rows, owner.eval_rows):
            raise DataError(
                f"node {owner.node} has {rows[0]} training and {rows[1]} evaluation rows, the run began with "
                f"{owner.train_rows} and {owner.eval_rows}; give it the same data"
            )
    memory = plan_memory(job, plan, facts)
    check = MemoryCheck(job, model, facts, plan)
    for node, estimate in memory.items():
        if estimate.total_bytes > facts[node].memory_bytes:
            raise check.refusal(node, plan.slice_of(node).start, plan.slice_of(node).stop)
    return Planned(plan=plan, memory=memory)


def plan_memory(job: Job, plan: Plan, facts: Mapping[str, NodeFacts]) -> dict[str, MemoryEstimate]:
    """What each node of a plan holds at most."""
    model = facts[plan.nodes[0]].model
    check = MemoryCheck(job, model, facts, plan)
    return {node: check.estimate(plan, node) for node in plan.nodes}


def agreed_model(nodes: Sequence[NodeFacts]) -> ModelFacts:
    """The model that all nodes have.

    Raises:
        ModelError: two nodes have different ones.
    """
    first = nodes[0]
    for node in nodes[1:]:
        if node.model.digest != first.model.digest:
            raise ModelError(
                f"nodes {first.node} and {node.node} have different models ({first.model.digest[:12]}… and "
                f"{node.model.digest[:12]}…); copy the same folder to both"
            )
    return first.model


def agreed_labels(job: Job, nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """The class names of the run, sorted: those of the job, or the union of what the owners have; none without classes.

    Raises:
        DataError: fewer than two, or an owner has one outside.
    """
    if job.model.task not in CLASS_TASKS:
        return ()
    labels = tuple(sorted(job.data.labels or {label for node in nodes for label in node.labels}))
    if len(labels) < 2:
        raise DataError(f"the owners' data has the classes {list(labels)}, a classifier needs two; check data.label")
    for node in nodes:
        for kind, found in (("training", node.labels), ("evaluation", node.eval_labels)):
            outside = sorted(set(found) - set(labels))
            if outside:
                raise DataError(
                    f"node {node.node} has {kind} rows of class {outside[0]!r}, the classes of this run are "
                    f"{', '.join(labels)}; add it to data.labels or remove the rows"
                )
    return labels


def _draft(job: Job, nodes: Sequence[NodeFacts], model: ModelFacts) -> Plan:
    """The plan with everything but its slices: one node stands for all."""
    owners = tuple(
        Owner(node=node.node, train_rows=node.train_rows, eval_rows=node.eval_rows) for node in nodes if node.train_rows
    )
    if not owners:
        raise DataError("no node has training rows; give at least one its file with --data")
    train = job.train
    return Plan(
        method=train.method,
        num_blocks=model.num_blocks,
        phases=(Phase(slices=(Slice(node=nodes[0].node, start=job.privacy.private_blocks, stop=model.num_blocks),)),),
        owners=owners,
        num_steps=train.num_steps(len(owners)),
        local_iterations=train.local_iterations,
        **job.unfreeze.plan_fields(),
        batch_size=train.batch_size,
        microbatches=train.microbatches,
        max_length=train.max_length,
        hidden_size=model.hidden_size,
        eval_every=train.eval_every,
        checkpoint_every=train.checkpoint_every,
        wire_dtype=job.wire.dtype,
        private_blocks=job.privacy.private_blocks,
        labels=agreed_labels(job, nodes),
        seed=train.seed,
    )


class MemoryCheck:
    """Answers whether a node can host a slice.

    Args:
        job: for optimizer and dtype.
        model: sizes.
        facts: of each node.
        draft: a plan with everything but the slices.
    """

    def __init__(self, job: Job, model: ModelFacts, facts: Mapping[str, NodeFacts], draft: Plan) -> None:
        self._job = job
        self._model = model
        self._facts = facts
        self._draft = draft
        self.longest = functools.cache(self._longest)

    def estimate(self, plan: Plan, node: str) -> MemoryEstimate:
        """What ``node`` holds at most under ``plan``."""
        return node_memory(
            plan,
            node,
            self._model,
            optimizer=self._job.train.optimizer,
            activation_block_bytes=self._facts[node].activation_block_bytes,
            dtype=self._job.model.dtype,
        )

    def with_slice(self, node: str, start: int, stop: int) -> Plan:
        """A plan in which ``node`` hosts ``[start, stop)`` and strangers the rest.

        Under PipeAdapter a node holds more, the more hosts are above it: then as many as there can be.
        """
        low, high = self._draft.private_blocks, self._draft.num_blocks
        strangers = sum(other > node for other in self._facts) if self._draft.method == "pipeadapter" else 1
        cuts = range(stop, min(high, stop + max(1, strangers)))
        pieces = (
            Slice(node=_BELOW, start=low, stop=start),
            Slice(node=node, start=start, stop=stop),
            *(Slice(node=f"{_ABOVE} {at}", start=at, stop=high if at == cuts[-1] else at + 1) for at in cuts),
        )
        return dataclasses.replace(
            self._draft, phases=(Phase(slices=tuple(piece for piece in pieces if piece.num_blocks)),)
        )

    def needed_bytes(self, node: str, start: int, stop: int) -> int:
        """What ``node`` needs to host ``[start, stop)``."""
        plan = self.with_slice(node, start, stop)
        return self.estimate(plan, node).total_bytes if node in plan.nodes else 0

    def fits(self, node: str, start: int, stop: int) -> bool:
        """Whether ``node`` can host ``[start, stop)``."""
        return self.needed_bytes(node, start, stop) <= self._facts[node].memory_bytes

    def _longest(self, node: str, start: int) -> int:
        """The largest ``stop`` such that ``node`` can host ``[start, stop)``; -1 if not even nothing fits."""
        if not self.fits(node, start, start):
            return -1
        low, high = start, self._draft.num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(node, start, middle) else (low, middle - 1)
        return low

    def refusal(self, node: str, start: int, stop: int, more: str = "") -> CapacityError:
        """The error that ``node`` can't host ``[start, stop)``, with both numbers."""
        plan, has = self.with_slice(node, start, stop), self._facts[node].memory_bytes
        needs = self.estimate(plan, node)
        what = f"for blocks [{start}, {stop})" if stop > start else "for embedding and head"
        return CapacityError(
            f"node {node} needs {needs} {what} but has {format_bytes(has)}{more}; lower train.batch_size or "
            "train.max_length, or add a node"
        )


def _block_s(node: NodeFacts) -> float:
    """Seconds that one block costs in a training step; 0 if it was not measured."""
    return node.block_graph_s + node.block_backward_s or node.block_forward_s


def _relative_costs(nodes: Sequence[NodeFacts]) -> list[float]:
    """What a block costs on each node; 1 for all if any was not measured."""
    costs = [_block_s(node) for node in nodes]
    return costs if all(cost > 0 for cost in costs) else [1.0] * len(costs)


def _single(nodes: Sequence[NodeFacts], check: MemoryCheck, *, start: int, stop: int) -> tuple[Slice, ...]:
    """All blocks on the fastest node that has room."""
    ranked = sorted(zip(_relative_costs(nodes), nodes, strict=True), key=lambda pair: (pair[0], pair[1].node))
    for _, node in ranked:
        if check.fits(node.node, start, stop):
            return (Slice(node=node.node, start=start, stop=stop),)
    roomiest = max(nodes, key=lambda node: node.memory_bytes)
    raise check.refusal(roomiest.node, start, stop, ", and no other node has more")


def _proportional(nodes: Sequence[NodeFacts], check: MemoryCheck, *, start: int, stop: int) -> tuple[Slice, ...]:
    """Contiguous slices in the order of ``nodes``; nodes that get nothing are left out."""
    costs = _relative_costs(nodes)

    def longest(index: int, first: int) -> int:
        return check.longest(nodes[index].node, first)

    counts = split_blocks(costs, start=start, stop=stop, longest=longest)
    if counts is None:
        raise _does_not_fit(nodes, check, split_blocks(costs, start=start, stop=stop), start)
    slices, at = [], start
    for node, count in zip(nodes, counts, strict=True):
        if count:
            slices.append(Slice(node=node.node, start=at, stop=at + count))
        at += count
    return tuple(slices)


def _does_not_fit(
    nodes: Sequence[NodeFacts], check: MemoryCheck, counts: Sequence[int] | None, start: int
) -> CapacityError:
    """Name the first node that the split by speed alone overfills."""
    at = start
    for node, count in zip(nodes, counts or (), strict=True):
        if not check.fits(node.node, at, at + count):
            others = ", and no other split of the blocks fits" if len(nodes) > 1 else ""
            return check.refusal(node.node, at, at + count, others)
        at += count
    raise PlanError("no split was found although one fits; please report it")


def split_blocks(
    costs: Sequence[float], *, start: int, stop: int, longest: Callable[[int, int], int] | None = None
) -> tuple[int, ...] | None:
    """How many blocks each node gets so that the slowest slice is fast and the split even.

    Args:
        costs: of one block on each node, in ring order; any unit.
        start: first block to place.
        stop: one past the last block.
        longest: (index, first) -> the largest end of a slice of that node that begins at ``first``; -1 if it
            can't even be empty. No limit if not given.

    Returns:
        Counts in ring order, None if no split fits.
    """
    ends = longest or (lambda index, first: stop)
    best = _fill(costs, start, stop, ends, limit=math.inf, weight=None)
    if best is None:
        return None
    slowest = max(cost * count for cost, count in zip(costs, best, strict=True))
    return _fill(costs, start, stop, ends, limit=slowest * _TOLERANCE, weight=lambda count: count * count)


def _fill(
    costs: Sequence[float],
    start: int,
    stop: int,
    ends: Callable[[int, int], int],
    *,
    limit: float,
    weight: Callable[[int], int] | None,
) -> tuple[int, ...] | None:
    """Exact search over all contiguous splits, from the last node to the first.

    Without ``weight`` it minimises the slowest slice, with it the sum of weights; no slice costs more than
    ``limit``. Among equals, earlier nodes get more.
    """
    nothing: tuple[float, tuple[int, ...]] = (0.0, ())
    tails: dict[int, tuple[float, tuple[int, ...]]] = {stop: nothing}
    for index in reversed(range(len(costs))):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first in range(start, stop + 1):
            last = min(ends(index, first), stop)
            for end in range(last, first - 1, -1):
                count = end - first
                if end not in tails or costs[index] * count > limit * (1 + 1e-9):
                    continue
                rest, counts = tails[end]
                score = max(rest, costs[index] * count) if weight is None else rest + weight(count)
                if first not in longer or score < longer[first][0]:
                    longer[first] = (score, (count, *counts))
        tails = longer
    return tails[start][1] if start in tails else None
