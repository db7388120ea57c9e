"""Reports of a node's run to the coordinator: events, totals, the engine's recording, and the shared clock.

The compute thread appends to a queue; one thread sends its entries as a ``ReportRequest`` at least every
``interval_s``, and at once after the end of a turn or a failure. A report without answer is retried under its old
number, because it may have arrived.

A recording is JSON lines: first the arguments of the engine, then each event with the time of its handling (monotonic
seconds) and its commands, or an operation table, which later turns name by its digest::

    {"recording": 1, "node": "node-1", "plan_digest": "6f...", "wait_s": 300.0}
    {"now_s": 12.25, "event": ["HeadArrived", 2, "node-0"], "commands": [["AcceptHead", 2, "node-0"]]}
    {"table": {"subnets": 1, "batches": [...]}, "digest": "ab..."}

The events, fed to a new engine, must give the same commands (``tests.support.replay``); a difference is a hidden input.

The coordinator's clock is known from round trips, not from the node's wall clock. A comparison is off by at most half a
round trip, and the clocks drift apart afterwards. The comparison with the smallest bound by now counts::

    node         sent            received      read in the middle, +- half the round trip
    coordinator        their time

Source: the clock filter of NTP (RFC 5905, section 10).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from ringtune.engine import events as ev
from ringtune.engine.events import Handled, Span
from ringtune.errors import BusyError, IntegrityError, internal_error
from ringtune.machine.resources import machine_load
from ringtune.run_control.checkpoint import Shard
from ringtune.schedule.actions import Op, format_action
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn
from ringtune.transport.codecs import numbers_to_proto
from ringtune.transport.retry import is_silence
from ringtune.transport.status import error_of_call
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.5
_IDLE_S = 60.0
# Entries of one report; keeps a message far below the limit of a channel.
_MAX_ENTRIES = 4096
_MAX_LONG_BYTES = 1 << 20


class StepDone(NamedTuple):
    """Loss and counts of a finished item of this owner."""

    report: ev.ReportStep
    at_s: float


class TurnDone(NamedTuple):
    """All actions of a turn at this node are done."""

    turn: int


class Scored(NamedTuple):
    """Scores of one block for the micro-batches of one batch in a score turn."""

    message: control_pb2.SubnetScores


class ShardSaved(NamedTuple):
    """This node's shard of a checkpoint is on its disk; ``digests`` are of the blocks in it, and of the head."""

    turn: int
    step: int
    shard: Shard
    digests: Mapping[int, str]


class CopyCompared(NamedTuple):
    """Digest of this owner's copy of a unit after its last update in a turn; put before ``TurnDone``."""

    turn: int
    unit: int
    sha256: str


class CopySent(NamedTuple):
    """Digest of a unit that this node gave another one to keep at the end of a turn; put before ``TurnDone``."""

    turn: int
    unit: int
    sha256: str


class AuditTrail(NamedTuple):
    """Digests, as JSON, of what this node did in a turn, and a signature; put before ``TurnDone``."""

    turn: int
    digests_json: str
    signature: bytes = b""
    certificate_pem: bytes = b""


class TechniqueFailed(NamedTuple):
    """This node continues without a technique; put before ``TurnDone`` of that turn."""

    problem: str


class Note(NamedTuple):
    """A sentence for the user; the run continues."""

    text: str


class Sent(NamedTuple):
    """A tensor or head was queued for a peer; ``num_bytes`` of payload."""

    seq: int
    target: str
    payload: str
    num_bytes: int


class Arrived(NamedTuple):
    """A received message: payload bytes, and seconds since its sending or since the message before it.

    ``at_unix_s`` is its arrival on the coordinator's clock.
    """

    source: str
    num_bytes: int
    seconds: float
    at_unix_s: float


class HeaderLine(NamedTuple):
    """A line of the recording without an event."""

    line: str


class Failed(NamedTuple):
    """The run can't continue at this node."""

    error: str
    message: str
    lost_peer: str


class Flushed(NamedTuple):
    """A mark in the queue; ``event`` is set once every entry before the mark is sent."""

    event: threading.Event


Entry = (
    StepDone
    | TurnDone
    | Scored
    | CopyCompared
    | CopySent
    | AuditTrail
    | TechniqueFailed
    | Note
    | ShardSaved
    | Sent
    | Arrived
    | Span
    | Handled
    | HeaderLine
    | Failed
    | Flushed
)


class Reporter:
    """Sends a node's reports of one run.

    Args:
        on_refused: called once, on the reporter's thread, if the coordinator refuses reports.
        numbers: of reports, from 1, of which the coordinator takes each once; shared by the run's reporters in all
            placements, as the old one may still send when the next begins; None = this is the only one.
    """

    def __init__(
        self,
        *,
        run_id: str,
        node: str,
        num_blocks: int,
        send: Callable[[control_pb2.ReportRequest], object],
        on_refused: Callable[[str], None],
        interval_s: float = 0.2,
        clock: SharedClock | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._run_id, self._node, self._num_blocks = run_id, node, num_blocks
        self._send, self._on_refused, self._interval_s = send, on_refused, interval_s
        self._clock = clock or SharedClock()
        self._numbers = numbers or itertools.count(1)
        self._entries: deque[Entry] = deque()
        self._pending = threading.Event()
        self._urgent = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="reporter", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue an entry for the next report; thread-safe."""
        self._entries.append(entry)
        if isinstance(entry, (TurnDone, Failed, Flushed)):
            self._urgent.set()
        if not self._pending.is_set():
            self._pending.set()

    def flush(self, timeout_s: float) -> bool:
        """Send every queued entry; False if that took longer than ``timeout_s`` seconds."""
        mark = Flushed(threading.Event())
        self.put(mark)
        return mark.event.wait(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued entries, then end the thread."""
        self._closing.set()
        self._urgent.set()
        self._pending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ---- the reporter's thread --------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            if not self._pending.wait(_IDLE_S):
                continue
            if not self._closing.is_set():
                self._urgent.wait(self._interval_s)
            self._urgent.clear()
            self._pending.clear()
            try:
                is_wanted = self._deliver()
            except Exception as error:  # without an error the coordinator would wait for this run
                _LOG.exception("a report of run %s failed", self._run_id)
                self._on_refused(f"reports can't be sent: {internal_error(error)}")
                return
            if not is_wanted or (self._closing.is_set() and not self._entries):
                return

    def _deliver(self) -> bool:
        """Send all queued entries; False if the coordinator refuses them or the reporter closes."""
        while self._entries:
            request, marks = self._request()
            while True:
                try:
                    self._send(request)
                    break
                except grpc.RpcError as error:
                    failure = error_of_call(error, peer="the coordinator")
                    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
                    if not is_silence(error) and not isinstance(failure, BusyError):  # calls of others crowd it out
                        if isinstance(failure, IntegrityError):
                            self._tell_refusal(failure, has_trails=bool(request.trails))
                        self._on_refused(f"the coordinator refused a report: {failure}")
                        return False
                    _LOG.debug("report not delivered (%s), trying again", code.name)
                if self._closing.wait(_RETRY_S):
                    return False
            for mark in marks:
                mark.event.set()
        return True

    def _tell_refusal(self, failure: IntegrityError, *, has_trails: bool) -> None:
        """Report a report that was too long as an error of this node; else others would only miss it."""
        remedy = "; lower train.local_iterations, as [audit] tells all of a turn at once" if has_trails else ""
        request = control_pb2.ReportRequest(run_id=self._run_id, node=self._node, number=next(self._numbers))
        request.error, request.message = IntegrityError.__name__, f"a report can't be sent: {failure}{remedy}"
        with contextlib.suppress(grpc.RpcError):
            self._send(request)

    def _request(self) -> tuple[control_pb2.ReportRequest, list[Flushed]]:
        request = control_pb2.ReportRequest(run_id=self._run_id, node=self._node, number=next(self._numbers))
        sent: dict[tuple[int, str, str], int] = {}
        lines: list[str] = []
        marks: list[Flushed] = []
        long_bytes = 0
        for number in range(min(len(self._entries), _MAX_ENTRIES)):
            entry = self._entries[0]
            next_bytes = len(entry.digests_json) if isinstance(entry, AuditTrail) else 0
            if long_bytes > _MAX_LONG_BYTES or (number and next_bytes > _MAX_LONG_BYTES):
                break  # a report with a long trail has nothing before it
            entry = self._entries.popleft()
            long_bytes += next_bytes
            match entry:
                case Scored(message):
                    request.scores.append(message)
                    long_bytes += len(message.values)
                case Sent(seq, target, payload, num_bytes):
                    sent[seq, target, payload] = sent.get((seq, target, payload), 0) + num_bytes
                case TechniqueFailed(problem):
                    request.cache_problem = problem
                case Handled(now_s, event, commands):
                    lines.append(record_line(now_s, event, commands))
                case HeaderLine(line):
                    lines.append(line)
                case Flushed():
                    marks.append(entry)
                case _:
                    self._add(request, entry)
        for (seq, target, payload), num_bytes in sent.items():
            request.traffic.add(seq=seq, target=target, payload=payload, bytes=num_bytes)
        request.recording = "".join(line + "\n" for line in lines)
        return request, marks

    def _add(self, request: control_pb2.ReportRequest, entry: Entry) -> None:
        match entry:
            case Span(action, start_s, end_s, worked_s):
                request.spans.add(
                    action=format_action(action, self._num_blocks),
                    start_unix_s=self._clock.unix_s(start_s),
                    end_unix_s=self._clock.unix_s(end_s),
                    worked_s=worked_s,
                )
            case StepDone(report, at_s):
                request.steps.add(
                    seq=report.seq,
                    step=report.step,
                    kind=report.kind,
                    values=numbers_to_proto(report.values),
                    at_unix_s=self._clock.unix_s(at_s),
                )
            case TurnDone(turn):
                request.turns_done.append(turn)
            case CopyCompared(turn, unit, sha256):
                request.copies.add(turn=turn, unit=unit, sha256=sha256)
            case CopySent(turn, unit, sha256):
                request.kept.add(turn=turn, unit=unit, sha256=sha256)
            case AuditTrail():
                request.trails.add(**entry._asdict())
            case Arrived(source, num_bytes, seconds, at_unix_s):
                request.transfers.add(source=source, bytes=num_bytes, seconds=seconds, at_unix_s=at_unix_s)
            case Note(text):
                request.notes.append(text)
            case ShardSaved(turn, step, shard, digests):
                saved = request.saved.add(turn=turn, step=step, sha256=shard.sha256, bytes=shard.size_bytes)
                for unit, sha256 in digests.items():
                    saved.digests.add(unit=unit, sha256=sha256)
            case Failed(error, message, lost_peer) if not request.error:
                request.error, request.message, request.lost_peer = error, message, lost_peer


class Totals:
    """Counts of one run at one node: actions, busy seconds, processor seconds and bytes sent to each peer.

    They continue over all placements of the run.
    """

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self.report_numbers = itertools.count(1)
        self.actions = 0
        self.busy_s = 0.0
        self.started_s = time.monotonic()
        self.cpu_start_s = time.process_time()
        self.sent_bytes: dict[str, int] = {}
        self.links_reopened = 0

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``totals.json``; keys end in ``_s`` for seconds, ``_bytes`` for bytes.

        ``load`` is the machine's, divided by its ``cores``.
        """
        return {
            "actions": self.actions,
            "busy_s": self.busy_s,
            "wall_s": time.monotonic() - self.started_s,
            "cpu_s": time.process_time() - self.cpu_start_s,
            "sent_bytes": dict(sorted(self.sent_bytes.items())),
            **({"links_reopened": self.links_reopened} if self.links_reopened else {}),
            "load": machine_load(),
            "cores": os.cpu_count() or 1,
        }


FORMAT = 1


def header_line(plan: Plan, node: str, wait_s: float, start: StartPoint | None = None) -> str:
    """Write the first line of a recording: format, node, plan, longest wait, and the start of a continued run."""
    header: dict[str, Any] = {"recording": FORMAT, "node": node, "plan_digest": plan.digest, "wait_s": wait_s}
    if start is not None:
        header["start"] = {"step": start.step, "holder": start.holder}
        if start.first_turn:  # the run moved to another placement
            header["start"] |= {
                "first_turn": start.first_turn,
                "first_seq": start.first_seq,
                "placement_number": start.placement_number,
            }
    return json.dumps(header)


def table_line(operations: Operations) -> str:
    """Write the line of an operation table, which precedes the first turn with the table."""
    return json.dumps({"table": operations.to_json(), "digest": operations.digest}, separators=(",", ":"))


def record_line(now_s: float, event: ev.Event, commands: Sequence[ev.Command]) -> str:
    """Write one line of a recording: an event, the time of its handling and its commands."""
    entry = {"now_s": now_s, "event": to_json(event), "commands": [to_json(command) for command in commands]}
    return json.dumps(entry, separators=(",", ":"))


def to_json(value: ev.Event | ev.Command) -> list[Any]:
    """Convert an event or a command to ``[class name, field, ...]``: ``["HeadArrived", 2, "node-0"]``."""
    return [type(value).__name__, *(_plain(field) for field in value)]


@functools.lru_cache(maxsize=8)
def digest_of(operations: Operations) -> str:
    """The digest of a table, by which turns name it; cached."""
    return operations.digest


def _plain(field: Any) -> Any:
    if isinstance(field, Turn):
        value = {entry.name: getattr(field, entry.name) for entry in dataclasses.fields(field)}
        return value | {"operations": digest_of(field.operations) if field.operations is not None else ""}
    if isinstance(field, Op):
        return field.letter
    if isinstance(field, tuple):
        return [_plain(part) for part in field]
    return field


_DRIFT = 1e-4
_KEPT = 64


class _Comparison(NamedTuple):
    """One reading of the coordinator's clock: when, its lead over this node's monotonic clock, and the error bound."""

    at_s: float
    lead_s: float
    doubt_s: float


class SharedClock:
    """The coordinator's time; thread-safe. Before the first comparison it is this node's own wall clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lead_s = time.time() - clock()
        self._seen: deque[_Comparison] = deque(maxlen=_KEPT)

    def compare(self, sent_s: float, received_s: float, there_unix_s: float) -> None:
        """Note the coordinator's time between two monotonic times of this node; 0 = no time was sent.

        Example: asked at 10 s, answered at 12 s with 1000 s: the coordinator's clock leads by 989 s, +- 1 s.
        """
        if there_unix_s <= 0:
            return
        half_s = max(0.0, received_s - sent_s) / 2
        with self._lock:
            self._seen.append(_Comparison(received_s, there_unix_s - (sent_s + half_s), half_s))
            best = min(self._seen, key=lambda seen: seen.doubt_s + _DRIFT * (received_s - seen.at_s))
            self._lead_s = best.lead_s

    def forget(self) -> None:
        """Drop all comparisons, because the coordinator is a new process."""
        with self._lock:
            self._seen.clear()

    def unix_s(self, monotonic_s: float) -> float:
        """The coordinator's time at a monotonic time of this node."""
        return monotonic_s + self._lead_s

    def now_unix_s(self) -> float:
        """The coordinator's time now."""
        return self.unix_s(self._clock())
