"""Whether links keep their rate during a run: what messages take, turn by turn, beside turns of the same work.

The rate of a link in a turn is that of its quicker messages, as in ``ringtune.costs.links.recorded``: a processor that
computes makes some of them look slow, a link that has become slower all of them. ::

    train turn              0      1     2  |   3     4     5     6
    a -> b, in MB/s       (1.9)   2.4   2.6 |  2.5   0.6   0.6   0.7
                          begins  the usual |         `-- three turns in a row: 3.95 times as long

Turns count as of the same work where as much trains at both ends of the link (``ringtune.costs.measured.lasting``): the
messages of both ends share their lines.

A turn with few messages of a link that say a rate says nothing of that link, neither for nor against a change.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple

from ringtune.costs.links.assumed import Pair
from ringtune.costs.links.recorded import KEPT_SAMPLES, RecordedLinks, says_a_rate
from ringtune.costs.measured.lasting import LASTING_TURNS, LastingChanges
from ringtune.costs.profile import LinkFacts

LINK_CHANGED: Final = 1.5
"""A link counts as changed when its messages take so many times as long as usual, or usually did as now.

More than for nodes, as the rate of a radio link changes by a quarter from turn to turn; chosen, not fitted.
"""

LEAST_IN_TURN: Final = 4
"""Messages of a link in a turn that say its rate there."""


class _Transfer(NamedTuple):
    num_bytes: int
    seconds: float
    at_s: float


class LinkWatch:
    """Watches the rates of links on one placement.

    Args:
        links: as they were known when the placement was planned.
    """

    def __init__(self, links: Sequence[LinkFacts]) -> None:
        self._latency_s = {(link.source, link.target): link.latency_s for link in links}
        self._turn: dict[Pair, list[_Transfer]] = {}
        self._kept: deque[dict[Pair, list[_Transfer]]] = deque(maxlen=LASTING_TURNS)
        self._num_turns = 0
        self._rates: LastingChanges[Pair] = LastingChanges(LINK_CHANGED)

    def add(self, source: str, target: str, num_bytes: int, seconds: float, *, at_s: float) -> None:
        """Add one message that came at ``at_s``; one of no known link, or that says no rate, is left out."""
        if (source, target) in self._latency_s and says_a_rate(num_bytes, seconds, at_s):
            found = self._turn.setdefault((source, target), [])
            if len(found) < KEPT_SAMPLES:
                found.append(_Transfer(num_bytes, seconds, at_s))

    def turn_done(self, kinds: Mapping[str, Hashable]) -> None:
        """Note the rate of every link in the train turn that is done; ``kinds`` says what each node had to do in it."""
        turn, self._turn = self._turn, {}
        self._kept.append(turn)
        self._num_turns += 1
        if self._num_turns == 1:
            return
        for pair, transfers in turn.items():
            if len(transfers) >= LEAST_IN_TURN:
                kind = tuple(kinds.get(node) for node in pair)
                self._rates.add(pair, kind, {"byte": (1.0 / self._rate(pair, transfers), 1.0)})

    def changed(self) -> dict[Pair, float]:
        """The links whose rate has lastingly changed, each with how many times as long its messages take now."""
        return self._rates.changed()

    def newest(self) -> RecordedLinks:
        """The messages of the newest train turns alone."""
        links = RecordedLinks()
        for turn in self._kept:
            for (source, target), transfers in turn.items():
                for one in transfers:
                    links.add(source, target, one.num_bytes, one.seconds, at_s=one.at_s)
        return links

    def _rate(self, pair: Pair, transfers: Sequence[_Transfer]) -> float:
        """Bytes per second of the quicker messages, without the link's latency."""
        latency_s = self._latency_s[pair]
        rates = [one.num_bytes / (one.seconds - min(latency_s, one.seconds / 2)) for one in transfers]
        return statistics.quantiles(rates, n=4, method="inclusive")[2]
