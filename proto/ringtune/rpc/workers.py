"""The threads that carry out a server's calls: started when none is free, and never a reason to hang.

``concurrent.futures.ThreadPoolExecutor`` fails a server in two ways. Where the system has no more threads, its
``submit`` raises on gRPC's own thread, which ends: no call is answered or cancelled from then on. And the interpreter
waits at its exit for every worker, for ever if one of them waits for such a call. Here a call waits for a free thread
instead, threads are daemons, and the end is bounded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, TypeVar

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_IDLE_S: Final = 30.0
"""Seconds that a thread waits for another call before it ends."""


class Workers(Executor):
    """Carries calls out, each on a thread of its own while it lasts.

    Args:
        max_workers: threads at a time; further calls wait.
        name: of the threads, followed by a number.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._changed = threading.Condition()
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._num_started = 0
        self._is_closed = False

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Carry a call out as soon as a thread is free; after ``close`` it is cancelled at once. Never raises."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            self._pending.append((future, lambda: function(*arguments, **named)))
            if self._num_idle >= len(self._pending):
                self._changed.notify()
            elif len(self._threads) < self._max_workers:
                self._start()
        return future

    def close(self, timeout_s: float) -> bool:
        """Cancel the calls that wait and end the threads; False if one is still at work after ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            for future, _ in self._pending:
                future.cancel()
            self._pending.clear()
            self._changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}_{self._num_started}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            _LOG.warning("%s: %s; a call waits until one of %d is free", self._name, error, len(self._threads))
            return
        self._num_started += 1
        self._threads.add(thread)

    # ---- a thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            _carry_out(*entry)
            del entry  # an idle thread must not keep a call's objects alive

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Wait for a call; None if this thread shall end."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._pending or self._is_closed, _IDLE_S)
            self._num_idle -= 1
            if self._pending:
                return self._pending.popleft()
            self._threads.discard(threading.current_thread())
            return None


def _carry_out(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
