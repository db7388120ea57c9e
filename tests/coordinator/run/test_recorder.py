"""What the books of a run make of reports: rates of links, as the transfers of the run showed them."""

from __future__ import annotations

import pytest

from coordinator.run.recorder import RunRecorder
from ringtune.costs.links import MIN_SAMPLES
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.v1 import control_pb2
from tests.support.fake_agents import facts, job
from tests.support.plans import make_plan

LINK = LinkFacts(source="a", target="b", rate_bytes_per_s=12e6, latency_s=0.002)
UNUSED = LinkFacts(source="b", target="a", rate_bytes_per_s=12e6, latency_s=0.002)


def books() -> RunRecorder:
    """Books of a run on two nodes whose links carry 12 MB/s."""
    profile = Profile(nodes=(facts("a"), facts("b")), links=(LINK, UNUSED))
    return RunRecorder(make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"]), job(), profile, lambda event: None)


def test_books_correct_a_link_by_the_transfers_that_its_receiver_reports() -> None:
    """Eight messages of 200 kB from a took 40 ms at b: the link from a to b carries 5 MB/s, the other one is left."""
    kept = books()
    request = control_pb2.ReportRequest(node="b")
    for index in range(MIN_SAMPLES):
        request.transfers.add(source="a", bytes=200_000, seconds=LINK.latency_s + 0.04, at_unix_s=100.0 + index)
    kept.add_report(request)
    slower, same = kept.profile().links
    assert (slower.source, slower.target) == ("a", "b")
    assert slower.rate_bytes_per_s == pytest.approx(5e6)
    assert same == UNUSED
    assert kept.shown_links() == (slower,)
