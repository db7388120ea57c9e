"""What a line carried while it was busy."""

from __future__ import annotations

import pytest

from ringtune.costs.links.busy_ends import Transfer, busy_rate


def test_line_without_transfers_has_no_rate() -> None:
    """Nothing is known of it."""
    assert busy_rate(()) == 0.0


def test_transfers_that_overlap_count_together() -> None:
    """Two of 4 MB/s each, 100 ms long, that overlap by 75 ms, are 6.4 MB/s of the line."""
    both = [Transfer(0.025, 0.125, 400_000), Transfer(0.0, 0.1, 400_000)]
    assert busy_rate(both) == pytest.approx(6.4e6)


def test_pauses_of_a_line_do_not_count() -> None:
    """A message of 1 MB/s each second is 1 MB/s, however long the line rests between them."""
    assert busy_rate([Transfer(10.0 * at, 10.0 * at + 1, 1_000_000) for at in range(5)]) == pytest.approx(1e6)


def test_best_quarter_of_the_busy_time_counts() -> None:
    """Of 4 s one was at 3 MB/s, and three at 1, where something else stood in the way; one flash of 10 ms does not."""
    slow = [Transfer(10.0 * at, 10.0 * at + 1, 1_000_000) for at in range(3)]
    assert busy_rate([*slow, Transfer(50.0, 51.0, 3_000_000), Transfer(60.0, 60.01, 900_000)]) == pytest.approx(3e6)
