"""Feeds of events for the page: a run's folder, a stored run of a coordinator, and a coordinator itself.

A folder gives the same page as the events that wrote it. The actions of the last step are read from the end of its
``trace.json``.

For a stored run a thread follows past and future events, at most ``MAX_AHEAD`` ahead of the page, so that a long run is
never all in memory. Result files and the trace are left out: this page lacks the actions of the last step.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from coordinator.client.saved_run import read_place, read_report, read_run_file
from coordinator.run.trace import Activity
from coordinator.server.coordinator import Coordinator
from coordinator.web.streams import MemberStatus, PageData
from ringtune.engine.events import Span
from ringtune.errors import IntegrityError, RingTuneError, UsageError
from ringtune.job.job import read_job_text
from ringtune.schedule.actions import Op
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn
from ringtune.storage.strict import parse_json
from ringtune.v1 import control_pb2
from sim.recorded_run import span_of

MAX_TRACE_BYTES: Final = 32 << 20
"""Bytes that are read from the end of a trace: some 150,000 actions."""
_MAX_LINE: Final = 8 << 20


class FolderFeed:
    """Events from a run's folder.

    Args:
        folder: the ``--out`` of a ``ringtune train``.

    Raises:
        UsageError: there is no run in it.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is no folder: the run is gone, or never was there; give a run's --out, or an id"
            )
        if not (folder / "plan.json").is_file():
            raise UsageError(f"{folder} has no plan.json, so no run was begun there; give a run's --out")
        self._folder = folder
        self._lines_read = 0
        self._plan_seen = (0, 0)
        self._has_begun = self._is_over = self._is_gone = False
        self._problem = ""

    def __call__(self) -> Iterator[control_pb2.RunEvent]:
        """Yield the events since the last call; once the folder can't be read, a note and then nothing.

        A file that is damaged, or not yet copied whole, is told once and read again at the next call.
        """
        if self._is_gone:
            return
        try:
            yield from self._news()
        except OSError as error:
            self._is_gone = True
            told = f"no further updates: {self._folder} can't be read any more ({error.strerror})"
            yield control_pb2.RunEvent(note=told)
        except RingTuneError as error:
            if self._problem != str(error):
                self._problem = str(error)
                yield control_pb2.RunEvent(note=self._problem)

    def _news(self) -> Iterator[control_pb2.RunEvent]:
        if not self._has_begun or self._has_rewound():
            yield from [*self._head()]
            self._has_begun, self._lines_read, self._plan_seen = True, 0, (0, 0)
        yield from self._plan()
        yield from self._metrics()
        if not self._is_over and (self._folder / "report.json").is_file():
            yield from [*self._end()]
            self._is_over = True

    def _head(self) -> Iterator[control_pb2.RunEvent]:
        place = read_place(self._folder)
        yield control_pb2.RunEvent(run_id=place.run_id if place else self._folder.resolve().name)
        if (job := self._folder / "job.toml").is_file():
            yield control_pb2.RunEvent(job_toml=read_job_text(job))
        if (profile := self._folder / "profile.json").is_file():
            yield control_pb2.RunEvent(profile_json=json.dumps(read_run_file(profile)))
        if not (self._folder / "report.json").is_file():
            yield control_pb2.RunEvent(state="not finished")

    def _plan(self) -> Iterator[control_pb2.RunEvent]:
        facts = (self._folder / "plan.json").stat()
        if (seen := (facts.st_mtime_ns, facts.st_size)) != self._plan_seen:
            plan = Plan.from_json(read_run_file(self._folder / "plan.json"))
            self._plan_seen = seen
            yield control_pb2.RunEvent(plan_json=json.dumps(plan.to_json()))

    def _has_rewound(self) -> bool:
        """Whether a resume has cut ``metrics.jsonl`` at a checkpoint, so that the run is shown from its beginning."""
        path = self._folder / "metrics.jsonl"
        return path.is_file() and path.stat().st_size < self._lines_read

    def _metrics(self) -> Iterator[control_pb2.RunEvent]:
        path = self._folder / "metrics.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._lines_read)
            while (line := file.readline(_MAX_LINE)).endswith(b"\n"):
                self._lines_read += len(line)
                yield control_pb2.RunEvent(metrics_json=line.decode("utf-8", "replace"))

    def _end(self) -> Iterator[control_pb2.RunEvent]:
        report = read_report(self._folder)
        if (activity := self._activity()) is not None:
            yield control_pb2.RunEvent(activity_json=json.dumps(activity))
        yield control_pb2.RunEvent(report_json=json.dumps(report))
        yield control_pb2.RunEvent(done=True)

    def _activity(self) -> dict[str, Any] | None:
        plan = Plan.from_json(read_run_file(self._folder / "plan.json"))
        trace = self._folder / "trace.json"
        if not trace.is_file():
            return None
        try:
            spans = list(trace_tail(trace, plan.course.num_blocks))
        except RingTuneError:  # of another version: then the page has no chart of the last step
            return None
        updated = [span.action.seq for _, span in spans if span.action.op is Op.UPDATE]
        if not updated:
            return None
        return activity_of(spans, max(updated), plan.course.num_steps, plan.nodes)


def activity_of(
    spans: list[tuple[str, Span]], last_seq: int, step: int, nodes: tuple[str, ...]
) -> dict[str, Any] | None:
    """Sum up the activity of nodes in the items of a trace, as if they were one turn that ends with ``last_seq``."""
    first_seq = min(span.action.seq for _, span in spans)
    turn = Turn(
        index=0,
        kind=StepKind.TRAIN,
        owner=next((node for node, span in spans if span.action.seq == last_seq and span.action.op is Op.HEAD), ""),
        round=0,
        first_seq=first_seq,
        first_step=max(0, step - (last_seq + 1 - first_seq)),
        num_items=last_seq + 1 - first_seq,
        first_batch=0,
    )
    kept = Activity()
    kept.granted([turn])
    for node, span in spans:
        kept.add(node, [span])
    activity = kept.turn_done(turn, nodes)
    return {**activity, "step": step} if activity else None


def trace_tail(path: Path, num_blocks: int) -> Iterator[tuple[str, Span]]:
    """Yield (node, span) from the end of a ``trace.json``, which has one event per line.

    Raises:
        IntegrityError: the names of the nodes, at its beginning, or the times of an action are not readable.
        PlanError: an action is unknown.
    """
    with path.open("rb") as file:
        names = _names(file)
        size = path.stat().st_size
        if size > MAX_TRACE_BYTES:
            file.seek(size - MAX_TRACE_BYTES)
            file.readline(_MAX_LINE)
        else:
            file.seek(0)
        while line := file.readline(_MAX_LINE):
            event = _event(line)
            if event.get("ph") == "X" and isinstance(event.get("args"), dict) and "action" in event["args"]:
                node, action, start_s, end_s = span_of(event, names, num_blocks, str(path))
                yield node, Span(action, start_s, end_s)


def _names(file: BinaryIO) -> dict[int, str]:
    file.readline(_MAX_LINE)
    nodes_by_process: dict[int, str] = {}
    while (event := _event(file.readline(_MAX_LINE))).get("ph") == "M":
        if event.get("name") == "process_name":
            try:
                nodes_by_process[int(event["pid"])] = str(event["args"]["name"])
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise IntegrityError("the trace has a node without a name; copy the run's folder again") from error
    if not nodes_by_process:
        raise IntegrityError("the trace names no node; copy the run's folder again")
    return nodes_by_process


def _event(line: bytes) -> dict[str, Any]:
    text = line.strip().strip(b",")
    if not text.startswith(b"{"):
        return {}
    try:
        value = parse_json(text)
    except ValueError:  # the head of the file, or its torn end
        return {}
    return value if isinstance(value, dict) else {}


MAX_AHEAD: Final = 20_000
"""Limit of queued events for the page."""
_LOOK_S: Final = 0.2
_END_S: Final = 2.0


class RunFeed:
    """Events of a stored run; ``events`` asks a coordinator for past and future ones, without files."""

    def __init__(self, events: Callable[[], Iterable[control_pb2.RunEvent]]) -> None:
        self._events = events
        self._came: queue.Queue[control_pb2.RunEvent] = queue.Queue(MAX_AHEAD)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="page-events", daemon=True)

    def __enter__(self) -> RunFeed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join(_END_S)

    def __call__(self) -> Iterator[control_pb2.RunEvent]:
        """Yield the events since the last call."""
        with contextlib.suppress(queue.Empty):
            for _ in range(MAX_AHEAD):
                yield self._came.get_nowait()

    def _follow(self) -> None:
        has_begun = False
        try:
            for event in self._events():
                if event.WhichOneof("event") == "run_id":
                    if has_begun:
                        continue  # of a run that took it up: one page shows all of it
                    has_begun = True
                if not self._put(event):
                    return
        except RingTuneError as error:
            self._put(control_pb2.RunEvent(note=f"no further updates: {error}"))

    def _put(self, event: control_pb2.RunEvent) -> bool:
        while not self._left.is_set():
            with contextlib.suppress(queue.Full):
                self._came.put(event, timeout=_LOOK_S)
                return True
        return False


def watch(coordinator: Coordinator) -> PageData:
    """Connect a page to a coordinator; runs that began before are not shown."""

    def members() -> dict[str, MemberStatus]:
        return {
            member.node: MemberStatus(state, member.rss_bytes, member.memory_bytes, member.device)
            for member, state, _ in coordinator.members()
        }

    watching = PageData(members=members)
    coordinator.onlookers.append(watching.hear)
    return watching
