"""Show on a terminal how far a sweep is, on one line that is written over."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import TextIO, TypeVar

from ringtune.quantities import format_seconds

Cell = TypeVar("Cell")
_INTERVAL_S = 0.2


def shown_cells(
    cells: Iterable[Cell], total: int, stream: TextIO, *, now_s: Callable[[], float] = time.monotonic
) -> Generator[Cell]:
    """Pass results on as they come, and show their number and the time that the others will take.

    Nothing is written to what is no terminal.

    Args:
        cells: results.
        total: how many there will be.
        stream: where it is shown: the standard error output, so that results can go elsewhere.
        now_s: a monotonic clock.
    """
    if not stream.isatty():
        yield from cells
        return
    began_s = shown_s = now_s()
    width = _write(stream, f"0 of {total:,} cells", 0)
    try:
        for done, cell in enumerate(cells, start=1):
            if now_s() - shown_s >= _INTERVAL_S or done == total:
                shown_s = now_s()
                left_s = (shown_s - began_s) / done * (total - done)
                width = _write(stream, f"{done:,} of {total:,} cells, {format_seconds(left_s)} left", width)
            yield cell
    finally:
        _write(stream, "", width)
        _write(stream, "", 0)


def _write(stream: TextIO, text: str, width: int) -> int:
    """Write over a line that was ``width`` wide, and return the new width."""
    stream.write(f"\r{text.ljust(width)}")
    stream.flush()
    return len(text)
