"""Write the folder of a run on the submitter's machine as events come, never half a file under its name.

::

    DIR/job.toml   plan.json   profile.json   metrics.jsonl   report.json   trace.json
    DIR/operations.json   the operation tables that the run has chosen, if it chose any
    DIR/adapter/   the AdapterHub folder; or DIR/model/, a whole model, where all parameters trained
    DIR/users/NAME/   such a folder for each user instead, where users have adapters of their own
    DIR/recordings/  if asked for             DIR/logs/  with --local
    DIR/best/          results of the best evaluations, where the run keeps the best one
    DIR/checkpoints/   manifests, and with --local the nodes' shards
    DIR/run.json       the run's id, and the coordinator that drives it
    DIR/run.log        what the command printed when it had no terminal: it was detached, or the terminal was closed
    DIR/parts/         of a run that was stopped: what its earlier parts have left
    DIR/fetching/      while it is fetched: what has come, see ``fetched_folder``

A file grows as ``NAME.part`` and gets its name when it is complete and its digest is right; ``metrics.jsonl``
alone grows under its own name, a whole line at a time. Paths come from another machine: they are checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from coordinator.run_folder.best_results import BestFolder
from coordinator.run_folder.checkpoints import FOLDER, RunCheckpoints, cut_metrics, force_to_disk
from coordinator.run_folder.parts import FOLDER as PARTS
from coordinator.run_folder.parts import RunParts
from coordinator.run_folder.place import PLACE
from coordinator.run_folder.tables_file import NAME as TABLES
from coordinator.run_folder.tables_file import TablesFile
from ringtune.errors import IntegrityError, StorageError, UsageError
from ringtune.files.chunks import FileJoiner
from ringtune.files.durable import make_folder, rename_durably, storage_errors, write_durably
from ringtune.files.strict import parse_json
from ringtune.jobs.job import parse_job
from ringtune.models.result_files import BEST_FOLDER, RESULT_FOLDERS
from ringtune.rounds.checkpoint import CheckpointManifest
from ringtune.rounds.job_changes import changed_keys
from ringtune.rounds.length import LENGTH_KEYS, Length
from ringtune.v1 import control_pb2

LOG = "run.log"
"""What the command of a run printed when it had no terminal."""

_OWN_FILES = (PLACE, LOG, "job.toml", "plan.json", "profile.json", "metrics.jsonl", "report.json", "trace.json", TABLES)
FETCHING = "fetching"
"""What has come of a run that is being fetched."""

_OWN_FOLDERS = (*RESULT_FOLDERS, BEST_FOLDER, "recordings", "logs", FOLDER, PARTS, FETCHING)
_OF_COMMAND = (PLACE, LOG, "logs", FETCHING)
_REMOVE_S = 5.0
_RETRY_S = 0.1
_PART = ".part"
METRICS = "metrics.jsonl"
_JOB, _PLAN, _REPORT = "job.toml", "plan.json", "report.json"
_PATH = re.compile(r"[a-z0-9][A-Za-z0-9._-]*(/[a-zA-Z0-9][A-Za-z0-9._-]*){0,3}")


class RunFolder:
    """Writes one run's folder.

    Args:
        path: of the folder; made if it is not there.
        replace: whether the files of an earlier run there may be removed; others are never touched. What a run
            left that was refused before it had a plan is removed without asking.
        resume: go on with the run that is there.

    Attributes:
        checkpoints: the manifests.
        tables: the operation tables that the run has chosen.

    Raises:
        UsageError: there is a run already.
        StorageError: something else than a folder is there, or none can be made.
    """

    def __init__(self, path: Path, *, replace: bool = False, resume: bool = False) -> None:
        self.path = path
        self.checkpoints = RunCheckpoints(path)
        self.tables = TablesFile(path)
        self._best = BestFolder(path)
        self._parts = RunParts(path)
        self._growing: dict[str, FileJoiner] = {}
        self._prepare(replace, resume)

    def _prepare(self, replace: bool, resume: bool) -> None:
        self._is_new = not self.path.exists()
        own = files_of_run(self.path)
        if resume:
            return
        require_no_run(self.path, own, replace=replace)
        for name in own:
            remove(self.path / name)

    def __enter__(self) -> RunFolder:
        """Return the folder."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the open files; a file that is not complete keeps ``.part`` in its name."""
        self._let_go()
        if error is not None and self._is_new:
            self._remove_if_nothing_began()

    def _let_go(self) -> None:
        """Close the files that are not complete."""
        for growing in self._growing.values():
            growing.file.close()
        self._growing.clear()

    def _remove_if_nothing_began(self) -> None:
        """Remove a folder that was made for a run of which nothing is left but what was asked."""
        with contextlib.suppress(OSError):
            if {entry.name for entry in self.path.iterdir()} <= {_JOB, PLACE}:
                remove_folder(self.path)

    def write_text(self, name: str, text: str) -> None:
        """Write a whole small file at once.

        Raises:
            StorageError: no room.
        """
        write_durably(self._target(name), text.encode())

    def write_job(self, text: str) -> None:
        """Write the job; of a run that was made longer, its former length is remembered first.

        Raises:
            JobError: the text is no job.
            StorageError: no room.
        """
        path = self.path / _JOB
        if path.is_file() and self.checkpoints.steps():
            before = parse_job(path.read_text(encoding="utf-8"), source=str(path), is_record=True)
            now = parse_job(text, source="the job of the run", is_record=True)
            if not set(changed_keys(before, now)).isdisjoint(LENGTH_KEYS):
                self.checkpoints.was_as_long_as(Length.of(before))
        self.write_text(_JOB, text)

    def write_json(self, name: str, text: str) -> None:
        """Write a JSON document, indented for people; ``report.json`` gets the totals of the run's earlier parts.

        Raises:
            IntegrityError: ``text`` is no JSON.
        """
        try:
            value = parse_json(text)
        except ValueError as error:
            raise IntegrityError(f"{name} that came is not JSON: {error}; use one version on all machines") from error
        if name == _REPORT:
            value = self._parts.completed(value, self.path / METRICS)
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def add_metrics(self, line: str) -> None:
        """Append a line to ``metrics.jsonl``."""
        target = self._target(METRICS)
        with storage_errors(target), target.open("a", encoding="utf-8") as file:
            file.write(line.rstrip("\n") + "\n")

    def add_checkpoint(self, manifest: CheckpointManifest) -> None:
        """Make a checkpoint complete: its manifest is written after the metrics up to its step are on disk.

        Raises:
            StorageError: no room; earlier checkpoints are intact.
        """
        force_to_disk(self.path / METRICS)
        self.checkpoints.add(manifest)
        if self._best.steps():
            self._best.keep_for(self.checkpoints.read()[0])

    def add_best(self, step: int, *, is_result: bool) -> None:
        """Note that the best result until a step has come; or that it is that of the run, which is done.

        Raises:
            IntegrityError: it is to be that of the run, and is not there.
            StorageError: no room.
        """
        if is_result:
            self._best.put_in_place(step)
        else:
            self._best.complete(step)

    def go_back_to(self, step: int) -> None:
        """Drop what came after ``step``, from which the run goes on, and put the part before away.

        A file that was not complete is begun anew.
        """
        self._let_go()
        self.checkpoints.go_back_to(step)
        cut_metrics(self.path / METRICS, step)
        self.tables.go_back_to(step)
        self._best.go_back_to(step)
        self._parts.begin(step)

    def begin_anew(self) -> None:
        """Remove what the run has left so far: it begins anew, because it had no checkpoint to go on from."""
        self._let_go()
        for name in files_of_run(self.path):
            if name not in _OF_COMMAND:
                remove(self.path / name)

    def add_chunk(self, chunk: control_pb2.FileChunk) -> Path | None:
        """Append a chunk to a result file; several files may grow together.

        Returns:
            The path of the file once it is complete.

        Raises:
            IntegrityError: the path leaves the folder, or the digest differs.
        """
        target = self._target(chunk.path)
        part = target.with_name(target.name + _PART)
        with storage_errors(target):
            if chunk.path not in self._growing:
                self._growing[chunk.path] = FileJoiner(chunk.path, part.open("wb"), source="the coordinator")
            if not self._growing[chunk.path].add(chunk):
                return None
            self._growing.pop(chunk.path).file.close()
            rename_durably(part, target)
        return target

    def _target(self, name: str) -> Path:
        target = self.path / name
        inside = target.resolve().is_relative_to(self.path.resolve())
        if not _PATH.fullmatch(name) or name.endswith(_PART) or not inside:
            raise IntegrityError(f"the coordinator sent a file with the name {name!r}, which is not allowed")
        with storage_errors(target):
            make_folder(target.parent)
        return target


def files_of_run(folder: Path) -> tuple[str, ...]:
    """List the files and folders of a run in a folder, by name; the folder is made if it is not there.

    Raises:
        StorageError: something else than a folder is there, or none can be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise StorageError(f"can't use {folder} for the run's files: {error.strerror}; choose another") from error
    return tuple(name for name in present if name.removesuffix(_PART) in _OWN_FILES + _OWN_FOLDERS)


def require_no_run(folder: Path, own: Sequence[str], *, replace: bool) -> None:
    """Refuse a folder with a run that has a plan, unless it may be replaced.

    Args:
        folder: to be written.
        own: files of a run in it.
        replace: whether they may be removed.

    Raises:
        UsageError: they may not.
    """
    if _PLAN in own and not replace:
        raise UsageError(
            f"{folder} already holds a run ({', '.join(own[:3])}); choose another, or add --replace or --resume"
        )


def remove(entry: Path) -> None:
    """Remove a file or a folder; a log into which this process prints is emptied.

    Raises:
        UsageError: a folder can't be removed.
    """
    if entry.is_dir():
        remove_folder(entry)
    elif _is_own_output(entry):
        os.truncate(entry, 0)
    else:
        entry.unlink()


def _is_own_output(path: Path) -> bool:
    """Whether this process's standard output goes to the file, as that of a detached run does."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there; try for ``_REMOVE_S``, because an agent of a killed run may write in it.

    Raises:
        UsageError: it can't be removed.
    """
    deadline_s = time.monotonic() + _REMOVE_S
    while True:
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise UsageError(f"can't remove {folder}: {error.strerror}; remove it, or choose another") from error
        time.sleep(_RETRY_S)
