"""Read the options ``--microbatches`` and ``--wire``, which name what the planner may choose from.

They are options of the commands that plan. A job says what is wanted on any machines, and the same job gives the same
result there, unless it leaves the number of micro-batches to the planner (``train.microbatches = "auto"``). What was
chosen for some machines stands in the plan, which can be given again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringtune.costs.profile import LinkFacts
from ringtune.errors import UsageError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.placement import AUTO
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
    return microbatch_choices(AUTO, job.train.batch_size) if links and job.placement.microbatches == AUTO else ()


def microbatch_choices(text: str, batch_size: int) -> tuple[int, ...]:
    """Read ``1,4`` as numbers of micro-batches; an empty text is no number.

    ``auto`` is every power of two up to 16 that the batch has rows for: 1, 2, 4 for 6 rows.

    Raises:
        UsageError: no numbers, or one that a batch of so many rows can't be cut into.
    """
    if text == AUTO:
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
