"""Credits bound what is in flight for each target and boundary."""

from __future__ import annotations

from ringtune.engine.credits import Credits

CHANNEL, OTHER = ("b", 2), ("b", 4)


def test_credits_run_out_for_each_channel_by_itself() -> None:
    """Two hidden states may be in flight; another boundary of the same target is another channel."""
    room = Credits(2)
    for _ in range(2):
        assert room.has(CHANNEL)
        room.take(CHANNEL)
    assert not room.has(CHANNEL)
    assert room.has(OTHER)


def test_credits_come_back_but_never_exceed_the_bound() -> None:
    """One that comes twice, or unasked, makes no more room than there was."""
    room = Credits(1)
    room.came_back(CHANNEL)
    room.take(CHANNEL)
    assert not room.has(CHANNEL)
    room.came_back(CHANNEL)
    assert room.has(CHANNEL)


def test_credits_are_not_needed_without_a_channel() -> None:
    """A leg that sends nothing takes none."""
    room = Credits(1)
    room.take(None)
    assert room.has(None) and room.has(CHANNEL)
