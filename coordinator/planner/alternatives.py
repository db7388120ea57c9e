"""Read the options ``--microbatches`` and ``--wire``, which name what the planner may choose from."""

from __future__ import annotations

from ringtune.errors import UsageError
from ringtune.schedule.course import WIRE_DTYPES

_MOST = 16


def microbatch_choices(text: str, batch_size: int) -> tuple[int, ...]:
    """Read ``1,4`` as numbers of micro-batches; an empty text is no number.

    ``auto`` is every power of two up to 16 that the batch has rows for: 1, 2, 4 for 6 rows.

    Raises:
        UsageError: no numbers, or one that a batch of so many rows can't be cut into.
    """
    if text == "auto":
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
