"""Find the run that a command means: by its id, by its folder, or because there is only one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.kept_runs.record import RunRecord
from coordinator.kept_runs.taking_up import taken_up_by
from coordinator.run_folder.place import RunPlace, read_place
from ringtune.errors import UsageError
from ringtune.ids import RUN_ID


class FoundRun(NamedTuple):
    """A run that was meant.

    Attributes:
        run_id: empty = the only one at the coordinator.
        coordinator: ``host:port``.
        place: as the folder tells; None = no folder was given.
        folder: of the run; None = no folder was given.
    """

    run_id: str
    coordinator: str
    place: RunPlace | None = None
    folder: Path | None = None


def find_run(text: str, coordinator: str) -> FoundRun:
    """Find where a run is driven.

    Args:
        text: its id, its folder, or nothing.
        coordinator: ``host:port`` where to look unless the folder tells.

    Raises:
        UsageError: neither an id nor the folder of a run.
    """
    if not text or RUN_ID.fullmatch(text):
        return FoundRun(text, coordinator)
    folder = Path(text)
    if not folder.is_dir():
        raise UsageError(f"{text} is neither the id of a run nor its folder; 'ringtune runs' lists ids")
    place = read_place(folder)
    if place is None:
        raise UsageError(f"{text} does not tell where its run is driven; name the run by its id")
    return FoundRun(place.run_id, place.coordinator, place, folder)


def only_run(records: Sequence[RunRecord], may: Callable[[RunRecord], bool], what: str) -> RunRecord:
    """Choose the only run of which something may be true; one that another run goes on with is not meant.

    Args:
        records: of all runs.
        may: whether it can be meant.
        what: those that can be, in words, for the message.

    Raises:
        UsageError: there is none, or more than one; names them.
    """
    by_id = {record.run_id: record for record in records}
    found = [record for record in records if may(record) and taken_up_by(by_id, record.run_id) is None]
    if not found:
        raise UsageError(f"there is no {what} at this coordinator; 'ringtune runs' lists what it keeps")
    if len(found) > 1:
        names = ", ".join(record.run_id for record in found)
        raise UsageError(f"there is more than one {what} at this coordinator: {names}; name one")
    return found[0]
