"""Links kept current by a run: the transfers of the run in place of the rates that were measured before it.

A receiver says of each message how long it took, from its sending or from the message before it on the same link. What
stands in a message's way besides the link (another message on the same wire, a processor that computes) makes it
longer, never shorter, so the rate is that of the quicker messages: a quarter of them were quicker still. A rate that
agrees with the known one within a tenth leaves it as it was: it was measured with more care.

Messages that are through within ``LEAST_S`` say nothing: the clocks of two nodes may differ by as much.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence

from ringtune.costs.assumed_links import LOOPBACK_BYTES_PER_S
from ringtune.costs.profile import LinkFacts

LEAST_SAMPLES = 8
LEAST_BYTES = 16_384
LEAST_S = 0.004
KEPT_SAMPLES = 1000
_AGREES = 0.1


class RecordedLinks:
    """Turns the transfers of a run into the links of a profile."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], deque[tuple[int, float]]] = {}

    def add(self, source: str, target: str, num_bytes: int, seconds: float) -> None:
        """Add one message; a small or quick one, or one whose time is no number, is left out."""
        if num_bytes >= LEAST_BYTES and LEAST_S <= seconds < float("inf"):
            self._samples.setdefault((source, target), deque(maxlen=KEPT_SAMPLES)).append((num_bytes, seconds))

    def links(self, known: Sequence[LinkFacts]) -> tuple[LinkFacts, ...]:
        """The known links with the rates that the run showed, where it showed another one."""
        return tuple(self._corrected(link) if self._is_shown(link) else link for link in known)

    def shown(self, known: Sequence[LinkFacts]) -> tuple[LinkFacts, ...]:
        """Only the known links of which the run's own transfers say a rate, with that rate."""
        return tuple(self._corrected(link) for link in known if self._is_shown(link))

    def _is_shown(self, link: LinkFacts) -> bool:
        """Whether enough transfers of the run went over a link; one through a machine's memory is never shown."""
        is_memory = link.is_assumed and link.rate_bytes_per_s >= LOOPBACK_BYTES_PER_S
        return not is_memory and len(self._samples.get((link.source, link.target), ())) >= LEAST_SAMPLES

    def _corrected(self, link: LinkFacts) -> LinkFacts:
        samples = self._samples[link.source, link.target]
        rates = [num_bytes / (seconds - min(link.latency_s, seconds / 2)) for num_bytes, seconds in samples]
        _, median, high = statistics.quantiles(rates, n=4, method="inclusive")
        if abs(high / link.rate_bytes_per_s - 1) <= _AGREES:
            return dataclasses.replace(link, is_assumed=False)
        return dataclasses.replace(
            link, rate_bytes_per_s=high, rate_low_bytes_per_s=median, rate_high_bytes_per_s=max(rates), is_assumed=False
        )
