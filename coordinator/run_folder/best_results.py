"""The best results of a run in its folder, each of the step after which its evaluation was (``train.keep_best``).

::

    DIR/best/<N>/adapter/   what was trained up to step N
    DIR/best/<N>/complete   written last: all files of that step are there

When the run is done the best one is copied to its place. It stays here as well, for a run that is made longer. Older
ones stay as long as a run may go on from a checkpoint at which they were the best.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ringtune.errors import IntegrityError
from ringtune.files.durable import remove_folder, replace_folder, storage_errors, write_durably
from ringtune.models.result_files import BEST_FOLDER, RESULT_FOLDERS
from ringtune.rounds.checkpoint import CheckpointManifest

_COMPLETE: Final = "complete"


class BestFolder:
    """The best results of one run.

    Args:
        run_folder: of the run.
    """

    def __init__(self, run_folder: Path) -> None:
        self._run, self._folder = run_folder, run_folder / BEST_FOLDER

    def steps(self) -> tuple[int, ...]:
        """List the steps that have a folder, ascending, whether it is complete or not."""
        names = [entry.name for entry in self._folder.iterdir()] if self._folder.is_dir() else []
        return tuple(sorted(int(name) for name in names if name.isdecimal()))

    def has(self, step: int) -> bool:
        """Whether the result of a step is there."""
        return (self._folder / str(step) / _COMPLETE).is_file()

    def complete(self, step: int) -> None:
        """Note that all files of a step are there.

        Raises:
            StorageError: no room.
        """
        write_durably(self._folder / str(step) / _COMPLETE, b"")

    def put_in_place(self, step: int) -> None:
        """Make the result of a step that of the run.

        Raises:
            IntegrityError: it is not there.
            StorageError: no room.
        """
        if not self.has(step):
            raise IntegrityError(
                f"the run's best result, that of step {step}, is not in {self._folder}; fetch the run into the folder "
                "that it was resumed from"
            )
        for name in RESULT_FOLDERS:
            source, target = self._folder / str(step) / name, self._run / name
            part = target.with_name(target.name + ".part")
            if source.is_dir():
                remove_folder(part)
                with storage_errors(target):
                    shutil.copytree(source, part, copy_function=_copy_durably)
                replace_folder(part, target)

    def go_back_to(self, step: int) -> None:
        """Drop the results of later steps: they may never come to be."""
        self._drop(later for later in self.steps() if later > step)

    def keep_for(self, manifests: Iterable[CheckpointManifest]) -> None:
        """Drop the results that are older than the best ones of these checkpoints."""
        found = [one.evaluations.best_step for one in manifests if one.evaluations.best is not None]
        self._drop(step for step in self.steps() if found and step < min(found))

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            shutil.rmtree(self._folder / str(step), ignore_errors=True)


def with_best(
    run_folder: Path, manifests: Iterable[CheckpointManifest]
) -> tuple[tuple[CheckpointManifest, ...], tuple[str, ...]]:
    """Leave out the checkpoints whose best result is not in the run's folder; return also what is wrong with those."""
    best, found, problems = BestFolder(run_folder), list[CheckpointManifest](), list[str]()
    for manifest in manifests:
        known = manifest.evaluations
        if known.best is None or best.has(known.best_step):
            found.append(manifest)
        else:
            lacks = f"{run_folder / BEST_FOLDER / str(known.best_step)}, the best result until then, is not there"
            problems.append(f"{manifest.name} can't be used: {lacks}")
    return tuple(found), tuple(problems)


def _copy_durably(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    with Path(target).open("rb") as file:
        os.fsync(file.fileno())
