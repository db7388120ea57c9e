"""Retention rule for the shards of finished runs in a node's folder, by age and size; without a clock or a disk.

Shards of a finished run stay for a while, because a user may train it further. Unfinished runs are left alone: their
shards are the only way to resume them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringtune.errors import UsageError
from ringtune.quantities import parse_bytes

_DAY_S: Final = 86_400.0
KEPT_SIZE: Final = "4GiB"
"""Default of ``size_bytes``, as a user writes it."""


class FinishedRun(NamedTuple):
    """The end of a finished run, and the bytes of its shards."""

    run_id: str
    ended_unix_s: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionLimits:
    """Limits for shards of finished runs."""

    days: float = 30.0
    size_bytes: int = parse_bytes(KEPT_SIZE)

    def __post_init__(self) -> None:
        if not self.days >= 0.0:
            raise UsageError(f"--keep-days is {self.days:g}, it has to be at least 0")
        if self.size_bytes < 0:
            raise UsageError(f"--keep-size is {self.size_bytes} bytes, it has to be at least 0")

    def to_drop(self, runs: Iterable[FinishedRun], *, now_unix_s: float) -> list[FinishedRun]:
        """List the finished runs to remove: all that are too old, and the oldest that don't fit.

        The newest run is removed for its age only: its submitter may still be writing the results.

        Example: with a limit of 10 bytes, of runs with 3, 6 and 5 bytes, the newest last, only the 5 bytes stay: the 6
        don't fit beside them, and a run older than a removed one is removed too.
        """
        dropped: list[FinishedRun] = []
        held_bytes = 0
        for position, run in enumerate(sorted(runs, key=lambda run: (run.ended_unix_s, run.run_id), reverse=True)):
            held_bytes += run.size_bytes
            is_too_old = now_unix_s - run.ended_unix_s > self.days * _DAY_S
            if is_too_old or (position and held_bytes > self.size_bytes):
                dropped.append(run)
        return dropped


KEPT: Final = RetentionLimits()
