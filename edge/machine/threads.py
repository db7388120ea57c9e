"""Limit the threads of numeric libraries, and run all torch work on one thread.

Torch work of an agent happens on one thread: thread pools and allocator arenas then exist once, and the
order of the work is the order of the queue.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ringtune.errors import DeadlineError, InterruptedRunError

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_CLOSE = object()


def limit_library_threads(threads: int) -> None:
    """Tell numeric libraries that are not yet loaded how many threads to use; the user's settings win.

    Waiting workers sleep instead of spinning: on a shared machine spinning takes the cores of the peers.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class ComputeThread:
    """One daemon thread that carries out queued functions in order."""

    def __init__(self, name: str = "compute") -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue ``function``; its result or error comes with the future: ``InterruptedRunError`` after the end."""
        future: Future[T] = Future()
        self._queue.put((function, future))
        if self._ended.is_set():
            self._refuse()
        return future

    def call(self, function: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """Run ``function`` on the thread and wait for it.

        Raises:
            DeadlineError: it was not done after ``timeout_s`` seconds; names ``what``.
        """
        future = self.submit(function)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the function itself raised it
                raise
            future.cancel()
            raise DeadlineError(f"waited {timeout_s:g} s for {what}; give more time or a smaller model") from None

    def close(self, timeout_s: float) -> bool:
        """End the thread after the queued functions; False if it is still busy after ``timeout_s`` seconds."""
        self._queue.put(_CLOSE)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._queue.get()) is not _CLOSE:
            _carry_out(*entry)
            del entry  # an idle thread must not keep the last run's objects alive
        self._ended.set()
        self._refuse()

    def _refuse(self) -> None:
        """Fail the futures of functions that were queued after the end."""
        while True:
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                return
            if entry is not _CLOSE and entry[1].set_running_or_notify_cancel():
                entry[1].set_exception(InterruptedRunError("the agent ends; start it again"))


def _carry_out(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
