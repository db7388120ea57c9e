"""What was measured of a node's work: times, and what a block keeps for its backward."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.costs.work_times import WorkTime


class MeasuredWork(NamedTuple):
    """The timings of a node, and the activation bytes of one block.

    Attributes:
        work_times: every point.
        activation_token_bytes: what a forward with graph keeps of one block until its backward, its output included,
            for each padded token.
        rested_s: what work takes less after a rest, under a quota of processor time.
        handling_s: what every action takes besides its work.
        lowest_token_bytes: as ``activation_token_bytes``, of the lowest block that trains: its graph begins inside it.
    """

    work_times: tuple[WorkTime, ...]
    activation_token_bytes: float
    rested_s: float = 0.0
    handling_s: float = 0.0
    lowest_token_bytes: float = 0.0
