"""Events of a run: their queue and their sinks, files sent as events, work beside its thread, and the clock of a run.

A run reports as ``RunEvent`` messages. Both ends pass each of them to a list of sinks: at the coordinator the status
board and the outbox, at the submitter the outcome, the run's folder and the screen.

The clock of a coordinator's runs begins at the wall clock's time and never jumps. Nodes convert their times to this
clock (``edge.runtime.reporter``), so the seconds of a step are a difference on one clock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

from ringtune.errors import InterruptedRunError, RingTuneError, internal_error
from ringtune.run_control import events as rd
from ringtune.storage.chunks import FileCutter
from ringtune.v1 import control_pb2

EventSink = Callable[[control_pb2.RunEvent], None]
"""Takes each event, in order."""

Entry = rd.Event | Callable[[], object]
"""What other threads put into the queue of a run's thread: an event of its state machine, or a call to make there."""

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_OFFSET_S = time.time() - time.monotonic()


def now_unix_s() -> float:
    """Unix seconds: the wall clock when this process began, plus the monotonic clock since."""
    return _OFFSET_S + time.monotonic()


def work_beside(
    name: str, work: Callable[[], T], put: Callable[[T], object], failed: Callable[[RingTuneError], T]
) -> threading.Thread:
    """Do long work on a thread of its own, which is returned.

    ``put`` takes what the work returns, or what ``failed`` makes of its error, on that thread.
    """

    def guarded() -> None:
        try:
            result = work()
        except RingTuneError as error:
            result = failed(error)
        except Exception as error:
            _LOG.exception("the thread %r failed by a bug", name)
            result = failed(internal_error(error))
        put(result)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


class GrowingFile:
    """A file that is sent piece by piece; ``path`` is relative to the run's folder."""

    def __init__(self, path: str, emit: EventSink) -> None:
        self._cutter = FileCutter(path)
        self._emit = emit
        self._is_closed = False

    def write(self, content: bytes, *, at_once: bool = False) -> None:
        """Add content; small pieces are sent together unless ``at_once``."""
        for chunk in (*self._cutter.add(content), *(self._cutter.flush() if at_once else ())):
            self._emit(control_pb2.RunEvent(file=chunk))

    def close(self) -> None:
        """Send the rest and the digest; a second call has no effect."""
        if not self._is_closed:
            self._is_closed = True
            self._emit(control_pb2.RunEvent(file=self._cutter.end()))


_ROOM_S = 30.0
"""Time limit for room in a full outbox."""
_MAX_EVENTS = 20_000
_MAX_BYTES = 64 << 20
"""Limit of the queued events; a single one may be larger."""


class Outbox:
    """The queue of events from a run to its submitter."""

    def __init__(self) -> None:
        self._events: deque[control_pb2.RunEvent | None] = deque()
        self._held_bytes = 0
        self._nobody_reads = False
        self._changed = threading.Condition()

    def emit(self, event: control_pb2.RunEvent) -> None:
        """Queue an event; drop it after the submitter has disconnected; raises ``InterruptedRunError``."""
        if not self._put(event):
            raise InterruptedRunError(f"the submitter did not take events for {_ROOM_S:g} s; submit again")

    def close(self) -> None:
        """End the queue, even if it is full: its reader waits for the end."""
        with self._changed:
            self._events.append(None)
            self._changed.notify_all()

    def events(self) -> Generator[control_pb2.RunEvent, None, None]:
        """Yield the events until the queue is closed."""
        try:
            while (event := self._take()) is not None:
                yield event
        finally:
            with self._changed:
                self._nobody_reads = True
                self._events.clear()
                self._changed.notify_all()

    def _take(self) -> control_pb2.RunEvent | None:
        with self._changed:
            self._changed.wait_for(lambda: self._events)  # a run that ends closes its outbox
            event = self._events.popleft()
            self._held_bytes -= 0 if event is None else event.ByteSize()
            self._changed.notify_all()
            return event

    def _put(self, event: control_pb2.RunEvent) -> bool:
        size_bytes = event.ByteSize()
        with self._changed:
            if not self._changed.wait_for(lambda: self._nobody_reads or self._has_room(size_bytes), _ROOM_S):
                return False
            if not self._nobody_reads:
                self._events.append(event)
                self._held_bytes += size_bytes
                self._changed.notify_all()
            return True

    def _has_room(self, size_bytes: int) -> bool:
        is_small = self._held_bytes + size_bytes <= _MAX_BYTES or not self._events
        return is_small and len(self._events) < _MAX_EVENTS
