"""What a run knows of its losses after so many turns."""

from __future__ import annotations

from collections.abc import Iterable

from ringtune.schedule.course import Course
from ringtune.schedule.turns import NOTHING_KNOWN, Unfreezing


def unfreezing_after(course: Course, losses: Iterable[float]) -> Unfreezing:
    """The knowledge after train turns with these mean losses, from the first turn on."""
    found = NOTHING_KNOWN
    for loss in losses:
        found = found.after(course, loss)
    return found
