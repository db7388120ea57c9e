"""Limits of planning: micro-batches and wire dtypes to choose from, the effort, and the deadline.

``--microbatches`` and ``--wire`` are options of the planning commands, not keys of a job: the same job gives the same
result on any machines, unless it leaves the number of micro-batches to the planner (``train.microbatches = "auto"``).
The chosen values are in the plan, which can be given again.

At the deadline the best plan so far is taken. A plan depends on its inputs alone if the clock ended no search; else the
output says that the clock ended it, as planning again may find a better one.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringtune.config.sections import AUTO_PLACEMENT, MAX_CHOSEN_MICROBATCHES
from ringtune.costs.profile import LinkFacts
from ringtune.errors import InterruptedRunError, UsageError
from ringtune.job.job import Job
from ringtune.schedule.course import WIRE_DTYPES


class Choices(NamedTuple):
    """Values that the planner may choose in place of the job's own; an empty tuple = the job's value."""

    microbatches: tuple[int, ...] = ()
    wire_dtypes: tuple[str, ...] = ()


NO_CHOICES: Choices = Choices()


def read_choices(microbatches: str, wire: str, *, batch_size: int) -> Choices:
    """Read both options; see ``microbatch_choices`` and ``wire_choices``; raises ``UsageError``."""
    return Choices(microbatch_choices(microbatches, batch_size), wire_choices(wire))


def free_microbatches(job: Job, links: Sequence[LinkFacts]) -> tuple[int, ...]:
    """Return the numbers of micro-batches that a job leaves to the planner; empty if no link was measured."""
    if not links or job.placement.microbatches != AUTO_PLACEMENT:
        return ()
    return microbatch_choices(AUTO_PLACEMENT, job.train.batch_size)


def microbatch_choices(text: str, batch_size: int) -> tuple[int, ...]:
    """Read ``1,4`` as numbers of micro-batches; an empty text gives none; raises ``UsageError``.

    ``auto`` is every power of two up to 16 that is at most ``batch_size``: 1, 2, 4 for 6 rows.
    """
    if text == AUTO_PLACEMENT:
        return tuple(count for count in (1, 2, 4, 8, MAX_CHOSEN_MICROBATCHES) if count <= batch_size)
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")})) if text else ()
    except ValueError as error:
        raise UsageError(f"--microbatches {text!r} has to be numbers with commas, or auto") from error
    if any(not 1 <= count <= batch_size for count in counts):
        raise UsageError(f"--microbatches {text!r} has to be in [1, {batch_size}], the batch has {batch_size} rows")
    return counts


def wire_choices(text: str) -> tuple[str, ...]:
    """Read ``float32,bfloat16`` as names of wire dtypes; an empty text gives none; raises ``UsageError``."""
    names = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in names:
        if name not in WIRE_DTYPES:
            raise UsageError(f"--wire {name!r} is not one of {', '.join(WIRE_DTYPES)}")
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Limits of planning: seconds, rings evaluated, and actions that the simulator may run.

    Only ``seconds`` make a plan depend on the machine; the other limits are counts.

    Attributes:
        seconds: of searching and judging together, on ``now_s``.
        evaluations: most rings that a search with the mean owner evaluates; at most half of it among few nodes.
        judged_actions: most actions that the simulator may run; 0 = the formula decides alone.
        ends_s: end of the seconds, on ``now_s``; None = each search has ``seconds`` of its own.
    """

    seconds: float = 60.0
    now_s: Callable[[], float] = time.monotonic
    is_cancelled: Callable[[], bool] = lambda: False
    seed: int = 0
    evaluations: int = 12_000
    judged_actions: int = 60_000
    ends_s: float | None = None
    counts: Counter[str] = field(default_factory=Counter, compare=False)

    def begun(self) -> Effort:
        """Return the effort with one deadline, from now on, for all searches; itself if it has one."""
        if self.ends_s is not None:
            return self
        return dataclasses.replace(self, ends_s=self.now_s() + self.seconds, counts=Counter())

    def clock(self) -> PlanningClock:
        """Return the clock of a search: with the seconds left until ``ends_s``, or with ``seconds``."""
        seconds = self.seconds if self.ends_s is None else max(0.0, self.ends_s - self.now_s())
        return PlanningClock(seconds, now_s=self.now_s, is_cancelled=self.is_cancelled)


class PlanningClock:
    """Deadline of planning, or of a part of it.

    Over after ``seconds`` from now on; ``is_cancelled`` says whether the caller no longer waits for the plan.
    """

    def __init__(
        self,
        seconds: float,
        *,
        now_s: Callable[[], float] = time.monotonic,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cut: list[bool] = []
        self._now_s = now_s
        self._is_cancelled = is_cancelled
        self._end_s = now_s() + seconds

    @property
    def was_cut(self) -> bool:
        """Whether the deadline ended a search or the judging, here or in a ``part``."""
        return bool(self._cut)

    def note_cut(self) -> None:
        """Note that the deadline ended a search."""
        self._cut[:] = [True]

    def now_s(self) -> float:
        """Read the clock; raises ``InterruptedRunError``."""
        if self._is_cancelled():
            raise InterruptedRunError("planning was cancelled, as its caller no longer waits for the plan")
        return self._now_s()

    def left_s(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._end_s - self.now_s())

    def is_over(self) -> bool:
        """Whether the time is used up; if so this counts as a cut, because callers end their search then."""
        over = self.now_s() >= self._end_s
        if over:
            self.note_cut()
        return over

    def part(self, share: float) -> PlanningClock:
        """Return a clock with a share of the time left; a cut of it is a cut of this one."""
        clock = PlanningClock(share * self.left_s(), now_s=self._now_s, is_cancelled=self._is_cancelled)
        clock._cut = self._cut
        return clock
