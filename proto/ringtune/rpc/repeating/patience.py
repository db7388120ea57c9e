"""Decide how often a call is made, and for how long each time; a value of numbers, without a clock.

A call that takes minutes is made of attempts. The one who is asked holds each for a while, then says that it is still
at work; the next attempt asks for the result of the same work::

    attempt 1   held    "at work"        a sign of life
    attempt 2   held    "at work"        a sign of life
    attempt 3   the connection breaks    silence begins
    attempt 4   refused                  silence goes on
    attempt 5   the result

So an answer that is lost, and a connection that is gone for less than the lease, cost a moment and not the run; and who
is silent for a lease is lost, however long the work may take.
"""

from __future__ import annotations

from typing import Final, NamedTuple

RETRY_S: Final = 0.2
"""Between two attempts."""
_SLOWEST_BYTES_PER_S: Final = 32 << 10
"""The slowest link on which a request still has to arrive within an attempt."""
_LEAST_SILENT: Final = 2
"""Attempts without an answer before anybody is lost: the one who asks may have stood still during the first."""


class Attempt(NamedTuple):
    """How long one attempt may take.

    Attributes:
        hold_s: after so long the other one says that it is still at work.
        timeout_s: without any answer by then the attempt has failed.
    """

    hold_s: float
    timeout_s: float


class Patience:
    """Counts what became of the attempts of one call.

    Args:
        now_s: when it begins, on any clock that does not jump.
        lease_s: who is silent for so long is lost.
        timeout_s: for the whole call.
        request_bytes: of the request, which takes its time on a slow link.
    """

    def __init__(self, now_s: float, *, lease_s: float, timeout_s: float, request_bytes: int = 0) -> None:
        self._heard_s = now_s
        self._end_s = now_s + timeout_s
        self._lease_s = lease_s
        self._way_s = request_bytes / _SLOWEST_BYTES_PER_S
        self._num_silent = 0

    def attempt(self, now_s: float) -> Attempt:
        """Say how long the next attempt may take; the last one is held until the end of the call."""
        third_s, left_s = self._lease_s / 3, self.left_s(now_s)
        timeout_s = 2 * third_s + self._way_s
        return Attempt(third_s, timeout_s) if timeout_s < left_s else Attempt(left_s + third_s, left_s)

    def left_s(self, now_s: float) -> float:
        """Seconds until the end of the call, at least a hundredth."""
        return max(0.01, self._end_s - now_s)

    def hear(self, now_s: float) -> None:
        """Note a sign of life."""
        self._heard_s, self._num_silent = now_s, 0

    def miss(self, now_s: float) -> bool:
        """Note an attempt without an answer; return whether another one follows."""
        self._num_silent += 1
        is_lost = self._num_silent >= _LEAST_SILENT and now_s + RETRY_S > self._heard_s + self._lease_s + self._way_s
        return not is_lost and now_s + RETRY_S < self._end_s
