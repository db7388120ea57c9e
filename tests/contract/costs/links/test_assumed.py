"""What is assumed of links that nobody measured."""

from __future__ import annotations

from ringtune.costs.links.assumed import LOOPBACK_BYTES_PER_S, with_assumed
from ringtune.costs.profile import LinkFacts


def link(source: str, target: str, rate: float) -> LinkFacts:
    """A measured link."""
    return LinkFacts(
        source=source, target=target, rate_bytes_per_s=rate, latency_s=0.01, send_cpu_s_per_byte=rate / 1e9
    )


def test_assumed_link_is_as_fast_as_the_slower_of_its_ends() -> None:
    """Node d sends at 8 at most and c receives at 4 at most, so d to c is 4."""
    known = [link("a", "b", 10.0), link("a", "c", 4.0), link("d", "b", 8.0)]
    machines = {name: name for name in "abcd"}
    found = {(each.source, each.target): each for each in with_assumed("abcd", machines, known)}
    assert len(found) == 12
    assert found["a", "b"] == known[0]
    assert (found["d", "c"].rate_bytes_per_s, found["d", "c"].latency_s) == (4.0, 0.01)
    assert found["d", "c"].is_assumed
    assert found["d", "c"].send_cpu_s_per_byte == 8.0 / 1e9
    assert found["b", "a"].rate_bytes_per_s == 8.0  # nobody knows b's uplink or a's downlink: the median link


def test_links_of_one_machine_are_its_memory() -> None:
    """Nodes a and b are on one machine; whatever is known of others says nothing about them."""
    found = with_assumed("abc", {"a": "x", "b": "x", "c": "y"}, [link("a", "c", 4.0), link("x", "c", 9.0)])
    rates = {(each.source, each.target): each.rate_bytes_per_s for each in found}
    assert rates["a", "b"] == rates["b", "a"] == LOOPBACK_BYTES_PER_S
    assert rates["b", "c"] == rates["c", "a"] == 4.0
