"""What is assumed of links that nobody measured: those of nodes of one machine, and those beyond a budget.

Between two nodes of one machine messages go through its memory: such a link is never what a ring waits for, so it is
not measured for a run. The number of links grows with the square of the nodes; of those that were not measured in time
each is taken for as fast as the slower of its two ends is known to be::

    a -> b 10 MB/s, a -> c 4 MB/s, d -> b 8 MB/s        d -> c: d sends at 8, c receives at 4, so 4 MB/s
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ringtune.costs.profile import LinkFacts

LOOPBACK_BYTES_PER_S = 1e9
LOOPBACK_LATENCY_S = 1e-4

Pair = tuple[str, str]


def loopback_link(source: str, target: str) -> LinkFacts:
    """Make the link of two nodes of one machine: 1 GB a second, 0.1 ms."""
    return LinkFacts(
        source=source,
        target=target,
        rate_bytes_per_s=LOOPBACK_BYTES_PER_S,
        latency_s=LOOPBACK_LATENCY_S,
        is_assumed=True,
    )


def with_assumed(
    nodes: Sequence[str], machines: Mapping[str, str], known: Sequence[LinkFacts]
) -> tuple[LinkFacts, ...]:
    """Complete the links of a ring: every directed pair of ``nodes`` has one.

    Args:
        nodes: of the ring.
        machines: node -> the machine that it is on.
        known: links that were measured; links of other nodes are left out.

    Returns:
        One link for each directed pair, sorted.
    """
    by_pair = {(link.source, link.target): link for link in known if {link.source, link.target} <= set(nodes)}
    assumed = _Assumed(tuple(by_pair.values()))
    links = []
    for source in sorted(nodes):
        for target in sorted(nodes):
            if source == target:
                continue
            found = by_pair.get((source, target))
            if found is None and machines[source] == machines[target]:
                found = loopback_link(source, target)
            links.append(found or assumed.link(source, target))
    return tuple(links)


class _Assumed:
    """Rates of the nodes' ends and mean costs, from the links that are known."""

    def __init__(self, known: Sequence[LinkFacts]) -> None:
        self._up: dict[str, float] = {}
        self._down: dict[str, float] = {}
        for link in known:
            self._up[link.source] = max(link.rate_bytes_per_s, self._up.get(link.source, 0.0))
            self._down[link.target] = max(link.rate_bytes_per_s, self._down.get(link.target, 0.0))
        self._rate = statistics.median(link.rate_bytes_per_s for link in known) if known else LOOPBACK_BYTES_PER_S
        self._latency_s = statistics.median(link.latency_s for link in known) if known else LOOPBACK_LATENCY_S
        self._send_s = {node: _mean(known, node, is_source=True) for node in self._up}
        self._receive_s = {node: _mean(known, node, is_source=False) for node in self._down}

    def link(self, source: str, target: str) -> LinkFacts:
        """The link as its two ends let it be; an end that was never measured counts as the median link."""
        return LinkFacts(
            source=source,
            target=target,
            rate_bytes_per_s=min(self._up.get(source, self._rate), self._down.get(target, self._rate)),
            latency_s=self._latency_s,
            send_cpu_s_per_byte=self._send_s.get(source, 0.0),
            receive_cpu_s_per_byte=self._receive_s.get(target, 0.0),
            is_assumed=True,
        )


def _mean(known: Sequence[LinkFacts], node: str, *, is_source: bool) -> float:
    """Mean processor seconds of a byte that ``node`` sends, or receives."""
    if is_source:
        return statistics.fmean(link.send_cpu_s_per_byte for link in known if link.source == node)
    return statistics.fmean(link.receive_cpu_s_per_byte for link in known if link.target == node)
