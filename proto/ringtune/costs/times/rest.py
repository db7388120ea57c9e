"""Rest: what a node that rested may do faster, where a quota of processor time holds."""

from __future__ import annotations

from typing import NamedTuple


class Rest(NamedTuple):
    """What a rest gives: at most so many seconds of the next action, which keeps at least a share of its time.

    Example: after a long rest an action of 30 ms takes 23 ms with ``most_s`` 0.007. At a quota of 0.4 cores it can't
    take less than 12 ms, whatever the rest was.
    """

    most_s: float
    least_share: float
