"""Write a run's folder anew while the files that are there stay as they are, until the new ones are complete.

::

    DIR/fetching/    what has come so far; goes if the rest does not come
    DIR/             gets it when all has come: first run.json, last the checkpoints and report.json

By the checkpoints and the report others judge whether the folder is up to date, so one in which the change was cut
short is not: it is fetched again.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.run_folder.checkpoints import FOLDER
from coordinator.run_folder.folder import FETCHING, LOG, RunFolder, files_of_run, remove, remove_folder, require_no_run
from coordinator.run_folder.place import PLACE
from ringtune.files.durable import rename_durably, storage_errors

_LAST = (FOLDER, "report.json")


@contextmanager
def fetched_folder(out: Path, *, replace: bool, goes_on: bool) -> Iterator[RunFolder]:
    """Yield a folder whose files take the place of a run's when the context ends without an error.

    Args:
        out: folder of the run; made if it is not there.
        replace: whether files of a run there may be replaced.
        goes_on: the folder yielded has a copy of the files that are there; else none.

    Raises:
        UsageError: there is a run already, and it may not be replaced.
        StorageError: the folder can't be used, or there is no room; the files in it are as before.
    """
    is_new = not out.exists()
    before = tuple(name for name in files_of_run(out) if name != FETCHING)
    coming = out / FETCHING
    remove_folder(coming)
    if not goes_on:
        require_no_run(out, before, replace=replace)
    replaced = tuple(name for name in before if name != LOG) if goes_on else before
    try:
        if goes_on:
            _copy(out, coming, replaced)
        with RunFolder(coming, resume=goes_on) as folder:
            yield folder
    except BaseException:
        shutil.rmtree(coming, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise
    _take_over(coming, out, replaced)


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    with storage_errors(target):
        target.mkdir()
        for name in names:
            copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
            copy(source / name, target / name)


def _take_over(coming: Path, out: Path, replaced: Iterable[str]) -> None:
    """Put new files in the place of the old ones, in an order that never leaves what looks complete but is not."""
    if (coming / PLACE).exists():
        rename_durably(coming / PLACE, out / PLACE)
    for name in sorted(set(replaced) - {PLACE}, key=_LAST.__contains__, reverse=True):
        remove(out / name)
    for name in sorted(files_of_run(coming), key=_LAST.__contains__):
        rename_durably(coming / name, out / name)
    remove_folder(coming)
