"""How often a call is made, on a clock of the test's own."""

from __future__ import annotations

import pytest

from ringtune.transport.retry import RETRY_S, RetryState

LEASE_S = 9.0


def patience(*, timeout_s: float = 600.0, request_bytes: int = 0) -> RetryState:
    """Patience that begins at 100 s."""
    return RetryState(100.0, lease_s=LEASE_S, timeout_s=timeout_s, request_bytes=request_bytes)


def test_patience_goes_on_until_a_lease_of_silence() -> None:
    """A connection that is gone for less than the lease costs nothing but attempts."""
    made = patience()
    assert [made.miss(100.0 + at) for at in (0.1, 4.0, 8.7, LEASE_S)] == [True, True, True, False]


def test_patience_counts_the_lease_from_the_last_sign_of_life() -> None:
    """Work of minutes is no silence, as the one who does it says so every third of a lease."""
    made = patience()
    for at in range(103, 400, 3):
        made.hear(float(at))
    assert made.miss(400.0) and made.miss(405.5) and not made.miss(406.0)


def test_patience_needs_two_attempts_without_an_answer() -> None:
    """Who asks may have stood still for longer than the lease while the first one was under way."""
    made = patience()
    assert made.miss(100.0 + 5 * LEASE_S)
    assert not made.miss(100.0 + 5 * LEASE_S + RETRY_S)


@pytest.mark.promise("6 every wait ends")
def test_patience_ends_with_the_call_whatever_is_heard() -> None:
    """Who says for ever that it is at work is not waited for for ever."""
    made = patience(timeout_s=20.0)
    made.hear(119.95)
    assert not made.miss(120.0)
    assert made.attempt(121.0).timeout_s == pytest.approx(0.01)


def test_attempt_is_held_for_less_than_it_may_take() -> None:
    """So an answer that says "at work" has its way before the attempt counts as silent."""
    hold_s, timeout_s = patience().attempt(100.0)
    assert (hold_s, timeout_s) == (LEASE_S / 3, 2 * LEASE_S / 3)


def test_attempt_may_take_as_long_as_its_request_on_a_slow_link() -> None:
    """A megabyte at 32 KiB/s takes 32 s, and nobody is lost meanwhile."""
    made = patience(request_bytes=1 << 20)
    assert made.attempt(100.0).timeout_s == pytest.approx(32.0 + 6.0)
    assert made.miss(138.0) and made.miss(140.0) and not made.miss(141.0)


def test_last_attempt_is_held_beyond_the_end_of_the_call() -> None:
    """It ends with the result or the deadline, and with no news that nobody would act upon."""
    hold_s, timeout_s = patience(timeout_s=20.0).attempt(115.0)
    assert timeout_s == pytest.approx(5.0) and hold_s > timeout_s
