"""Limits of planning: the micro-batches and wire dtypes to choose from, the effort, and the deadline.

``--microbatches`` and ``--wire`` are options of the commands that plan, not keys of a job: the same job gives the same
result on any machines, unless it leaves the number of micro-batches to the planner (``train.microbatches = "auto"``).
The chosen values stand in the plan, which can be given again.

At the deadline the best plan found so far is taken. A plan depends on its inputs alone as long as the clock ends no
search. Where it ended one, another computation of the same plan may find a better one, so whoever shows the plan says
that the clock cut it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringtune.config.sections import AUTO_PLACEMENT
from ringtune.costs.profile import LinkFacts
from ringtune.errors import InterruptedRunError, UsageError
from ringtune.job.job import Job
from ringtune.schedule.course import WIRE_DTYPES

_MOST = 16


class Choices(NamedTuple):
    """What the planner may choose from in place of the job's own values; nothing = the job's value.

    Attributes:
        microbatches: numbers of micro-batches.
        wire_dtypes: names of wire dtypes.
    """

    microbatches: tuple[int, ...] = ()
    wire_dtypes: tuple[str, ...] = ()


NO_CHOICES = Choices()


def read_choices(microbatches: str, wire: str, *, batch_size: int) -> Choices:
    """Read both options; see ``microbatch_choices`` and ``wire_choices``.

    Raises:
        UsageError: one of them makes no sense.
    """
    return Choices(microbatch_choices(microbatches, batch_size), wire_choices(wire))


def free_microbatches(job: Job, links: Sequence[LinkFacts]) -> tuple[int, ...]:
    """Return the numbers of micro-batches that a job leaves to the planner; none where nothing was measured."""
    if not links or job.placement.microbatches != AUTO_PLACEMENT:
        return ()
    return microbatch_choices(AUTO_PLACEMENT, job.train.batch_size)


def microbatch_choices(text: str, batch_size: int) -> tuple[int, ...]:
    """Read ``1,4`` as numbers of micro-batches; an empty text is no number.

    ``auto`` is every power of two up to 16 that the batch has rows for: 1, 2, 4 for 6 rows.

    Raises:
        UsageError: no numbers, or one that a batch of so many rows can't be cut into.
    """
    if text == AUTO_PLACEMENT:
        return tuple(count for count in (1, 2, 4, 8, _MOST) if count <= batch_size)
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")})) if text else ()
    except ValueError as error:
        raise UsageError(f"--microbatches {text!r} has to be numbers with commas, or auto") from error
    if any(not 1 <= count <= batch_size for count in counts):
        raise UsageError(f"--microbatches {text!r} has to be in [1, {batch_size}], the batch has {batch_size} rows")
    return counts


def wire_choices(text: str) -> tuple[str, ...]:
    """Read ``float32,bfloat16`` as names of wire dtypes; an empty text is no name.

    Raises:
        UsageError: an unknown one.
    """
    names = tuple(part.strip() for part in text.split(",")) if text else ()
    for name in names:
        if name not in WIRE_DTYPES:
            raise UsageError(f"--wire {name!r} is not one of {', '.join(WIRE_DTYPES)}")
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Limits of planning: seconds, rings evaluated, and actions that the simulator may run.

    The plan depends on the machine only if ``seconds`` end a search; the other limits are counts.

    Attributes:
        seconds: most that searching and judging take together, on ``now_s``.
        now_s: a monotonic clock.
        is_cancelled: whether nobody waits for the plan any more.
        seed: of the local search.
        evaluations: most rings that a search evaluates with the mean owner; half of it, or less, among few nodes.
        judged_actions: most actions that the simulator may run to judge; 0 = the formula decides alone.
        ends_s: when the seconds are used up, on ``now_s``; None = they are each search's own.
        counts: how many ``layouts`` were searched since the effort began.
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
        """The effort with a clock that runs from now on, over all searches that get it."""
        if self.ends_s is not None:
            return self
        return dataclasses.replace(self, ends_s=self.now_s() + self.seconds, counts=Counter())

    def clock(self) -> PlanningClock:
        """Start the clock of a search: with the seconds that are left, or all of them where none run yet."""
        seconds = self.seconds if self.ends_s is None else max(0.0, self.ends_s - self.now_s())
        return PlanningClock(seconds, now_s=self.now_s, is_cancelled=self.is_cancelled)


class PlanningClock:
    """Says when the time for planning, or for a part of it, is used up.

    Args:
        seconds: that planning may take, from now on.
        now_s: a monotonic clock.
        is_cancelled: whether nobody waits for the plan any more.
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
        """Whether the time was used up before a search or the judging was done, here or in a part."""
        return bool(self._cut)

    def note_cut(self) -> None:
        """Note that the clock ended something."""
        self._cut[:] = [True]

    def now_s(self) -> float:
        """Read the clock.

        Raises:
            InterruptedRunError: nobody waits for the plan any more.
        """
        if self._is_cancelled():
            raise InterruptedRunError("planning was given up, nobody waits for the plan any more")
        return self._now_s()

    def left_s(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._end_s - self.now_s())

    def is_over(self) -> bool:
        """Whether the time is used up; the caller ends its search then, so this counts as a cut."""
        over = self.now_s() >= self._end_s
        if over:
            self.note_cut()
        return over

    def part(self, share: float) -> PlanningClock:
        """Make a clock with a share of the time that is left; a cut of it is a cut of this one."""
        clock = PlanningClock(share * self.left_s(), now_s=self._now_s, is_cancelled=self._is_cancelled)
        clock._cut = self._cut
        return clock
