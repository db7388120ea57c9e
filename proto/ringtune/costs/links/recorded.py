"""Links kept current by a run: the transfers of the run in place of the rates that were measured before it.

A receiver says of each message how long it took, from its sending or from the message before it on the same link. What
stands in a message's way besides the link (a processor that computes) makes it longer, never shorter, so the rate is
that of the quicker messages: a quarter of them were quicker still.

Where messages of several links share the line of a node, all of them look slow, and the simulator would let them
share it once more. TCP shares a line evenly: a link that had about as much of it as any other link could have had all
that the line carried while it was busy (``busy_ends``); one that had far less was held up elsewhere::

    a -> b 2.5 MB/s, a -> c 2.5: 5 for each, alone        a -> b 8 MB/s, a -> c 2: 10 for b, but 2 for c

A rate that agrees with the known one within a tenth, or would without the others, leaves it as it was: it was measured
with more care.

Messages that are through within ``LEAST_S`` say nothing: the clocks of two nodes may differ by as much.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtune.costs.links.assumed import LOOPBACK_BYTES_PER_S, Pair
from ringtune.costs.links.busy_ends import Transfer, busy_rate
from ringtune.costs.profile import LinkFacts

LEAST_SAMPLES = 8
LEAST_BYTES = 16_384
LEAST_S = 0.004
KEPT_SAMPLES = 1000
_AGREES = 0.1
_EVEN_SHARE = 0.75


def says_a_rate(num_bytes: int, seconds: float, at_s: float) -> bool:
    """Whether a message was large and long enough to say something of its link, and its times are times."""
    has_times = LEAST_S <= seconds < math.inf and math.isfinite(at_s)
    # else so far from any clock that the message would have begun when it ended
    return num_bytes >= LEAST_BYTES and has_times and at_s - seconds / 2 < at_s


class RecordedLinks:
    """Turns the transfers of a run into the links of a profile."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], deque[_Message]] = {}

    def add(self, source: str, target: str, num_bytes: int, seconds: float, *, at_s: float) -> None:
        """Add one message that came at ``at_s``; a small or quick one, or one whose times are no times, is left out."""
        if says_a_rate(num_bytes, seconds, at_s):
            kept = self._samples.setdefault((source, target), deque(maxlen=KEPT_SAMPLES))
            kept.append(_Message(num_bytes, seconds, at_s))

    def links(self, known: Sequence[LinkFacts]) -> tuple[LinkFacts, ...]:
        """The known links with the rates that the run showed, where it showed another one."""
        lines = _Lines(self._shown_by(known))
        return tuple(lines.corrected(link) if self._is_shown(link) else link for link in known)

    def shown(self, known: Sequence[LinkFacts]) -> tuple[LinkFacts, ...]:
        """Only the known links of which the run's own transfers say a rate, with that rate."""
        lines = _Lines(self._shown_by(known))
        return tuple(lines.corrected(link) for link in known if self._is_shown(link))

    def _shown_by(self, known: Sequence[LinkFacts]) -> dict[Pair, list[Transfer]]:
        """The messages of each link that has enough of them, on their way."""
        return {
            (link.source, link.target): [
                message.on_link(link.latency_s) for message in self._samples[link.source, link.target]
            ]
            for link in known
            if self._is_shown(link)
        }

    def _is_shown(self, link: LinkFacts) -> bool:
        """Whether enough transfers of the run went over a link; one through a machine's memory is never shown."""
        is_memory = link.is_assumed and link.rate_bytes_per_s >= LOOPBACK_BYTES_PER_S
        return not is_memory and len(self._samples.get((link.source, link.target), ())) >= LEAST_SAMPLES


class _Message(NamedTuple):
    """One message: its bytes, the seconds that it took, and when it was there."""

    num_bytes: int
    seconds: float
    at_s: float

    def on_link(self, latency_s: float) -> Transfer:
        """The time for which its bytes were on the link."""
        return Transfer(self.at_s - self.seconds + min(latency_s, self.seconds / 2), self.at_s, self.num_bytes)


class _Lines:
    """What links had of the lines of their nodes, and what these carried.

    Args:
        transfers: of each link.
    """

    def __init__(self, transfers: Mapping[Pair, Sequence[Transfer]]) -> None:
        self._rates = {
            pair: [each.num_bytes / (each.end_s - each.begin_s) for each in found] for pair, found in transfers.items()
        }
        self._own = {
            pair: statistics.quantiles(rates, n=4, method="inclusive")[2] for pair, rates in self._rates.items()
        }
        self._could_have: dict[Pair, float] = dict(self._own)
        for end in (0, 1):
            for node in {pair[end] for pair in transfers}:
                self._share(transfers, [pair for pair in transfers if pair[end] == node])

    def _share(self, transfers: Mapping[Pair, Sequence[Transfer]], pairs: Sequence[Pair]) -> None:
        """Note for the links of one line what each could have had of it alone."""
        carried = busy_rate(itertools.chain.from_iterable(transfers[pair] for pair in pairs))
        most = max(self._own[pair] for pair in pairs)
        for pair in pairs:
            if self._own[pair] >= _EVEN_SHARE * most:
                self._could_have[pair] = max(carried, self._could_have[pair])

    def corrected(self, link: LinkFacts) -> LinkFacts:
        """The link as its messages showed it."""
        pair = (link.source, link.target)
        own, rate, rates = self._own[pair], self._could_have[pair], self._rates[pair]
        known = link.rate_bytes_per_s
        if own <= known * (1 + _AGREES) and rate >= known * (1 - _AGREES):
            return dataclasses.replace(link, is_assumed=False)
        return dataclasses.replace(
            link,
            rate_bytes_per_s=rate,
            rate_low_bytes_per_s=statistics.median(rates),
            rate_high_bytes_per_s=max(rate, *rates),
            is_assumed=False,
        )
