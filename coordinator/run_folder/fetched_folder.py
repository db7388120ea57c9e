"""Write a run's folder anew while the files that are there stay as they are, until the new ones are complete.

::

    DIR/fetching/    what has come so far; goes if the rest does not come
    DIR/             gets it when all has come: first run.json, last the checkpoints and report.json

By the checkpoints and the report others judge whether the folder is up to date, so one in which the change was cut
short is not: it is fetched again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.run_folder.checkpoints import FOLDER, RunCheckpoints
from coordinator.run_folder.folder import (
    FETCHING,
    KIND,
    OF_COMMAND,
    PART,
    RunFolder,
    claim_run_folder,
    files_of_run,
    lock_of,
    put_run_aside,
    remove_if_nothing_began,
    require_no_run,
)
from coordinator.run_folder.place import PLACE
from ringtune.files.durable import drop_file, is_plain_file, remove_folder, rename_durably, storage_errors
from ringtune.files.owned import claim, is_claimed

_LAST = (FOLDER, "report.json")


@contextmanager
def fetched_folder(
    out: Path, *, replace: bool, goes_on: bool, is_same: bool = False, say: Callable[[str], object] = lambda line: None
) -> Iterator[RunFolder]:
    """Yield a folder whose files take the place of a run's when the context ends without an error.

    Args:
        out: folder of the run; made if it is not there.
        replace: whether files of a run there may be replaced.
        goes_on: the folder yielded has a copy of the files that are there; else none.
        is_same: the files that are there are of the same run, so they go once all have come. Those of another run
            are put aside, and so are files among them that the run has not written.
        say: takes a line on what was put aside.

    Raises:
        UsageError: there is a run already, and it may not be replaced; or something else.
        BusyError: another process writes there.
        StorageError: the folder can't be used, or there is no room; the files in it are as before.
    """
    is_new = not out.exists()
    claim_run_folder(out)
    with lock_of(out):
        before = tuple(name for name in files_of_run(out) if name != FETCHING)
        coming = out / FETCHING
        if is_claimed(coming, KIND):
            remove_folder(coming)
        if not goes_on:
            require_no_run(out, before, replace=replace)
        is_same = is_same or goes_on
        replaced = tuple(name for name in before if not is_same or name not in OF_COMMAND)
        try:
            claim(coming, KIND)
            if goes_on:
                _copy(out, coming, replaced)
            with RunFolder(coming, resume=True) as folder:
                yield folder
        except BaseException:
            if is_claimed(coming, KIND):
                shutil.rmtree(coming, ignore_errors=True)
            if is_new:
                remove_if_nothing_began(out)
            raise
        aside = _take_over(coming, out, replaced)
        if aside is None:
            return
        if goes_on:  # all of them were copied
            remove_folder(aside)
        elif not is_same:
            say(f"the files of the earlier run are in {aside}")
        elif _has_others(aside, out):
            say(f"files that the run has not written are in {aside}")


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    with storage_errors(target):
        for name in names:
            copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
            copy(source / name, target / name)


def _take_over(coming: Path, out: Path, replaced: Iterable[str]) -> Path | None:
    """Put new files in the place of the old ones, in an order that never leaves what looks complete but is not.

    Returns:
        Where the old ones are now.
    """
    aside = put_run_aside(out, sorted(replaced, key=_LAST.__contains__, reverse=True))
    if (coming / PLACE).exists():
        rename_durably(coming / PLACE, out / PLACE)
    for name in sorted(files_of_run(coming), key=_LAST.__contains__):
        rename_durably(coming / name, out / name)
    remove_folder(coming)
    return aside


def _has_others(aside: Path, out: Path) -> bool:
    """Remove the files that the same run wrote earlier; whether others are left, such as a user's notes.

    Its own are the files beside its folders, and in them those that it has written again, whole or in part, and the
    manifests of older checkpoints.
    """
    checkpoints = RunCheckpoints(aside)
    for step in checkpoints.steps():
        drop_file(checkpoints.path(step))
    for name, _folders, files in os.walk(aside, topdown=False):
        folder = Path(name)
        again = out / folder.relative_to(aside)
        for file in files:
            is_own = folder == aside or is_plain_file(again / file.removesuffix(PART))
            if is_own and is_plain_file(folder / file):
                drop_file(folder / file)
        if not any(folder.iterdir()):
            folder.rmdir()
    return aside.exists()
