"""Remember measured links between runs, for pairs of nodes at their addresses.

A rate that is older than ``LONGEST_AGE_S`` is measured anew. Meanwhile the transfers of each run correct it, as the
actions of a run correct the times of nodes. A link that a run hardly used keeps its age: nothing of it was seen anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ringtune.costs.profile import LinkFacts

LONGEST_AGE_S = 3600.0
_LIKE_SIZES = 2.0
_Key = tuple[str, str, str, str]


class _Entry(NamedTuple):
    """A link as it was measured with messages of a size, and when."""

    link: LinkFacts
    message_bytes: int
    at_s: float


class LinkCache:
    """The links that one coordinator knows; any thread may ask.

    Args:
        now_s: a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}

    def find(self, addresses: Mapping[str, str], message_bytes: int) -> tuple[LinkFacts, ...]:
        """Find the young links among nodes at these addresses, measured with messages of half to twice the size."""
        oldest_s = self._now_s() - LONGEST_AGE_S
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.at_s >= oldest_s}
            return tuple(
                entry.link
                for (source, source_at, target, target_at), entry in self._entries.items()
                if addresses.get(source) == source_at
                and addresses.get(target) == target_at
                and 1 / _LIKE_SIZES <= message_bytes / entry.message_bytes <= _LIKE_SIZES
            )

    def put(self, links: Sequence[LinkFacts], addresses: Mapping[str, str], message_bytes: int) -> None:
        """Remember links that were measured, or shown by a run, just now; what is assumed is left out."""
        with self._lock:
            for link in links:
                if not link.is_assumed:
                    key = (link.source, addresses[link.source], link.target, addresses[link.target])
                    self._entries[key] = _Entry(link, max(1, message_bytes), self._now_s())
