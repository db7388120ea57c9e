"""What one end of a node's links carried while it was busy: several messages at a time share it.

A node has one line up and one down. Messages that are under way at the same time share the line, so each of them looks
slow. Together they show what the line carries: all bytes of a busy period over its seconds::

    to b  |----- 400 kB -----|                        100 ms each, 4 MB/s by itself
    to c       |----- 400 kB -----|                   together 800 kB in 125 ms: 6.4 MB/s
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

BUSIEST_SHARE = 0.25


class Transfer(NamedTuple):
    """A message on its way: from ``begin_s`` to ``end_s``, on the coordinator's clock."""

    begin_s: float
    end_s: float
    num_bytes: int


def busy_rate(transfers: Iterable[Transfer]) -> float:
    """Bytes a second that a line carried in the best quarter of its busy time; 0.0 without transfers.

    What stands in a message's way besides the line makes a period slower, never quicker.

    Args:
        transfers: all that went over one line in one direction, in any order.

    Example:
        Two messages of 400 kB from 0 to 100 ms and from 25 to 125 ms give 6.4 MB/s.
    """
    periods = sorted(_periods(sorted(transfers)), key=lambda period: period[1] / period[0], reverse=True)
    left_s = BUSIEST_SHARE * sum(seconds for seconds, _ in periods)
    for seconds, num_bytes in periods:
        left_s -= seconds
        if left_s <= 0:
            return num_bytes / seconds
    return 0.0


def _periods(transfers: Sequence[Transfer]) -> list[tuple[float, int]]:
    """Seconds and bytes of each stretch of time in which something was under way."""
    periods: list[tuple[float, int]] = []
    began_s = ends_s = 0.0
    num_bytes = 0
    for transfer in transfers:
        if num_bytes and transfer.begin_s > ends_s:
            periods.append((ends_s - began_s, num_bytes))
            num_bytes = 0
        if not num_bytes:
            began_s = ends_s = transfer.begin_s
        ends_s = max(ends_s, transfer.end_s)
        num_bytes += transfer.num_bytes
    return [*periods, (ends_s - began_s, num_bytes)] if num_bytes else periods
