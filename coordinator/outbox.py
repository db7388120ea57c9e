"""Events on their way from a run to its submitter: a bounded queue that survives a submitter that is gone."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator

from ringtune.errors import InterruptedRunError
from ringtune.v1 import control_pb2

_MAX_EVENTS = 20_000
_TICK_S = 0.25


class Outbox:
    """What a run says, read by one submitter.

    Args:
        wait_s: how long a full outbox waits for a submitter that does not read, in seconds.
        max_events: how many events it holds.
    """

    def __init__(self, *, wait_s: float = 30.0, max_events: int = _MAX_EVENTS) -> None:
        self._wait_s = wait_s
        self._queue: queue.Queue[control_pb2.RunEvent | None] = queue.Queue(max_events)
        self._nobody_reads = threading.Event()

    def emit(self, event: control_pb2.RunEvent) -> None:
        """Queue an event; dropped if nobody reads any more.

        Raises:
            InterruptedRunError: the submitter is there but does not read.
        """
        if not self._put(event):
            raise InterruptedRunError(f"the submitter did not take events for {self._wait_s:g} s; submit again")

    def close(self) -> None:
        """There are no more events."""
        self._put(None)

    def events(self) -> Generator[control_pb2.RunEvent, None, None]:
        """The events, until closed."""
        try:
            while (event := self._queue.get()) is not None:
                yield event
        finally:
            self._nobody_reads.set()

    def _put(self, event: control_pb2.RunEvent | None) -> bool:
        deadline_s = time.monotonic() + self._wait_s
        while not self._nobody_reads.is_set():
            try:
                self._queue.put(event, timeout=_TICK_S)
                return True
            except queue.Full:
                if time.monotonic() >= deadline_s:
                    return False
        return True
