"""The state of the page for one run, folded from the run's events: of bounded size, however long the run is.

The state has *sections* (run, plan, nodes, links, ...), JSON-able values with versions that count their changes, and
curves. A reader needs only the sections with another version than its own.

A curve keeps a bounded number of its points: of each bucket of steps the lowest and the highest::

    steps    0 1 2 3 | 4 5 6 7 | 8 9 ...        all buckets have the same width in steps
    values   5 3 4 2 | 9 1 2 2 |
    points   (0,5) (3,2)   (4,9) (5,1)          each is a point of the curve; a spike is never lost

With too many buckets neighbours are merged and the width doubles, so a point costs constant time on average. Points of
all buckets but the last are settled: a reader needs only later points, until ``generation`` changes.

A line of ``metrics.jsonl`` arrives when all nodes have done its turn. Until then the owners' reports of its steps are
the end of the curve.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from coordinator.planner.make_plan import plan_memory
from coordinator.run.run_text import LastStep, figures_text, is_step, placement_number, shown, trained_at
from ringtune.costs.profile import Profile
from ringtune.errors import PeerLostError, RingTuneError
from ringtune.job.job import Job, parse_job
from ringtune.quantities import format_seconds
from ringtune.schedule.plan import Plan
from ringtune.schedule.versions import ever_trained
from ringtune.storage.strict import read_object
from ringtune.techniques import DECISION_LINES
from ringtune.texts import printable
from ringtune.v1 import control_pb2

MAX_BUCKETS: Final = 512


class Point(NamedTuple):
    """The value of a curve at a step."""

    step: int
    value: float


class _Bucket(NamedTuple):
    place: int
    low: Point
    high: Point

    def with_point(self, point: Point) -> _Bucket:
        low = point if point.value < self.low.value else self.low
        high = point if point.value > self.high.value else self.high
        return _Bucket(self.place, low, high)

    @property
    def points(self) -> list[Point]:
        return [self.low] if self.low == self.high else sorted((self.low, self.high))


class ThinCurve:
    """A curve with a bounded number of points, two for each bucket.

    Attributes:
        generation: number of changes of settled points.
        last: the newest point, which is always shown.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._most = max_buckets
        self._width = 1
        self._buckets: list[_Bucket] = []
        self._settled: list[Point] = []
        self.generation = 0
        self.last: Point | None = None

    def add(self, step: int, value: float) -> None:
        """Add a point; a step not above the last one first drops the points from that step on."""
        if self.last is not None and step <= self.last.step:
            self.cut(step - 1)
        point, place = Point(step, value), step // self._width
        self.last = point
        if self._buckets and self._buckets[-1].place == place:
            self._buckets[-1] = self._buckets[-1].with_point(point)
            return
        if self._buckets:
            self._settled += self._buckets[-1].points
        self._buckets.append(_Bucket(place, point, point))
        if len(self._buckets) > self._most:
            self._merge()

    def cut(self, last_step: int) -> None:
        """Drop the points after ``last_step``."""
        self._buckets = [
            _Bucket(bucket.place, min(points, key=_value), max(points, key=_value))
            for bucket in self._buckets
            if (points := [point for point in bucket.points if point.step <= last_step])
        ]
        kept = [point for bucket in self._buckets for point in bucket.points]
        self.last = kept[-1] if kept else None
        self._settle()

    def settled(self, start: int = 0) -> list[Point]:
        """List the points that stay until ``generation`` changes, from index ``start`` on."""
        return self._settled[start:]

    def unsettled(self) -> list[Point]:
        """List the points that a later one may replace: those of the last bucket, and the newest."""
        points = self._buckets[-1].points if self._buckets else []
        return points if self.last is None or self.last in points else [*points, self.last]

    def points(self) -> list[Point]:
        """List all points in the order of their steps."""
        return [*self._settled, *self.unsettled()]

    def _merge(self) -> None:
        self._width *= 2
        merged: list[_Bucket] = []
        for bucket in self._buckets:
            place = bucket.place // 2
            if merged and merged[-1].place == place:
                merged[-1] = merged[-1].with_point(bucket.low).with_point(bucket.high)
            else:
                merged.append(bucket._replace(place=place))
        self._buckets = merged
        self._settle()

    def _settle(self) -> None:
        self._settled = [point for bucket in self._buckets[:-1] for point in bucket.points]
        self.generation += 1


def _value(point: Point) -> float:
    return point.value


MAX_LINKS: Final = 2000
_MAX_KEPT: Final = 20_000


class LinkTable:
    """Bytes of each directed link, named ``source>target`` as in ``metrics.jsonl``."""

    def __init__(self) -> None:
        self.total_bytes: dict[str, int] = {}
        self._last: Mapping[str, int] = {}

    def take(self, sent: Mapping[str, Any]) -> None:
        """Add the bytes of one step; raises ``ValueError`` if they are none."""
        counts = {link: int(count) for link, count in sent.items()}
        if not all(0 <= count < 1 << 62 for count in counts.values()):
            raise ValueError("bytes of a link are out of range")
        self._last = counts
        for link, count in counts.items():
            if link in self.total_bytes or len(self.total_bytes) < _MAX_KEPT:
                self.total_bytes[link] = self.total_bytes.get(link, 0) + count

    def view(self, profile: Profile | None) -> list[list[Any]]:
        """List the links with the most bytes; ``profile`` has the measured rates.

        Returns:
            ``[source, target, bytes so far, bytes of the newest step, bytes per second]``; None = no rate.
        """
        rates = {(link.source, link.target): link.rate_bytes_per_s for link in profile.links} if profile else {}
        most = sorted(self.total_bytes.items(), key=lambda entry: (-entry[1], entry[0]))[:MAX_LINKS]
        rows = []
        for link, total in most:
            source, _, target = link.partition(">")
            rows.append([source, target, total, self._last.get(link, 0), rates.get((source, target))])
        return rows


def plan_view(
    plan: Plan, placement_number: int, profile: Profile | None, needed_bytes: Mapping[str, int]
) -> dict[str, Any]:
    """Make the ``plan`` section of the page; ``needed_bytes`` are the known needs of nodes."""
    course, part = plan.course, plan.at(placement_number)
    budgets = {node.node: node.memory_bytes for node in profile.nodes} if profile else {}
    helps = {helper.node: part.placement.host_of(helper.start) for helper in part.placement.joined_helpers()}
    nodes = []
    for name in plan.nodes:
        piece, owner = part.slice_of(name), course.owner(name)
        nodes.append(
            {
                "node": name,
                "start": piece.start,
                "stop": piece.stop,
                "rows": owner.train_rows if owner else 0,
                "owner": owner is not None,
                "helps": helps.get(name, ""),
                "needed_bytes": needed_bytes.get(name, 0),
                "budget_bytes": budgets.get(name, 0),
            }
        )
    return {
        "digest": plan.digest[:12],
        "method": course.method.name,
        "num_blocks": course.num_blocks,
        "num_steps": course.num_steps,
        "batch_size": course.batch_size,
        "microbatches": course.microbatches,
        "wire_dtype": course.wire_dtype,
        "placement_number": part.placement.placement_number,
        "private_blocks": part.placement.private_blocks,
        "ever_trained": [list(units) for units in ever_trained(course).ranges],
        "nodes": nodes,
    }


def trained_view(plan: Plan, step: int, depth: int) -> list[list[int]]:
    """List the trained units of a step (from 1) as half-open ranges; the head is unit ``num_blocks``.

    ``depth`` counts where the top of the model trains.
    """
    return [list(units) for units in trained_at(plan.course, max(0, step - 1), depth).ranges]


class EventLine(NamedTuple):
    """A line in the list of events.

    Attributes:
        kind: joined, lost, move, checkpoint, unfreeze, evaluation, note, phase, failed or done.
        text: for people.
        at_unix_s: when it arrived; None = not known.
    """

    kind: str
    text: str
    at_unix_s: float | None = None


def metrics_event(line: Mapping[str, Any]) -> EventLine | None:
    """Make the line for an entry of ``metrics.jsonl``; None for steps and unknown kinds."""
    match line.get("kind"):
        case "unfreeze":
            return EventLine("unfreeze", f"from step {shown(int(line['step']))} on {line['depth']} blocks train")
        case "evaluation":
            best = " (the best so far)" if line.get("is_best") else ""
            told = figures_text(line) if line.get("count") else "no rows"
            return EventLine("evaluation", f"evaluated after step {line['step']}: {told}{best}")
        case "stop":
            told = f"ends early after step {line['step']}: no better evaluation since step {line.get('best_step')}"
            return EventLine("note", told)
        case "move":
            return EventLine("move", _move(line))
        case "replan":
            return EventLine("move", f"another placement is better from step {shown(int(line['step']))} on")
        case "recovery":
            return EventLine("lost" if line.get("lost") else "move", _recovery(line))
        case "node_error":
            return EventLine("lost", str(line.get("message")))
    decision = DECISION_LINES.get(str(line.get("kind")))
    return None if decision is None else EventLine("note", decision.page(line))


def _move(line: Mapping[str, Any]) -> str:
    if problem := line.get("problem"):
        return f"stays on placement {placement_number(line)} after step {line['step']}: {problem}"
    return f"moved to placement {line.get('to')} after step {line['step']}, in {format_seconds(float(line['seconds']))}"


def _recovery(line: Mapping[str, Any]) -> str:
    lost = ", ".join(map(str, line.get("lost", ())))
    back = f"continues from step {line['step']}, after {format_seconds(float(line['seconds']))}"
    if there := ", ".join(map(str, line.get("back", ()))):
        return f"node {lost} was lost, and {there} is back; the run {back}"
    if lost:
        return f"node {lost} is lost; the run {back}"
    if there := ", ".join(map(str, line.get("returned", ()))):
        return f"node {there} is back, and its rows are trained again; the run {back}"
    if link := line.get("link"):
        return f"{link}; both nodes live, and the run {back}"
    return f"step {line.get('bad_step')} was not finite; the run {back}"


MAX_EVENTS: Final = 200
MAX_MARKS: Final = 256
CURVES: Final = ("loss", "accuracy", "eval_loss", "eval_accuracy", "seconds")
SECTIONS: Final = ("run", "plan", "trains", "nodes", "links", "gantt", "events", "marks", "members")
_MAX_AHEAD: Final = 4096
_FIGURES: Final = ("step", "round", "initiator", "depth", "trains", "loss", "accuracy", "lr", "seconds")
_NAMED: Final = re.compile(r"\bnode ([a-z0-9][a-z0-9._-]{0,62})")


class PageState:
    """The state of the newest run, and of the members, which are there without a run.

    Attributes:
        run_id: empty before the first run.
        curves: by the names in ``CURVES``; ``seconds`` is cumulative over steps.
        ahead: step -> loss and accuracy, in a turn that is not done.
    """

    def __init__(self) -> None:
        self.versions = dict.fromkeys(SECTIONS, 0)
        self._events: deque[EventLine] = deque(maxlen=MAX_EVENTS)
        self._members: Mapping[str, Any] = {}
        self._begin("")

    def _begin(self, run_id: str) -> None:
        self.run_id = run_id
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.job: Job | None = None
        self.curves = {name: ThinCurve() for name in CURVES}
        self.ahead: dict[int, tuple[float | None, float | None]] = {}
        self.links = LinkTable()
        self.shares: dict[str, list[float]] = {}
        self.lost: set[str] = set()
        self.peaks: dict[str, int] = {}
        self._run: dict[str, Any] = {"id": run_id, "phase": "waiting for a run" if not run_id else "joining"}
        self._last = LastStep()
        self._placement_number = 0
        self._plan_view: dict[str, Any] = {}
        self._trains: list[list[int]] = []
        self._gantt: dict[str, Any] = {}
        self._marks: list[tuple[int, int]] = []
        self._depth = 0
        self._step_seconds_s, self._settled = 0.0, 0
        for name in SECTIONS:
            self.versions[name] += 1

    # ---- reading ----------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Number of the last reported step."""
        return int(self._last.line.get("step", 0))

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return bool(self._run.get("is_over"))

    def section(self, name: str) -> Any:
        """Return the JSON-able value of a section; it must not be changed."""
        match name:
            case "run":
                return self._run
            case "plan":
                return self._plan_view
            case "trains":
                return self._trains
            case "nodes":
                names = self.plan.nodes if self.plan else ()
                return {node: self._node(node) for node in names}
            case "links":
                return self.links.view(self.profile)
            case "gantt":
                return self._gantt
            case "events":
                return [list(event) for event in self._events]
            case "members":
                return self._members
            case _:
                return [list(mark) for mark in self._marks]

    def _node(self, node: str) -> dict[str, Any]:
        facts: dict[str, Any] = {"lost": node in self.lost}
        if node in self.shares:
            facts["shares"] = self.shares[node]
        if node in self.peaks:
            facts["peak_bytes"] = self.peaks[node]
        return facts

    # ---- folding ----------------------------------------------------------------------------------

    def take(self, event: control_pb2.RunEvent, at_unix_s: float | None) -> None:
        """Fold one event; ``run_id`` begins another run. ``at_unix_s`` is the arrival, None = unknown.

        Raises:
            RingTuneError: the event is not readable.
        """
        match event.WhichOneof("event"):
            case "run_id":
                self._begin(event.run_id)
                self._change(begun_unix_s=at_unix_s)
                self.tell(EventLine("phase", f"run {event.run_id} begins", at_unix_s))
            case "state":
                self._change(phase=event.state)
                self.tell(EventLine("phase", event.state, at_unix_s))
            case "job_toml":
                self.job = parse_job(event.job_toml, source="the run's job")
                model = self.job.model
                self._change(model=printable(model.path.rstrip("/").rpartition("/")[2], most=80), task=model.task)
            case "profile_json":
                self.profile = Profile.from_json(read_object(event.profile_json, "the profile"))
                self._show_plan()
            case "plan_json":
                self.plan = Plan.from_json(read_object(event.plan_json, "the plan"))
                self._show_plan()
            case "metrics_json":
                self._take_line(read_object(event.metrics_json, "a line of metrics"), at_unix_s)
            case "step_json":
                self._take_progress(read_object(event.step_json, "a step"))
            case "activity_json":
                value = read_object(event.activity_json, "an activity")
                self.shares = dict(value["nodes"])
                self._gantt = {name: value[name] for name in ("step", "initiator", "spans", "left_out")}
                self._gantt["waits"] = value.get("waits", {})
                self._touch("nodes", "gantt")
            case "report_json":
                self._take_report(read_object(event.report_json, "the report"))
            case "checkpoint_json":
                step = read_object(event.checkpoint_json, "a checkpoint").get("step")
                self.tell(EventLine("checkpoint", f"saved after step {step}", at_unix_s))
            case "resumed_json":
                step = int(read_object(event.resumed_json, "the step where the run continues").get("step", 0))
                if self.plan is not None:
                    self._placement_number = self.plan.after(step).placement.placement_number
                    self._show_plan()
                self.tell(EventLine("note", f"goes on after step {step}", at_unix_s))
            case "note":
                self.tell(EventLine("note", event.note, at_unix_s))
            case "failure":
                self._fail(event.failure, at_unix_s)
            case "done":
                self._change(phase="done", is_over=True, ended_unix_s=at_unix_s)
                self.tell(EventLine("done", "the run is done", at_unix_s))

    def tell(self, line: EventLine) -> None:
        """Add a line to the list of events."""
        self._events.append(line._replace(text=printable(line.text, most=600)))
        self._touch("events")

    def show_members(self, members: Mapping[str, Any]) -> None:
        """Show other members, JSON-able values by node."""
        self._members = members
        self._touch("members")

    def _touch(self, *names: str) -> None:
        for name in names:
            self.versions[name] += 1

    def _change(self, **values: Any) -> None:
        """Change values of the run."""
        self._run = {**self._run, **values}
        self._touch("run")

    def _show_plan(self) -> None:
        if self.plan is None:
            return
        needed: dict[str, int] = {}
        if self.profile is not None and self.job is not None:
            with suppress(RingTuneError, KeyError):  # of an older version, or of other nodes: then it is not shown
                memory = plan_memory(self.job, self.plan, self.profile.by_name)
                needed = {node: estimate.total_bytes for node, estimate in memory.items()}
        if self._placement_number not in {placement.placement_number for placement in self.plan.placements}:
            self._placement_number = self.plan.placement.placement_number
        self._plan_view = plan_view(self.plan, self._placement_number, self.profile, needed)
        self._touch("plan", "nodes", "links")
        self._change(num_steps=self.plan.course.num_steps)

    def _take_progress(self, line: Mapping[str, Any]) -> None:
        """Show a step as soon as its owner has reported it."""
        kind = line.get("kind")
        if kind in ("evaluate", "generate", "score"):
            self._change(doing=f"{kind} {line.get('batch')}/{line.get('batches')}")
        if kind == "train":
            if self._last.take(line):
                self._show_step(line)
            self.ahead[int(line["step"])] = (_number(line.get("loss")), _number(line.get("accuracy")))
            while len(self.ahead) > _MAX_AHEAD:
                del self.ahead[min(self.ahead)]

    def _show_step(self, line: Mapping[str, Any]) -> None:
        shown = {name: line[name] for name in _FIGURES if name in line}
        self._change(last={**self._run.get("last", {}), **shown}, doing="")
        depth = int(line.get("depth", 0))
        trains = trained_view(self.plan, int(line["step"]), depth) if self.plan else []
        if trains != self._trains:
            self._trains = trains
            self._touch("trains")

    def _take_line(self, line: Mapping[str, Any], at_unix_s: float | None) -> None:
        """Take a line of ``metrics.jsonl``: a step is settled, anything else is an event."""
        if is_step(line):
            self._settle(line)
            return
        if (told := metrics_event(line)) is not None:
            self.tell(told._replace(at_unix_s=at_unix_s))
        match line.get("kind"):
            case "evaluation":
                step = int(line.get("step", 0))
                for name in ("loss", "accuracy"):
                    if (value := _number(line.get(name))) is not None:
                        self.curves[f"eval_{name}"].add(step, value)
                self._change(evaluation=_judged(line) | {"risen": line.get("risen")})
            case "recovery":
                self._rewind(line)
            case "move":
                self._placement_number = placement_number(line, self._placement_number)
                self._show_plan()
                if self.plan and not line.get("problem"):
                    self.lost -= set(self.plan.at(self._placement_number).nodes)

    def _rewind(self, line: Mapping[str, Any]) -> None:
        step = int(line.get("step", 0))
        self.ahead = {at: value for at, value in self.ahead.items() if at <= step}
        self._last = LastStep()
        back = {str(node) for key in ("back", "returned") for node in line.get(key, ())}
        self.lost = (self.lost | set(map(str, line.get("lost", ())))) - back
        self._placement_number = placement_number(line, self._placement_number)
        self._show_plan()

    def _settle(self, line: Mapping[str, Any]) -> None:
        step, depth = int(line["step"]), int(line.get("depth", 0))
        is_new = step > self._settled
        if not is_new:  # the run went back, or its books are read anew
            before = [point.value for point in self.curves["seconds"].points() if point.step < step]
            self._step_seconds_s = before[-1] if before else 0.0
        self._settled = max(self._settled, step)
        if self._last.take({"kind": "train", **line, "step": step}):
            self._show_step({**line, "step": step})
        for name in ("loss", "accuracy"):
            if (value := _number(line.get(name))) is not None:
                self.curves[name].add(step, value)
        seconds = _number(line.get("seconds")) or 0.0
        self._step_seconds_s += seconds
        self.curves["seconds"].add(step, self._step_seconds_s)
        self.ahead.pop(step, None)
        if is_new:
            self.links.take(line.get("bytes", {}))
        if depth != self._depth:
            self._depth = depth
            self._marks.append((step, depth))
            self._marks = self._marks if len(self._marks) <= MAX_MARKS else self._marks[::2]
            self._touch("marks")
        self._change(last={**self._run.get("last", {}), "seconds": seconds}, steps_s=self._step_seconds_s)
        self._touch("links")

    def _take_report(self, report: Mapping[str, Any]) -> None:
        nodes = report.get("nodes", {})
        self.peaks = {
            node: int(
                totals.get("peak_device_bytes") or totals.get("peak_rss_bytes") or 0
            )  # where the plan's needs lie
            for node, totals in nodes.items()
            if isinstance(totals, dict)
        }
        self._change(wall_s=report.get("wall_s"), predicted_steps_s=report.get("predicted_steps_s"))
        if (judged := report.get("eval", {})).get("step") is not None:  # of the best one, where that is the result
            self._change(evaluation=_judged(judged) | {"risen": report.get("risen"), "is_result": True})
        self._touch("nodes")

    def _fail(self, failure: control_pb2.RunFailure, at_unix_s: float | None) -> None:
        message = failure.message
        self._change(phase="failed", is_over=True, message=printable(message), ended_unix_s=at_unix_s)
        self.tell(EventLine("failed", message, at_unix_s))
        match = _NAMED.search(message) if failure.error == PeerLostError.__name__ else None
        if match and self.plan and match[1] in self.plan.nodes:
            self.lost.add(match[1])
            self._touch("nodes")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _judged(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation that the page shows."""
    shown = {name: figures.get(name) for name in ("step", "loss", "accuracy", "count")}
    return shown | ({"mae": figures["mae"]} if "mae" in figures else {})
