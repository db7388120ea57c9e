"""A bounded queue of events from a run to its submitter; a run goes on when its submitter is gone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator

from ringtune.errors import InterruptedRunError
from ringtune.v1 import control_pb2

_MAX_EVENTS = 20_000
_MAX_BYTES = 64 << 20


class Outbox:
    """The events of a run, read by one submitter.

    Args:
        wait_s: how long a full outbox waits for a submitter that does not read, in seconds.
        max_events: how many events it holds.
        max_bytes: how many bytes of events it holds; a single event may be larger.
    """

    def __init__(self, *, wait_s: float = 30.0, max_events: int = _MAX_EVENTS, max_bytes: int = _MAX_BYTES) -> None:
        self._wait_s = wait_s
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._events: deque[control_pb2.RunEvent | None] = deque()
        self._held_bytes = 0
        self._nobody_reads = False
        self._changed = threading.Condition()

    def emit(self, event: control_pb2.RunEvent) -> None:
        """Queue an event; drop it if the submitter is gone.

        Raises:
            InterruptedRunError: the submitter is there but does not read.
        """
        if not self._put(event):
            raise InterruptedRunError(f"the submitter did not take events for {self._wait_s:g} s; submit again")

    def close(self) -> None:
        """End the events; a full outbox takes the end too, because its reader waits for it."""
        with self._changed:
            self._events.append(None)
            self._changed.notify_all()

    def events(self) -> Generator[control_pb2.RunEvent, None, None]:
        """Yield the events until the outbox is closed."""
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
            if not self._changed.wait_for(lambda: self._nobody_reads or self._has_room(size_bytes), self._wait_s):
                return False
            if not self._nobody_reads:
                self._events.append(event)
                self._held_bytes += size_bytes
                self._changed.notify_all()
            return True

    def _has_room(self, size_bytes: int) -> bool:
        is_small = self._held_bytes + size_bytes <= self._max_bytes or not self._events
        return is_small and len(self._events) < self._max_events
