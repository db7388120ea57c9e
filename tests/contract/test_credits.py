"""Credits bound what is in flight for each target and boundary."""

from __future__ import annotations

from ringtune.credits import Credits

CHANNEL, OTHER = ("b", 2), ("b", 4)


def test_credits_run_out_for_each_channel_by_itself() -> None:
    """Two hidden states may be in flight; another boundary of the same target is another channel."""
    credits = Credits(2)
    for _ in range(2):
        assert credits.has(CHANNEL)
        credits.take(CHANNEL)
    assert not credits.has(CHANNEL)
    assert credits.has(OTHER)


def test_credits_come_back_but_never_exceed_the_bound() -> None:
    """One that comes twice, or unasked, makes no more room than there was."""
    credits = Credits(1)
    credits.came_back(CHANNEL)
    credits.take(CHANNEL)
    assert not credits.has(CHANNEL)
    credits.came_back(CHANNEL)
    assert credits.has(CHANNEL)


def test_credits_are_not_needed_without_a_channel() -> None:
    """A leg that sends nothing takes none."""
    credits = Credits(1)
    credits.take(None)
    assert credits.has(None) and credits.has(CHANNEL)
