"""What a plan would do on profiled nodes: wall time, who is busy, who waits, bytes and memory.

The run itself is the real one, engines and rounds included; only the seconds come from the profile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ringtune.costs.profile import Profile
from ringtune.costs.times.seconds import CourseCosts
from ringtune.errors import DeadlineError
from ringtune.schedule.actions import Action
from ringtune.schedule.operations.given import GivenTable
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint
from ringtune.schedule.units import Units, units_text
from sim.accounts.action_times import ProfileTimes, RecordedTimes
from sim.accounts.items import Items
from sim.accounts.memory_ledger import MemoryLedger
from sim.accounts.meter import Meter, NodeMeter
from sim.choosing import ExpectedTables
from sim.limits import memory_bounds
from sim.links import MeasuredLinks
from sim.ring import VirtualRing
from sim.virtual_node import NO_REST


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePrediction:
    """One node of a predicted run.

    Attributes:
        node: its name.
        start: first block that it hosts.
        stop: one past the last.
        busy_s: computing.
        busy_share: of the wall time.
        idle_share: the rest.
        busy_by_op_s: by the letter of the op.
        needed_bytes: what the plan reserves on it beside the libraries, as ``ringtune plan`` says.
        peak_memory_bytes: the most of it that it held at once on the virtual clock.
        budget_bytes: what it has.
        actions: compute actions.
    """

    node: str
    start: int
    stop: int
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
        depth: trainable blocks.
        steps: how many steps.
        wall_s: of all of them.
        step_s: of one, on average.
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
        evaluation_s: thereof evaluations, checkpoints, and items that gather scores.
        bubble_share: idle share of the hosts, mean.
        num_steps: optimizer steps.
        num_actions: compute actions of all nodes.
        nodes, links, depths: the parts.
        spans: (node, action, start_s, end_s) of everything, if it was asked for; not in the JSON form.
    """

    wall_s: float
    train_s: float
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
    *,
    optimizer: str = "adamw",
    dtype: str = "float32",
    samples: Iterable[tuple[str, Action, float]] | None = None,
    same_run: bool = False,
    start: StartPoint | None = None,
    embedding_bytes: float | None = None,
    control_latency_s: float = 0.0,
    keep_spans: bool = False,
    seed: int = 0,
    tables: Sequence[GivenTable] = (),
) -> Prediction:
    """Run ``plan`` on a virtual clock with the times of ``profile``.

    Args:
        plan: what to run.
        profile: nodes, and links if they take time.
        optimizer: of the job: its moments are memory, and travel with the head.
        dtype: of the computation.
        samples: (node, action, seconds) of a recorded run, to be replayed in place of medians.
        same_run: whether ``samples`` are of this very plan.
        start: where the run goes on; by default its very beginning.
        embedding_bytes: of an owner's table, where only the touched rows shall count.
        control_latency_s: of a word between a node and the coordinator.
        keep_spans: keep every action and message for a trace.
        seed: of draws from ``samples``.
        tables: that a run of the plan has chosen; where the plan's run chooses others, the expected one holds.

    Raises:
        PlanError: the profile lacks a node, a link or a time.
        DeadlineError: the virtual run does not end; says who waits for what.
    """
    facts = profile.by_name
    costs = CourseCosts.of(plan, profile, optimizer=optimizer)
    items = Items(costs)
    ledger = MemoryLedger(plan, facts, items, optimizer=optimizer, dtype=dtype, embedding_bytes=embedding_bytes)
    medians = ProfileTimes(costs, items, ledger.effect)
    times: ProfileTimes | RecordedTimes = medians
    if samples is not None:
        times = RecordedTimes(plan.course, samples, medians, items, same_run=same_run, seed=seed)
    links = MeasuredLinks(
        costs, profile, granted=items, control_latency_s=control_latency_s, slow_computing=samples is None
    )
    meter = Meter(plan.nodes, items, medians, ledger, keep_spans=keep_spans)
    ring = VirtualRing(
        plan,
        action_s=times,
        transport=links,
        observer=meter,
        start=start,
        record=False,
        chooser=ExpectedTables(plan, tables),
        wait_s=float("inf"),
        rest=costs.rest if samples is None else lambda node: NO_REST,
    )
    with _garbage_collection_paused():
        result = ring.run()
    if result.finish is None or result.finish.error:
        waits = "; ".join(f"node {node} {ring.waiting_for(node)}" for node in plan.nodes)
        raise DeadlineError(f"the virtual run of plan {plan.digest[:12]} does not end: {waits}; please report it")
    wall_s = result.wall_s
    measured, peaks = meter.nodes, ledger.peak_bytes
    needs = memory_bounds(plan, profile, optimizer=optimizer, dtype=dtype)
    memory = {node: (needs[node].total_bytes, peaks[node]) for node in plan.nodes}
    nodes = tuple(_node(plan, profile, node, measured[node], memory[node], wall_s) for node in plan.nodes)
    hosts = [node for node in nodes if node.stop > node.start]
    return Prediction(
        wall_s=wall_s,
        train_s=sum(meter.depth_s.values()),
        evaluation_s=wall_s - sum(meter.depth_s.values()),
        bubble_share=sum(node.idle_share for node in hosts) / len(hosts),
        num_steps=plan.course.num_steps,
        num_actions=result.num_actions,
        nodes=nodes,
        links=tuple(
            LinkPrediction(
                source=source,
                target=target,
                sent_bytes=round(num_bytes),
                unit_gradient_bytes=round(links.unit_gradient_bytes.get((source, target), 0.0)),
                busy_share=links.busy_s.get((source, target), 0.0) / wall_s if wall_s else 0.0,
            )
            for (source, target), num_bytes in sorted(links.sent_bytes.items())
        ),
        depths=_groups(plan, meter) if plan.course.method.full_parameters else _depths(meter),
        spans=tuple(meter.spans),
    )


def _depths(meter: Meter) -> tuple[DepthPrediction, ...]:
    return tuple(
        DepthPrediction(depth=depth, steps=count, wall_s=meter.depth_s[depth], step_s=meter.depth_s[depth] / count)
        for depth, count in sorted(meter.depth_steps.items())
    )


def _groups(plan: Plan, meter: Meter) -> tuple[DepthPrediction, ...]:
    """Add up the steps of each group of units, from the lowest group to the highest."""
    seconds: dict[Units, list[float]] = {}
    for step, passed_s in meter.step_s.items():
        seconds.setdefault(plan.course.method.trained(plan.course, step), []).append(passed_s)
    return tuple(
        DepthPrediction(
            depth=len(units.blocks),
            steps=len(passed),
            wall_s=sum(passed),
            step_s=sum(passed) / len(passed),
            trains=units_text(units),
        )
        for units, passed in sorted(seconds.items(), key=lambda item: item[0].ranges)
    )


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause the collector of reference cycles: a run makes none, and searching for some took a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _node(
    plan: Plan, profile: Profile, node: str, measured: NodeMeter, memory_bytes: tuple[int, int], wall_s: float
) -> NodePrediction:
    piece = plan.slice_of(node)
    busy_s = sum(measured.busy_s.values())
    share = busy_s / wall_s if wall_s else 0.0
    return NodePrediction(
        node=node,
        start=piece.start,
        stop=piece.stop,
        busy_s=busy_s,
        busy_share=share,
        idle_share=1.0 - share,
        busy_by_op_s={str(op): seconds for op, seconds in sorted(measured.busy_s.items())},
        needed_bytes=memory_bytes[0],
        peak_memory_bytes=memory_bytes[1],
        budget_bytes=profile.by_name[node].memory_bytes,
        actions=measured.actions,
    )
