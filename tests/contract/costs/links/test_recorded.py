"""A run's transfers correct the rates of links."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.links.assumed import loopback_link
from ringtune.costs.links.recorded import LEAST_SAMPLES, RecordedLinks
from ringtune.costs.profile import LinkFacts

KNOWN = LinkFacts(source="a", target="b", rate_bytes_per_s=12e6, latency_s=0.002)


def recorded(rate: float, *, samples: int = 40, waits: float = 0.5, num_bytes: int = 200_000) -> RecordedLinks:
    """Messages over a link of this rate; every other one also waits for half as long as it takes."""
    links = RecordedLinks()
    for index in range(samples):
        taken_s = num_bytes / rate
        seconds = KNOWN.latency_s + taken_s * (1 + (waits if index % 2 else 0.0))
        links.add("a", "b", num_bytes, seconds, at_s=10.0 * index + seconds)
    return links


def test_link_that_became_slower_has_the_rate_that_its_messages_showed() -> None:
    """Known as 12 MB/s and shaped to 5 since: it is 5, whatever some messages waited for."""
    (found,) = recorded(5e6).links((KNOWN,))
    assert found.rate_bytes_per_s == pytest.approx(5e6, rel=0.01)
    assert found.latency_s == KNOWN.latency_s


def test_link_that_became_faster_has_the_rate_that_its_messages_showed() -> None:
    """Known as 12 MB/s, it carries 30."""
    assert recorded(30e6).links((KNOWN,))[0].rate_bytes_per_s == pytest.approx(30e6, rel=0.01)


def test_link_keeps_a_rate_that_agrees() -> None:
    """What was measured with care is not moved by some percent."""
    assert recorded(11.5e6).links((KNOWN,)) == (KNOWN,)


@pytest.mark.parametrize(
    ("rate", "samples", "num_bytes"), [(5e6, LEAST_SAMPLES - 1, 200_000), (5e6, 40, 1000), (5e9, 40, 200_000)]
)
def test_link_keeps_its_rate_where_transfers_say_nothing(rate: float, samples: int, num_bytes: int) -> None:
    """Too few messages, too small ones, or such as are through before the clocks can tell."""
    assert recorded(rate, samples=samples, num_bytes=num_bytes).links((KNOWN,)) == (KNOWN,)


def test_link_through_a_machines_memory_stays_what_it_is() -> None:
    """There messages wait for processors, not for the link."""
    link = loopback_link("a", "b")
    assert recorded(5e6).links((link,)) == (link,)


def test_link_that_was_assumed_is_known_after_a_run() -> None:
    """Beyond the budget of a measurement links are assumed; a run that uses one knows it."""
    assumed = LinkFacts(source="a", target="b", rate_bytes_per_s=5.1e6, latency_s=0.002, is_assumed=True)
    (found,) = recorded(5e6).links((assumed,))
    assert not found.is_assumed and found.rate_bytes_per_s == 5.1e6


def test_links_that_a_run_hardly_used_are_not_shown_by_it() -> None:
    """Of three links one was used enough, and one agrees with its transfers: only those two say what they are now."""
    links = recorded(5e6)
    for index in range(LEAST_SAMPLES):
        links.add("b", "a", 200_000, 200_000 / 12e6 + KNOWN.latency_s, at_s=1000.0 + index)
    for index in range(LEAST_SAMPLES - 1):
        links.add("a", "c", 200_000, 1.0, at_s=2000.0 + 10 * index)
    known = (KNOWN, dataclasses.replace(KNOWN, source="b", target="a"), dataclasses.replace(KNOWN, target="c"))
    shown = links.shown((*known, loopback_link("a", "d")))
    assert shown == links.links(known)[:2]
    assert shown[0].rate_bytes_per_s == pytest.approx(5e6, rel=0.01)


@pytest.mark.parametrize("at_s", [1e17, -1e300, 1e300, float("inf"), float("nan")])
def test_links_leave_out_messages_at_no_time(at_s: float) -> None:
    """A node reports a time so far away that the seconds of its message are lost in it: its links stay."""
    links = RecordedLinks()
    for _ in range(40):
        links.add("a", "b", 200_000, 0.05, at_s=at_s)
    assert links.links((KNOWN,)) == (KNOWN,)


def test_links_that_share_a_line_have_the_rate_of_the_line() -> None:
    """Node a sends 200 kB to b and to c at a time over its 5 MB/s: each looks like 2.5, and is 5 when it is alone."""
    links = RecordedLinks()
    known = tuple(dataclasses.replace(KNOWN, target=target, latency_s=0.0) for target in "bc")
    for index in range(20):
        for link in known:
            links.add("a", link.target, 200_000, 400_000 / 5e6, at_s=float(index))
    assert [link.rate_bytes_per_s for link in links.links(known)] == [pytest.approx(5e6)] * 2


def test_link_that_is_held_up_elsewhere_has_no_part_in_a_line() -> None:
    """Node a sends to b at 8 MB/s and to c at 2 at a time: b might have had all 10, c could not."""
    links = RecordedLinks()
    known = tuple(dataclasses.replace(KNOWN, target=target, latency_s=0.0) for target in "bc")
    for index in range(20):
        links.add("a", "b", 800_000, 0.1, at_s=float(index))
        links.add("a", "c", 200_000, 0.1, at_s=float(index))
    assert [link.rate_bytes_per_s for link in links.links(known)] == [pytest.approx(10e6), pytest.approx(2e6)]


def test_links_that_only_share_a_line_keep_their_rates() -> None:
    """Each of two links of 12 MB/s had half of the line: together they carried what is known of either."""
    links = RecordedLinks()
    known = tuple(dataclasses.replace(KNOWN, source=source, latency_s=0.0) for source in "ac")
    for index in range(20):
        for link in known:
            links.add(link.source, "b", 200_000, 400_000 / 11.8e6, at_s=float(index))
    assert links.links(known) == known
