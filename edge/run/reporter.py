"""Report a node's run to the coordinator in batches, at no cost to the compute thread.

The compute thread appends to a queue; one thread turns what has gathered into a ``ReportRequest`` at least
every ``interval_s``, and at once when a turn ends or something fails. A report that was not answered is sent
again under its old number, because it may have arrived.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import grpc

from edge.run.recorder import record_line
from edge.run.shared_clock import SharedClock
from edge.run.totals import ReportNumbers
from ringtune.engine import events as ev
from ringtune.engine.handled import Handled
from ringtune.engine.spans import Span
from ringtune.errors import internal_error
from ringtune.rounds.checkpoint import Shard
from ringtune.rpc.codecs.codec import numbers_to_proto
from ringtune.schedule.tables.words import format_action
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_RETRY_S = 0.5
_IDLE_S = 60.0
# Entries of one report; keeps a message far below the limit of a channel.
_MAX_ENTRIES = 4096
_MAX_SCORES_BYTES = 1 << 20


class StepDone(NamedTuple):
    """An item of this owner is done, with its loss and counts."""

    report: ev.ReportStep
    at_s: float


class TurnDone(NamedTuple):
    """All actions of a turn at this node are done."""

    turn: int


class Scored(NamedTuple):
    """The scores of one block for the micro-batches of one batch, gathered in a score turn."""

    message: control_pb2.SubnetScores


class ShardSaved(NamedTuple):
    """This node's shard of a checkpoint is on its disk."""

    turn: int
    step: int
    shard: Shard


class CopyCompared(NamedTuple):
    """The digest of this owner's copy of a unit after its last update in a turn; goes before the turn's end."""

    turn: int
    unit: int
    sha256: str


class CacheLost(NamedTuple):
    """This node keeps no hidden states any more; goes before the end of the turn in which that was."""

    problem: str


class Sent(NamedTuple):
    """A tensor or head of so many payload bytes was queued for a peer."""

    seq: int
    target: str
    payload: str
    num_bytes: int


class Arrived(NamedTuple):
    """A message of so many payload bytes came from a peer, so many seconds after its sending or the one before it.

    ``at_unix_s`` is when it came, on the coordinator's clock.
    """

    source: str
    num_bytes: int
    seconds: float
    at_unix_s: float


class HeaderLine(NamedTuple):
    """A line of the recording that is no event."""

    line: str


class Failed(NamedTuple):
    """The run can't go on at this node."""

    error: str
    message: str
    lost_peer: str


class Flushed(NamedTuple):
    """A mark in the queue: ``event`` is set once every entry before the mark is sent."""

    event: threading.Event


Entry = (
    StepDone
    | TurnDone
    | Scored
    | CopyCompared
    | CacheLost
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
        run_id: of the run.
        node: this node.
        num_blocks: of the model; for printing actions.
        send: delivers one report or raises ``grpc.RpcError``.
        on_refused: called once, from the reporter's thread, if the coordinator no longer wants the reports.
        interval_s: longest time that an entry waits.
        clock: on which the coordinator wants times; by default this node's own wall clock.
        numbers: of the run's reports, also of those in other placements; by default this is the only one.
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
        numbers: ReportNumbers | None = None,
    ) -> None:
        self._run_id = run_id
        self._node = node
        self._num_blocks = num_blocks
        self._send = send
        self._on_refused = on_refused
        self._interval_s = interval_s
        self._clock = clock or SharedClock()
        self._numbers = numbers or ReportNumbers()
        self._entries: deque[Entry] = deque()
        self._pending = threading.Event()
        self._urgent = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="reporter", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue an entry for the next report; any thread may call this."""
        self._entries.append(entry)
        if isinstance(entry, (TurnDone, Failed, Flushed)):
            self._urgent.set()
        if not self._pending.is_set():
            self._pending.set()

    def flush(self, timeout_s: float) -> bool:
        """Send every entry that is queued now; False if that took longer than ``timeout_s`` seconds."""
        mark = Flushed(threading.Event())
        self.put(mark)
        return mark.event.wait(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the entries that are left, then end the thread."""
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
            except Exception as error:  # a run whose reports end in silence would be waited for
                _LOG.exception("a report of run %s failed", self._run_id)
                self._on_refused(f"reports can't be sent: {internal_error(error)}")
                return
            if not is_wanted or self._closing.is_set():
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
                    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
                    if code not in _RETRYABLE:
                        self._on_refused(f"the coordinator refused a report: {code.name}")
                        return False
                    _LOG.debug("report not delivered (%s), trying again", code.name)
                if self._closing.wait(_RETRY_S):
                    return False
            for mark in marks:
                mark.event.set()
        return True

    def _request(self) -> tuple[control_pb2.ReportRequest, list[Flushed]]:
        request = control_pb2.ReportRequest(run_id=self._run_id, node=self._node, number=self._numbers.draw())
        sent: dict[tuple[int, str, str], int] = {}
        lines: list[str] = []
        marks: list[Flushed] = []
        scores_bytes = 0
        for _ in range(min(len(self._entries), _MAX_ENTRIES)):
            if scores_bytes > _MAX_SCORES_BYTES:
                break
            entry = self._entries.popleft()
            match entry:
                case Scored(message):
                    request.scores.append(message)
                    scores_bytes += len(message.values)
                case Sent(seq, target, payload, num_bytes):
                    sent[seq, target, payload] = sent.get((seq, target, payload), 0) + num_bytes
                case CacheLost(problem):
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
            case Arrived(source, num_bytes, seconds, at_unix_s):
                request.transfers.add(source=source, bytes=num_bytes, seconds=seconds, at_unix_s=at_unix_s)
            case ShardSaved(turn, step, shard):
                request.saved.add(turn=turn, step=step, sha256=shard.sha256, bytes=shard.size_bytes)
            case Failed(error, message, lost_peer) if not request.error:
                request.error, request.message, request.lost_peer = error, message, lost_peer
