"""The prediction of a plan on profiled nodes: wall time, busy and waiting time, bytes and memory.

A plan runs on the virtual clock after checks that the profile fits it and that every node has room. Engines, rounds and
moves are those of a real run; only the seconds are from the profile. A plan of several placements is one run: with each
move the costs, links and accounts of the next placement replace those of the last one, and counts are added up in the
end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ringtune.costs import action_costs
from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.measurement import check_profile
from ringtune.costs.memory_estimate import max_memory, parts_memory
from ringtune.costs.memory_sizes import DEFAULT_SETTINGS, MemorySettings
from ringtune.costs.memory_terms import MemoryEstimate
from ringtune.costs.profile import Profile, TimedShape
from ringtune.errors import CapacityError, PlanError
from ringtune.quantities import format_bytes
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.operation_tables import ScheduledTable
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint
from ringtune.schedule.units import Units, units_text
from ringtune.storage.strict import nearest
from sim.ledger import Items, MemoryLedger
from sim.links import MeasuredLinks
from sim.meter import Meter, NodeMeter, ProfileTimes, RecordedTimes, TimedStep
from sim.ring import NO_IDLE_GAIN, Conditions, ExpectedTables, RingResult, VirtualRing


def check_fits(plan: Plan, profile: Profile, settings: MemorySettings, *, shape: TimedShape | None = None) -> None:
    """Refuse a plan that its profile can't time, or that does not fit in the memory of a node.

    ``shape`` is of the timings, None = any.
    """
    known = profile.by_name
    for node in plan.nodes:
        if node not in known:
            raise PlanError(f"the plan names node {node!r}, which the profile lacks; {nearest(node, known)}")
    check_profile(profile, plan.course, shape=shape)
    for node, needs in memory_bounds(plan, profile, settings).items():
        if needs.total_bytes > known[node].memory_bytes:
            pieces = dict.fromkeys(piece for part in plan.placements if (piece := part.slice_of(node)).num_blocks)
            what = f"blocks {', then '.join(piece.text for piece in pieces)}" if pieces else "embedding and head"
            raise CapacityError(
                f"node {node} needs {needs} for {what} but has {format_bytes(known[node].memory_bytes)}; give it fewer "
                "blocks, lower batch_size or max_length, or raise microbatches"
            )


def memory_bounds(plan: Plan, profile: Profile, settings: MemorySettings) -> dict[str, MemoryEstimate]:
    """The most bytes of each node of the plan in any placement or move, whatever the timing."""
    needs = max_memory(plan, parts_memory(plan, profile.by_name, settings))
    return {node: needs[node] for node in plan.nodes}


def recorded_shape(profile: Profile, plan: Plan) -> TimedShape | None:
    """The shape that timings should have where no job says it; None if nothing was measured.

    Tokens and wire dtype are the plan's, all else is that of the first measured node; so are the tokens of images.
    """
    first = next((node for node in profile.nodes if node.shape.is_measured), None)
    if first is None:
        return None
    tokens = first.shape.tokens if first.model.fixed_tokens else plan.course.max_length
    return dataclasses.replace(first.shape, tokens=tokens, wire_dtype=plan.course.wire_dtype)


_Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePrediction:
    """One node of a predicted run.

    Attributes:
        blocks: what it hosts, in words: ``[0, 2)``, ``[0, 2) then none`` where the run moves.
        needed_bytes: what the plan reserves on it beside the libraries, as ``ringtune plan`` says.
        peak_memory_bytes: the most of it that it held at once on the virtual clock.
    """

    node: str
    start: int
    stop: int
    blocks: str
    busy_s: float
    busy_share: float
    idle_share: float
    busy_by_op_s: dict[str, float]
    needed_bytes: int
    peak_memory_bytes: int
    budget_bytes: int
    actions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPrediction:
    """One directed link: what went over it, and for which share of the time it was busy.

    ``unit_gradient_bytes`` of these are gradients of embedding and head that owners send each other.
    """

    source: str
    target: str
    sent_bytes: int
    busy_share: float
    unit_gradient_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthPrediction:
    """All steps of one depth of the unfreezing, or of one group of units.

    Attributes:
        trains: the units of the group, where all parameters train a group at a time; else empty.
    """

    depth: int
    steps: int
    wall_s: float
    step_s: float
    trains: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A predicted run.

    Attributes:
        wall_s: from the first grant to the end of the last action.
        train_s: thereof steps.
        moves_s: thereof moves from one placement to the next, each from the end of the last turn before.
        evaluation_s: thereof evaluations, checkpoints, and items that gather scores.
        bubble_share: idle share of the hosts, mean.
        nodes, links, depths: the parts.
        spans: (node, action, start_s, end_s) of everything, if it was asked for; not in the JSON form.
    """

    wall_s: float
    train_s: float
    moves_s: float
    evaluation_s: float
    bubble_share: float
    num_steps: int
    num_actions: int
    nodes: tuple[NodePrediction, ...]
    links: tuple[LinkPrediction, ...]
    depths: tuple[DepthPrediction, ...]
    spans: tuple[tuple[str, Action, float, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form; seconds, bytes and shares as the keys say."""
        return {key: value for key, value in asdict(self).items() if key != "spans"}


def predict(
    plan: Plan,
    profile: Profile,
    settings: MemorySettings = DEFAULT_SETTINGS,
    *,
    samples: Iterable[tuple[str, Action, float]] | None = None,
    same_run: bool = False,
    start: StartPoint | None = None,
    embedding_bytes: float | None = None,
    control_latency_s: float = 0.0,
    keep_spans: bool = False,
    seed: int = 0,
    tables: Sequence[ScheduledTable] = (),
    move_s: float | None = None,
) -> Prediction:
    """Run ``plan`` on a virtual clock with the times of ``profile``; raises ``PlanError`` or ``DeadlineError``.

    A plan whose owners were lost or came back says when for the turns after that only: from its very beginning as many
    steps are predicted with the owners that are there now.

    Args:
        plan: what to run.
        profile: nodes, and links if they take time.
        settings: of the job: moments of its optimizer are memory, and travel with the head.
        samples: (node, action, seconds) of a recorded run, to be replayed in place of medians.
        same_run: whether ``samples`` are of this very plan.
        start: where the run continues; by default its very beginning.
        embedding_bytes: of an owner's table, where only the touched rows shall count.
        control_latency_s: of a word between a node and the coordinator.
        keep_spans: keep every action and message for a trace.
        seed: of draws from ``samples``.
        tables: that a run of the plan has chosen; where the plan's run chooses others, the expected one holds.
        move_s: seconds that a move takes, where that is known; else the planner's formula says it.
    """
    if start is None and plan.course.left_out:
        plan = Plan(dataclasses.replace(plan.course, left_out=()), plan.placements)
    recorded = None if samples is None else tuple(samples)
    options = _Options(settings, embedding_bytes, control_latency_s, keep_spans, recorded, same_run, seed)
    simulated, costs = _Simulated(plan, profile, options), CourseCosts.of(plan, profile, optimizer=settings.optimizer)
    first = simulated.enters(plan.at(start.placement_number if start else plan.placement.placement_number), 0.0)
    ring = VirtualRing(
        plan,
        action_s=first.action_s,
        transport=first.transport,
        observer=first.observer,
        start=start,
        chooser=ExpectedTables(plan, tables),
        idle_gain=costs.idle_gain if samples is None else lambda node: NO_IDLE_GAIN,
        move_s=simulated.move_s if move_s is None else lambda move: move_s,
        enters=simulated.enters,
    )
    return simulated.prediction(ring.run_to_end())


class _Options(NamedTuple):
    """Arguments of ``predict`` that are equal in all placements."""

    settings: MemorySettings
    embedding_bytes: float | None
    control_latency_s: float
    keep_spans: bool
    samples: tuple[tuple[str, Action, float], ...] | None
    same_run: bool
    seed: int


class _Part(NamedTuple):
    """The accounts of one placement: of memory, of links, and of everything else."""

    placement: Placement
    ledger: MemoryLedger
    links: MeasuredLinks
    meter: Meter


class _Simulated:
    """The costs and accounts of a plan on the virtual clock, placement by placement."""

    def __init__(self, plan: Plan, profile: Profile, options: _Options) -> None:
        self._plan, self._profile, self._options = plan, profile, options
        self._parts: list[_Part] = []

    def move_s(self, move: rd.Move) -> float:
        """Seconds that a move is assumed to take, by the formula that the planner has for it."""
        return action_costs.move_s(self._parts[-1].placement, move.part.placement, self._profile.nodes[0])

    def enters(self, part: Plan, now_s: float) -> Conditions:
        """Open the accounts of a placement that holds from now on."""
        settings, embedding_bytes, control_latency_s, keep_spans, samples, same_run, seed = self._options
        items = Items(CourseCosts.of(part, self._profile, optimizer=settings.optimizer))
        ledger = MemoryLedger(part, self._profile.by_name, items, settings, embedding_bytes=embedding_bytes)
        medians = ProfileTimes(items, ledger.effect)
        times: ProfileTimes | RecordedTimes = medians
        if samples is not None:
            seed += len(self._parts)
            times = RecordedTimes(samples, medians, items, same_run=same_run, seed=seed)
        links = MeasuredLinks(items, self._profile, control_latency_s=control_latency_s, slow_computing=samples is None)
        meter = Meter(part.nodes, items, medians, ledger, keep_spans=keep_spans, begins_s=now_s)
        self._parts.append(_Part(part.placement, ledger, links, meter))
        return Conditions(times, links, meter)

    def prediction(self, result: RingResult) -> Prediction:
        """Add up the accounts of all placements of a run that is over."""
        plan, wall_s, meters = self._plan, result.wall_s, [part.meter for part in self._parts]
        measured = [(meter.nodes, part.ledger.peak_bytes) for meter, part in zip(meters, self._parts, strict=True)]
        needs = memory_bounds(plan, self._profile, self._options.settings)
        nodes = tuple(self._node(node, needs[node], wall_s, measured) for node in plan.nodes)
        hosting = {piece.node for placement in plan.placements for piece in placement.hosts}
        steps = [step for meter in meters for step in meter.steps]
        train_s, moves_s = sum(step.seconds for step in steps), sum(meter.moves_s for meter in meters)
        return Prediction(
            wall_s=wall_s,
            train_s=train_s,
            moves_s=moves_s,
            evaluation_s=wall_s - train_s - moves_s,
            bubble_share=sum(node.idle_share for node in nodes if node.node in hosting) / len(hosting),
            num_steps=plan.course.num_steps,
            num_actions=result.num_actions,
            nodes=nodes,
            links=self._links(wall_s),
            depths=_groups(plan, steps) if plan.course.method.full_parameters else _depths(steps),
            spans=tuple(span for meter in meters for span in meter.spans),
        )

    def _node(
        self,
        node: str,
        needs: MemoryEstimate,
        wall_s: float,
        measured: Sequence[tuple[Mapping[str, NodeMeter], Mapping[str, int]]],
    ) -> NodePrediction:
        busy_s, actions, peak_bytes = dict[Op, float](), 0, 0
        for meters, peaks in measured:
            if (meter := meters.get(node)) is None:
                continue
            actions += meter.actions
            peak_bytes = max(peak_bytes, peaks[node])
            for op, seconds in meter.busy_s.items():
                busy_s[op] = busy_s.get(op, 0.0) + seconds
        share = min(1.0, sum(busy_s.values()) / wall_s) if wall_s else 0.0  # sums round
        pieces = [placement.slice_of(node) for placement in self._plan.placements]
        texts = [text for text, _ in itertools.groupby(piece.text for piece in pieces)]
        return NodePrediction(
            node=node,
            start=pieces[0].start,
            stop=pieces[0].stop,
            blocks=" then ".join(texts),
            busy_s=sum(busy_s.values()),
            busy_share=share,
            idle_share=1.0 - share,
            busy_by_op_s={str(op): seconds for op, seconds in sorted(busy_s.items())},
            needed_bytes=needs.total_bytes,
            peak_memory_bytes=peak_bytes,
            budget_bytes=self._profile.by_name[node].memory_bytes,
            actions=actions,
        )

    def _links(self, wall_s: float) -> tuple[LinkPrediction, ...]:
        sent, busy_s, of_units = dict[_Pair, float](), dict[_Pair, float](), dict[_Pair, float]()
        for part in self._parts:
            for total, of_part in (
                (sent, part.links.sent_bytes),
                (busy_s, part.links.busy_s),
                (of_units, part.links.unit_gradient_bytes),
            ):
                for pair, number in of_part.items():
                    total[pair] = total.get(pair, 0.0) + number
        return tuple(
            LinkPrediction(
                source=source,
                target=target,
                sent_bytes=round(num_bytes),
                unit_gradient_bytes=round(of_units.get((source, target), 0.0)),
                busy_share=busy_s[source, target] / wall_s if wall_s else 0.0,
            )
            for (source, target), num_bytes in sorted(sent.items())
        )


def _depths(steps: Iterable[TimedStep]) -> tuple[DepthPrediction, ...]:
    seconds: dict[int, list[float]] = {}
    for step in steps:
        seconds.setdefault(step.depth, []).append(step.seconds)
    return tuple(_all_of(depth, passed) for depth, passed in sorted(seconds.items()))


def _groups(plan: Plan, steps: Iterable[TimedStep]) -> tuple[DepthPrediction, ...]:
    """Add up the steps of each group of units, from the lowest group to the highest."""
    seconds: dict[Units, list[float]] = {}
    for step in steps:
        seconds.setdefault(plan.course.method.trained(plan.course, step.step), []).append(step.seconds)
    return tuple(
        _all_of(len(units.blocks), passed, units_text(units))
        for units, passed in sorted(seconds.items(), key=lambda item: item[0].ranges)
    )


def _all_of(depth: int, passed: list[float], trains: str = "") -> DepthPrediction:
    wall_s = sum(passed)
    return DepthPrediction(depth=depth, steps=len(passed), wall_s=wall_s, step_s=wall_s / len(passed), trains=trains)
