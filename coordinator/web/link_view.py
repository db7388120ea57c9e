"""Traffic of a run by link: bytes of all steps, and of the newest one, of as many links as can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ringtune.costs.profile import Profile

MOST_LINKS: Final = 2000
_MOST_KEPT: Final = 20_000


class LinkTable:
    """Counts the bytes of each directed link, named ``source>target`` as in ``metrics.jsonl``."""

    def __init__(self) -> None:
        self.total_bytes: dict[str, int] = {}
        self._last: Mapping[str, int] = {}

    def take(self, sent: Mapping[str, Any]) -> None:
        """Add the bytes of one step."""
        self._last = sent
        for link, count in sent.items():
            if link in self.total_bytes or len(self.total_bytes) < _MOST_KEPT:
                self.total_bytes[link] = self.total_bytes.get(link, 0) + int(count)

    def view(self, profile: Profile | None) -> list[list[Any]]:
        """List the links with the most bytes.

        Args:
            profile: has the rates that were measured; None = not known.

        Returns:
            ``[source, target, bytes so far, bytes of the newest step, bytes per second]``; no rate = None.
        """
        rates = {(one.source, one.target): one.rate_bytes_per_s for one in profile.links} if profile else {}
        most = sorted(self.total_bytes.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST_LINKS]
        found = []
        for link, total in most:
            source, _, target = link.partition(">")
            found.append([source, target, total, int(self._last.get(link, 0)), rates.get((source, target))])
        return found
