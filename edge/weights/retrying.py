"""Decide when to go on fetching and when to give up: deadline, next source, and the end of a silent stream."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ringtune.errors import (
    BusyError,
    CapacityError,
    ConnectionFailedError,
    DamagedError,
    DeadlineError,
    IntegrityError,
    InterruptedRunError,
    RingTuneError,
    UsageError,
)

_LOG = logging.getLogger(__name__)
_IDLE_S = 15.0
_WATCH_S = 0.25
_BACK_OFF_S = (0.2, 0.5, 1.0, 2.0)
_BUSY_S = 0.5


class Wanted(NamedTuple):
    """The run that waits for a fetch, with its deadline.

    Attributes:
        run_id: of the run.
        deadline_s: monotonic seconds.
        stop: set when nobody waits any more.
        idle_s: a stream that brings nothing for so long is given up.
    """

    run_id: str
    deadline_s: float
    stop: threading.Event
    idle_s: float = _IDLE_S

    def left_s(self) -> float:
        """Seconds until the deadline, at least 0.05."""
        return max(0.05, self.deadline_s - time.monotonic())

    def check(self, what: str) -> None:
        """Raise if nobody waits any more, or the deadline is over.

        Raises:
            InterruptedRunError: stopped.
            DeadlineError: too late; names ``what``.
        """
        if self.stop.is_set():
            raise InterruptedRunError("the run was released while its weights were fetched")
        if time.monotonic() > self.deadline_s:
            raise DeadlineError(f"no more time for {what}; what has come is kept, start the run again to go on")


class SourceRotation:
    """Chooses the source to ask, and decides when to give up.

    Args:
        addresses: of all sources; at least one.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._good = list(addresses)
        self._at = 0
        self._failures = 0

    @property
    def address(self) -> str:
        """The source to ask now."""
        return self._good[self._at % len(self._good)]

    def after(self, error: RingTuneError | None, *, what: str, is_further: bool) -> float:
        """Choose the next source after a stream ended, or give up.

        Args:
            error: how; None if the source ended it.
            what: is still missing, for messages.
            is_further: whether anything came.

        Returns:
            Seconds to wait before the next one.

        Raises:
            IntegrityError: no source is left that sends what its manifest says.
            ConnectionFailedError: nothing came for several rounds.
            RingTuneError: the cache can't be written, which no other source would change.
        """
        if error is None and is_further:
            return 0.0
        if isinstance(error, CapacityError | UsageError):
            raise error
        _LOG.warning("fetching weights from %s: %s", self.address, error or "the stream ended early")
        if isinstance(error, BusyError):
            self._at += 1
            return _BUSY_S
        if isinstance(error, DamagedError):
            if len(self._good) == 1:
                raise IntegrityError(f"{error}; no other source is left")
            self._good.remove(self.address)
        else:
            self._at += 1
        self._failures = 0 if is_further else self._failures + 1
        rounds = self._failures // len(self._good)
        if rounds >= len(_BACK_OFF_S):
            raise ConnectionFailedError(
                f"{what} can't be fetched ({error or 'streams end early'}); what has come is kept, start the run again"
            )
        return _BACK_OFF_S[rounds] if self._failures else 0.0


class Watch:
    """Cancels a call that brings nothing for ``idle_s``, or that nobody waits for any more."""

    def __init__(self, call: Any, wanted: Wanted, *, idle_s: float) -> None:
        self._call = call
        self._wanted = wanted
        self._idle_s = idle_s
        self._seen_s = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch-fetch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._call.cancel()
        self._thread.join()

    def saw_progress(self) -> None:
        """Note that bytes came."""
        self._seen_s = time.monotonic()

    def _watch(self) -> None:
        while not self._done.wait(_WATCH_S):
            if self._wanted.stop.is_set() or time.monotonic() - self._seen_s > self._idle_s:
                self._call.cancel()
                return
