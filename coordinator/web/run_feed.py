"""The events of a run that a coordinator keeps, for a page: those that are there, and those that come.

A thread follows the run and waits where the page has not taken what came, so that a long run is never all in memory.
Result files are left out, and with them what nodes did in the last step: that is in ``trace.json`` of a run's folder.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final

from ringtune.errors import RingTuneError
from ringtune.v1 import control_pb2

MOST_AHEAD: Final = 20_000
"""Events that wait for the page."""
_LOOK_S: Final = 0.2
_END_S: Final = 2.0


class RunFeed:
    """Follows a run.

    Args:
        events: asks a coordinator for them, those that are there and those that come, without files.
    """

    def __init__(self, events: Callable[[], Iterable[control_pb2.RunEvent]]) -> None:
        self._events = events
        self._came: queue.Queue[control_pb2.RunEvent] = queue.Queue(MOST_AHEAD)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="page-events", daemon=True)

    def __enter__(self) -> RunFeed:
        """Begin to follow."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Follow no more."""
        self._left.set()
        self._thread.join(_END_S)

    def __call__(self) -> Iterator[control_pb2.RunEvent]:
        """Yield what came since the last call."""
        with contextlib.suppress(queue.Empty):
            for _ in range(MOST_AHEAD):
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
            self._put(control_pb2.RunEvent(note=f"nothing more comes: {error}"))

    def _put(self, event: control_pb2.RunEvent) -> bool:
        while not self._left.is_set():
            with contextlib.suppress(queue.Full):
                self._came.put(event, timeout=_LOOK_S)
                return True
        return False
