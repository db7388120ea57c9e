"""A link counts as changed when its messages take lastingly longer, or shorter, than in turns of the same work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ringtune.costs.links.recorded import KEPT_SAMPLES, LEAST_BYTES
from ringtune.costs.measured.link_pace import LEAST_IN_TURN, LINK_CHANGED, LinkWatch
from ringtune.costs.profile import LinkFacts

LINK = LinkFacts(source="a", target="b", latency_s=0.01, rate_bytes_per_s=1e6)
NUM_BYTES = 20_000


def watched(rates: Sequence[float], *, messages: int = 8, num_bytes: int = NUM_BYTES) -> LinkWatch:
    """A watch that has seen a turn for each rate, in bytes per second; 0 is a turn without messages."""
    watch = LinkWatch([LINK])
    for turn, rate in enumerate(rates):
        for message in range(messages if rate else 0):
            seconds = LINK.latency_s + num_bytes / rate
            watch.add("a", "b", num_bytes, seconds, at_s=1000.0 + 10 * turn + message)
        watch.turn_done({})
    return watch


def test_a_link_that_lasts_at_a_quarter_of_its_rate_is_told_with_its_ratio() -> None:
    """Two usual turns after the first, then three slow ones; the first turn counts for nothing."""
    slow = [3e5, 1e6, 1e6, 2.5e5, 2.5e5, 2.5e5]
    assert watched(slow[:5]).changed() == {}
    assert watched(slow).changed() == pytest.approx({("a", "b"): 4.0})


def test_a_link_that_became_faster_counts_too() -> None:
    """Blocks could be on the other side of it."""
    assert watched([1e6, *[2.5e5] * 4, 1e6, 1e6, 1e6]).changed() == pytest.approx({("a", "b"): 0.25})


@pytest.mark.parametrize(
    "rates",
    [
        [1e6, 1e6, 1e6, 2.5e5, 1e6, 2.5e5],  # it comes and goes
        [1e6, 1e6, 1e6, 8e5, 8e5, 8e5],  # too little
        [1e6, 2.5e5, 2.5e5, 2.5e5, 2.5e5, 2.5e5],  # slow from the start: that is how it was measured
    ],
)
def test_what_does_not_last_or_is_not_new_does_not_count(rates: list[float]) -> None:
    """Each of the newest turns has to have the change."""
    assert watched(rates).changed() == {}
    assert LINK_CHANGED > 1.25


def test_turns_without_messages_say_nothing() -> None:
    """A change that has begun goes on after them; too few messages are none, and so are small ones."""
    slow = [1e6, 1e6, 1e6, 2.5e5, 0, 2.5e5, 0, 2.5e5]
    assert watched(slow).changed() == pytest.approx({("a", "b"): 4.0})
    assert watched(slow, messages=LEAST_IN_TURN - 1).changed() == {}
    assert watched(slow, num_bytes=LEAST_BYTES - 1).changed() == {}


def test_messages_behind_a_busy_processor_do_not_make_a_link_slow() -> None:
    """The quicker ones say the rate; half of them waited here."""
    watch = watched([1e6] * 3)
    for turn in range(3):
        for message in range(8):
            seconds = LINK.latency_s + NUM_BYTES / 1e6 + 0.5 * (message % 2)
            watch.add("a", "b", NUM_BYTES, seconds, at_s=2000.0 + 10 * turn + message)
        watch.turn_done({})
    assert watch.changed() == {}


def test_newest_messages_alone_say_the_rate_of_now() -> None:
    """A run of many turns at the old rate does not hide it."""
    watch = watched([1e6] * 60 + [2.5e5] * 3)
    (link,) = watch.newest().links([LINK])
    assert link.rate_bytes_per_s == pytest.approx(2.5e5)


def test_messages_of_a_turn_are_bounded_and_those_of_unknown_links_left_out() -> None:
    """A node that reports a million of them takes no memory."""
    watch = LinkWatch([LINK])
    for message in range(KEPT_SAMPLES + 50):
        watch.add("a", "b", NUM_BYTES, 0.03, at_s=float(message))
    watch.add("b", "a", NUM_BYTES, 0.03, at_s=1.0)
    watch.add("a", "b", NUM_BYTES, float("nan"), at_s=1.0)
    assert sum(len(found) for found in watch._turn.values()) == KEPT_SAMPLES
