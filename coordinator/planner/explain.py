"""Reasons of a plan: memory of each node, seconds of each depth, activations, operations, and the second best plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.planner.local_search import applied, moves
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.operations import OperationsReason, balance_line, explain_operations
from coordinator.planner.phases import PhasesReason
from coordinator.planner.planned import HelpersReason, Planned
from coordinator.planner.replicas import ReplicasReason
from coordinator.planner.ring_costs import RingCosts, with_fewer_depths, with_mean_owner
from coordinator.planner.search import Candidate, RingChoice, block_s, both_seconds, plan_of, slices_of
from coordinator.planner.step_time import Ring, job_s, step_times
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.plan import Plan
from ringtune.techniques.activation_checkpointing import ActivationsReason, explain_activations
from ringtune.techniques.frozen_weights import reason_line

_DEPTHS_OF_TRIALS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReason:
    """The blocks of one node of the profile, or the reason why it has none.

    Attributes:
        is_owner: whether it owns rows, with or without blocks.
        needed_bytes: at most, during the run.
        reason: why it has no blocks; empty for a host.
        helps: hosts and blocks of which it fits the adapters, in words; empty for no helper.
    """

    node: str
    start: int
    stop: int
    is_owner: bool
    needed_bytes: int
    budget_bytes: int
    reason: str = ""
    helps: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthTime:
    """Number of steps that train ``depth`` blocks, and the predicted seconds of one of them."""

    depth: int
    steps: int
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """A plan that was not chosen, with its predicted seconds."""

    slices: tuple[tuple[str, int, int], ...]
    microbatches: int
    job_s: float
    simulated_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The reasons for a chosen plan.

    Attributes:
        nodes: hosts in ring order, then the others by name.
        job_s: of all steps, by the formula.
        simulated_s: by the simulator; None if it was not simulated.
        proven: whether no ring with these micro-batches is faster by the formula.
        even: whether the nodes are alike and have even slices.
        second: the best other plan; None if there is none.
        relative: whether times were assumed, so that only their ratios mean something.
        activations: None if everything is kept and there is no dropout.
        unsettled: the chosen plan before its operations were settled for its slices, as ``second`` is judged; None if
            no operations depend on the slices.
        equal: seconds of all steps with each node's own counts, and with equal counts; None without operations.balance.
        frozen: dtype of the frozen weights, and why, if the planner chose it; else empty.
        lowest_of: number of blocks, if a step may train fewer than all blocks above the lowest trained one; else None.
    """

    nodes: tuple[NodeReason, ...]
    depths: tuple[DepthTime, ...]
    job_s: float
    simulated_s: float | None
    initiators: tuple[str, ...]
    microbatches: int
    credits: int
    wire_dtype: str
    proven: bool
    even: bool
    second: Runner | None
    relative: bool
    cut_after_s: float | None = None
    operations: OperationsReason | None = None
    activations: ActivationsReason | None = None
    unsettled: Runner | None = None
    equal: tuple[float, float] | None = None
    frozen: str = ""
    helping: HelpersReason | None = None
    replicas: ReplicasReason | None = None
    phases: PhasesReason | None = None
    lowest_of: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as dictionaries, lists, numbers and strings."""
        return dataclasses.asdict(self)


def explain(planned: Planned, *, relative: bool, optimizer: str = "adamw", dropout: float = 0.0) -> Explanation:
    """Explain a plan that has a choice of the search; with ``relative`` times were assumed."""
    given, choice, operations = planned.plan, planned.choice, None
    if choice is None:
        raise ValueError("no reasons are known of a plan that was made before")
    if planned.profile is not None:
        operations = explain_operations(given, planned.profile, optimizer=optimizer)
    best, settled = choice.runs, choice.settled
    costs = settled.costs if settled is not None else choice.costs
    plan = plan_of(best.draft, costs, best.ring)
    plan = plan.with_copies(given.placement.copies, given.placement.num_copies, given.placement.racks)
    times = step_times(costs, best.ring)
    carried_out = given if planned.replicas is not None and planned.replicas.is_taken else plan
    return Explanation(
        nodes=tuple(_nodes(choice, carried_out)),
        depths=tuple(DepthTime(depth=at, steps=costs.steps_at[at], step_s=times[at]) for at in costs.depths),
        job_s=best.job_s,
        simulated_s=best.simulated_s,
        initiators=tuple(owner.node for owner in plan.course.owners),
        microbatches=carried_out.course.microbatches,
        credits=carried_out.placement.credits,
        wire_dtype=carried_out.course.wire_dtype,
        proven=choice.proven and not choice.even and settled is None,
        even=choice.even,
        second=_second(choice),
        relative=relative,
        cut_after_s=choice.cut_after_s,
        operations=operations,
        activations=explain_activations(plan, choice.caps, dropout=dropout),
        unsettled=_runner(choice.costs, choice.best) if settled is not None else None,
        equal=both_seconds(best, settled.equal) if settled is not None and settled.equal is not None else None,
        frozen=reason_line(plan.course, choice.too_large),
        helping=planned.helping,
        replicas=planned.replicas,
        phases=planned.phases,
        lowest_of=plan.course.num_blocks if plan.course.method.full_parameters else None,
    )


def _nodes(choice: RingChoice, plan: Plan) -> Iterator[NodeReason]:
    costs, caps = choice.costs, choice.caps
    trial = with_mean_owner(with_fewer_depths(costs, _DEPTHS_OF_TRIALS))
    hosts = [piece.node for piece in plan.placement.slices]
    for name in (*hosts, *(name for name in costs.names if name not in hosts)):
        piece, is_owner = plan.slice_of(name), plan.owner(name) is not None
        yield NodeReason(
            node=name,
            start=piece.start,
            stop=piece.stop,
            is_owner=is_owner,
            needed_bytes=caps.estimate(plan, name).total_bytes if name in plan.nodes else 0,
            budget_bytes=caps.facts[name].memory_bytes,
            helps=_helps(plan, name),
            reason="" if name in hosts else _reason(choice, trial, costs.names.index(name), plan),
        )


def _helps(plan: Plan, node: str) -> str:
    helpers = plan.placement.joined_helpers(node)
    return ", ".join(f"{plan.placement.host_of(helper.start)}'s {helper.text}" for helper in helpers)


def _reason(choice: RingChoice, trial: RingCosts, node: int, plan: Plan) -> str:
    costs, caps, ring = choice.costs, choice.caps, choice.best.ring
    name = costs.names[node]
    if plan.course.method.max_hosts == 1:
        return "the method runs all blocks on one node"
    if len(ring.nodes) == costs.stop - costs.first:
        return "every block has a host already"
    needs = min(
        caps.needed_bytes(name, start, start + 1, 0 if start + 1 == caps.draft.course.head else 1)
        for start in range(costs.first, costs.stop)
    )
    if needs > caps.facts[name].memory_bytes:
        return f"no room: one block needs {format_bytes(needs)}, it has {format_bytes(caps.facts[name].memory_bytes)}"
    with_it = min(
        (
            job_s(trial, other)
            for kind, other in _near(ring, [node], costs.num_nodes)
            if kind in ("insert", "replace") and _ring_fits(caps, costs, other)
        ),
        default=None,
    )
    if with_it is None:
        return "no room: no slice beside the others' fits its memory"
    more = with_it / job_s(trial, ring) - 1
    block = block_s(caps.facts[name]) / max(1e-12, min(block_s(caps.facts[costs.names[host]]) for host in ring.nodes))
    speed = f", its blocks take {block:.1f} times those of the fastest host" if block > 1.05 else ""
    return f"the job would take {more:.1%} longer with it{speed}" if more > 5e-4 else f"it gains nothing{speed}"


def _near(ring: Ring, free: Sequence[int], max_hosts: int) -> Iterator[tuple[str, Ring]]:
    """Yield the rings one move away, each with the kind of its move."""
    for move in moves(ring, free, max_hosts):
        if (other := applied(ring, move)) is not None:
            yield move.kind, other


def _ring_fits(caps: MemoryCaps, costs: RingCosts, ring: Ring) -> bool:
    hosts = reversed(slices_of(costs, ring))
    return not any(caps.lacking(piece.node, piece.start, piece.stop, above) for above, piece in enumerate(hosts))


def _second(choice: RingChoice) -> Runner | None:
    """Return the best plan among the runners-up and the rings one move away from the chosen ring, if any.

    Simulated plans precede all others.
    """
    best, costs = choice.best, choice.costs
    kind = best.ring, best.draft.course.microbatches
    others = [other for other in choice.others if (other.ring, other.draft.course.microbatches) != kind]
    trial = with_mean_owner(with_fewer_depths(costs, _DEPTHS_OF_TRIALS))
    free = [node for node in range(costs.num_nodes) if node not in best.ring.nodes]
    rings = _near(best.ring, free, best.draft.course.method.max_hosts or costs.num_nodes)
    near = [(job_s(trial, other), other) for _, other in rings if _ring_fits(choice.caps, costs, other)]
    near.sort(key=lambda pair: (pair[0], pair[1].nodes, pair[1].counts))
    others += [Candidate(ring=ring, draft=best.draft, job_s=job_s(costs, ring)) for _, ring in near[:20]]
    if not others:
        return None
    judged = [other for other in others if other.simulated_s is not None]
    return _runner(
        costs,
        min(judged or others, key=lambda each: (each.simulated_s or each.job_s, each.ring.nodes, each.ring.counts)),
    )


def _runner(costs: RingCosts, candidate: Candidate) -> Runner:
    return Runner(
        slices=tuple((piece.node, piece.start, piece.stop) for piece in slices_of(costs, candidate.ring)),
        microbatches=candidate.draft.course.microbatches,
        job_s=candidate.job_s,
        simulated_s=candidate.simulated_s,
    )


def explanation_text(explanation: Explanation) -> list[str]:
    """Write an explanation as lines."""
    seconds: Callable[[float], str] = format_seconds
    if explanation.relative:
        seconds = "{:.4g} block times".format
    width = max(len(node.node) for node in explanation.nodes)
    lines = ["why:"]
    for node in explanation.nodes:
        budget = f"{format_bytes(node.needed_bytes)} of {format_bytes(node.budget_bytes)}"
        helps = f", fits adapters of {node.helps}" if node.helps else ""
        if not node.reason:
            lines.append(f"  {node.node:<{width}}  blocks [{node.start}, {node.stop}){helps}, {budget}")
        elif node.is_owner or helps:
            owns = ", owns rows" if node.is_owner else ""
            lines.append(f"  {node.node:<{width}}  hosts nothing{owns}{helps}, {budget}: {node.reason}")
        else:
            lines.append(f"  {node.node:<{width}}  left out: {node.reason}")
    lines += explanation.activations.lines() if explanation.activations is not None else []
    lines += explanation.helping.lines(seconds) if explanation.helping is not None else []
    lines.append(f"  turns in the order {', '.join(explanation.initiators)}")
    lines.append(
        f"  {explanation.microbatches} micro-batches, {explanation.credits} credits a link and boundary, "
        f"{explanation.wire_dtype} on the wire"
    )
    lines += [explanation.frozen] if explanation.frozen else []
    lines += explanation.operations.lines(seconds) if explanation.operations is not None else []
    lines += [balance_line(*explanation.equal, seconds)] if explanation.equal is not None else []
    lines += explanation.phases.lines(seconds) if explanation.phases is not None else []
    if explanation.replicas is not None:
        lines += explanation.replicas.lines(seconds)
        if explanation.replicas.is_taken:
            return lines
    lines += [
        f"  {_depth_text(each.depth, explanation.lowest_of)}: {each.steps} steps of {seconds(each.step_s)}"
        for each in explanation.depths
    ]
    simulated = "" if explanation.simulated_s is None else f", {seconds(explanation.simulated_s)} by the simulator"
    lines.append(f"  all steps: {seconds(explanation.job_s)} by the formula{simulated}")
    if explanation.cut_after_s is not None:
        lines.append(f"  cut after {explanation.cut_after_s:g} s (runtime.plan_s): the best plan found so far")
    if explanation.even:
        lines.append("  the nodes are alike, so slices are even; no other plan is predicted to be much faster")
    elif explanation.proven:
        lines.append("  proven: by the formula no other plan with these micro-batches is faster")
    if explanation.second is not None:
        slices = ", ".join(f"{node} [{start}, {stop})" for node, start, stop in explanation.second.slices)
        name, times = _second_name(explanation), _times(explanation.second, seconds)
        lines.append(f"  {name}: {slices} with {explanation.second.microbatches} micro-batches: {times}")
        if explanation.unsettled is not None:
            lines.append(
                "    both were compared before their operations were settled with their slices; there the chosen one "
                f"takes {_times(explanation.unsettled, seconds)}"
            )
    return lines


def _depth_text(depth: int, lowest_of: int | None) -> str:
    """Name steps by their depth, or where groups of units train by the lowest block that their backward reaches."""
    if lowest_of is None:
        return f"depth {depth}"
    return f"backward to block {lowest_of - depth}" if depth else "no backward below the head"


def _second_name(explanation: Explanation) -> str:
    """Name the other plan: it may be the faster one where alike nodes have even slices."""
    second = explanation.second
    if second is None or explanation.simulated_s is not None or second.simulated_s is not None:
        return "second best"
    return "not much faster, so not taken" if explanation.even and second.job_s < explanation.job_s else "second best"


def _times(runner: Runner, seconds: Callable[[float], str]) -> str:
    judged = "" if runner.simulated_s is None else f", {seconds(runner.simulated_s)} by the simulator"
    return f"{seconds(runner.job_s)} by the formula{judged}"
