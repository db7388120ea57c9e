"""Where a run is driven, as its folder tells: so that other commands find it by the folder.

``run.json`` is written when the run has got its id, by the command that submitted it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ringtune.errors import IntegrityError, InvalidInputError, UsageError
from ringtune.files.durable import write_durably
from ringtune.files.given_files import read_json
from ringtune.files.strict import read_dataclass
from ringtune.ids import check_run_id

PLACE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlace:
    """Where a run is driven.

    Attributes:
        run_id: of the run.
        coordinator: ``host:port``.
        is_local: whether the coordinator is of this run alone, and ends with it.
        pid: process id of the command that submitted it.
        local_nodes: nodes that were started for it; 0 = those of the coordinator.
    """

    run_id: str
    coordinator: str
    is_local: bool
    pid: int
    local_nodes: int = 0

    def write(self, folder: Path) -> None:
        """Write it into the run's folder.

        Raises:
            StorageError: no room.
        """
        write_durably(folder / PLACE, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())


def read_place(folder: Path) -> RunPlace | None:
    """Read where the run of a folder is driven; None if the folder does not tell.

    Raises:
        IntegrityError: the file is damaged.
    """
    path = folder / PLACE
    try:
        place = read_dataclass(RunPlace, read_json(path), where="", error=InvalidInputError)
        check_run_id(place.run_id)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidInputError, UsageError) as error:
        raise IntegrityError(f"{path} can't be used ({error}); name the run by its id") from error
    return place


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:1] != ["Z"]
    return True
