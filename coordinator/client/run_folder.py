"""The folder of a run on the submitter's machine, written as events arrive, with whole files only.

::

    DIR/job.toml   plan.json   profile.json   metrics.jsonl   report.json   trace.json
    DIR/ledger.jsonl      statements of the nodes on each turn, of a run with ``[audit]``
    DIR/operations.json   the operation tables that the run has chosen, if it chose any
    DIR/adapter/   the AdapterHub folder; or DIR/model/, a whole model, where all parameters trained
    DIR/users/NAME/   such a folder for each user instead, where users have adapters of their own
    DIR/initial.safetensors  initial values of the adapters, of a job with ``adapter.from``
    DIR/recordings/  if asked for             DIR/logs/  with --local
    DIR/best/          results of the best evaluations, where the run keeps the best one
    DIR/checkpoints/   manifests, and with --local the nodes' shards
    DIR/.ringtune-run  the marker: the folder was empty when a run began to use it
    DIR/.ringtune-lock held by the process that writes here
    DIR/.ringtune-written  size and time of the files that the run has written
    DIR/run.json       the run's id, and the coordinator that drives it
    DIR/run.log        output of the command without a terminal: it was detached, or the terminal was closed
    DIR/parts/         of a run that was stopped: files of its earlier parts
    DIR/fetching/      while the run is fetched: the files that have arrived

A file grows as ``NAME.part`` and gets its name when it is complete with the right digest; only ``metrics.jsonl`` grows
under its own name, by whole lines. Paths are from another machine and are checked.

A folder that is not empty and has no marker is refused, so no file of the user has one of these names. The files that a
new run would replace are moved to ``DIR.replaced-<time>``. So are files that the same run or a fetch replaces but that
the user has changed or added: their size or time differs from ``.ringtune-written``.

Whatever writes raises ``StorageError`` where there is no room; what was there before stays.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from coordinator.client.checkpoints import FOLDER, NODES, BestFolder, RunCheckpoints, cut_metrics, force_to_disk
from coordinator.client.run_files import FOLDER as PARTS
from coordinator.client.run_files import NAME as TABLES
from coordinator.client.run_files import PART, TENSORBOARD, RunParts, TablesFile
from coordinator.client.saved_run import PLACE, require_kinds
from coordinator.run.run_text import is_step
from ringtune.errors import IntegrityError, JobError, StorageError, UsageError
from ringtune.job.job import Job, parse_job, read_job_text
from ringtune.models.result_files import BEST_FOLDER, RESULT_FOLDERS
from ringtune.run_control.checkpoint import CheckpointManifest
from ringtune.run_control.continuation import LENGTH_KEYS, Length, changed_keys
from ringtune.storage.chunks import CHUNK_BYTES, FileJoiner
from ringtune.storage.durable import (
    LOCK,
    FileLock,
    claim,
    drop_file,
    is_claimed,
    is_plain_file,
    itself,
    make_folder,
    marker,
    put_aside,
    rename_durably,
    require_free,
    storage_errors,
    write_durably,
    write_pieces_durably,
)
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.strict import parse_json, read_given, read_json, read_object
from ringtune.techniques.audit import LEDGER
from ringtune.techniques.initial_adapter import INITIAL_FILE
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
LOG = "run.log"
"""Output of a run's command without a terminal."""

FETCHING = "fetching"
"""Arrived files of a fetch under way."""

KIND = "run"
ASKED = "asked.toml"
"""The job of a run that the Python API continues in the background."""

METRICS = "metrics.jsonl"
_JOB, _PLAN, _REPORT, _TRACE = "job.toml", "plan.json", "report.json", "trace.json"
_OWN_FILES = (PLACE, LOG, _JOB, ASKED, INITIAL_FILE, "profile.json", METRICS, _REPORT, _TRACE, TABLES, _PLAN, LEDGER)
_OWN_FOLDERS = (*RESULT_FOLDERS, BEST_FOLDER, "recordings", "logs", FOLDER, PARTS, FETCHING, TENSORBOARD)
_OF_RUN = frozenset({_PLAN, METRICS, _REPORT, _TRACE, LEDGER, *RESULT_FOLDERS, BEST_FOLDER, PARTS})
OF_COMMAND = frozenset({PLACE, LOG, ASKED, INITIAL_FILE, "logs", FETCHING, TENSORBOARD})
"""Files that the command on this machine writes for every part of the run."""

WRITTEN = marker("written")
_PATH = re.compile(r"[a-z0-9][A-Za-z0-9._-]*(/[a-zA-Z0-9][A-Za-z0-9._-]*){0,3}")


class RunFolder:
    """Writer of one run's folder, in the context.

    Args:
        path: of the folder; made at the start of the context.
        replace: whether the files of an earlier run may be put aside; others are never touched. Job and logs of a run
            that was refused before it had a plan are overwritten.
        resume: the present run is resumed.
        begins_anew: it is resumed from its beginning; the files of its former part are put aside when there is a plan.
        is_copy: a caller keeps the files that a user has added or changed.
        say: takes a line about files that were put aside during the run; by default the log.

    Attributes:
        say: as the argument; may be set later.
        on_saved: called with run id and step when the manifest of a checkpoint is on disk.
        replaced: folder of the files of the earlier run; None = there were none.
    """

    def __init__(
        self,
        path: Path,
        *,
        replace: bool = False,
        resume: bool = False,
        begins_anew: bool = False,
        is_copy: bool = False,
        say: Callable[[str], object] = _LOG.warning,
    ) -> None:
        self.path = path
        self.checkpoints = RunCheckpoints(path)
        self.tables = TablesFile(path)
        self._best = BestFolder(path)
        self._parts = RunParts(path)
        self._growing: dict[str, FileJoiner] = {}
        self._written: dict[str, list[int]] = {}
        self._awaits_plan = False
        self._held: dict[str, control_pb2.RunEvent] = {}  # by kind
        self._replace, self._resume, self._begins_anew = replace, resume, begins_anew
        self._is_copy, self.say = is_copy, say
        self.on_saved: Callable[[str, int], object] = lambda run_id, step: None
        self._run_id = ""
        self.replaced: Path | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> RunFolder:
        """Claim and lock the folder.

        Raises:
            UsageError: there are other files, or there is a run already.
            BusyError: another process writes there.
            StorageError: the path is no folder, or none can be made.
        """
        self._is_new = not self.path.exists()
        claim(self.path, KIND)
        with contextlib.ExitStack() as undo:
            undo.enter_context(lock_of(self.path))
            undo.callback(self._let_go)
            require_no_links(self.path)
            if not self._resume:
                present = files_of_run(self.path)
                require_no_run(self.path, present, replace=self._replace)
                if holds_run(present) or self._replace:
                    self.replaced = put_run_aside(self.path, present)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the open files; incomplete ones keep ``.part`` in their names."""
        if any(error) and self._is_new:
            remove_unused_folder(self.path)
        self._undo.close()

    def _let_go(self) -> None:
        """Close incomplete files, and store which files the run has written."""
        for name, growing in self._growing.items():
            growing.file.close()
            self._note(name + PART)
        self._growing.clear()
        if self._written and is_claimed(self.path, KIND):  # it is gone where nothing began
            with contextlib.suppress(StorageError):  # without it a fetch keeps more
                text = json.dumps(read_written(self.path) | self._written)
                write_durably(self.path / WRITTEN, f"{text}\n".encode())

    def _note(self, *names: str) -> None:
        """Record size and time of files that the run has just written."""
        self._written |= {name: _state(path) for name in names if is_plain_file(path := self.path / name)}

    def take(self, event: control_pb2.RunEvent) -> None:
        """Write one event. Raises ``IntegrityError``: the event is not readable.

        Where an earlier part of the run had a plan, job and profile are written with the new plan: a run that is
        refused before it has one leaves the former files.
        """
        kind = event.WhichOneof("event")
        if kind == "run_id":
            self._awaits_plan, self._held = is_plain_file(self.path / _PLAN), {}
        if self._awaits_plan and kind in ("job_toml", "profile_json"):
            self._held[kind] = event
            return
        if self._awaits_plan and kind == "plan_json":
            self._awaits_plan = False
            if self._begins_anew:
                self._begins_anew = False
                self.say(f"the files of its former part are in {self.begin_anew()}")
            for held in self._held.values():
                self._write(held)
        self._write(event)

    def _write(self, event: control_pb2.RunEvent) -> None:
        match event.WhichOneof("event"):
            case "run_id":
                self._run_id = event.run_id
            case "job_toml":
                self.write_job(event.job_toml)
            case "profile_json" | "plan_json" | "report_json" as name:
                self.write_json(f"{name.removesuffix('_json')}.json", getattr(event, name))
            case "metrics_json":
                self.add_metrics(event.metrics_json)
            case "file":
                self.add_chunk(event.file)
            case "operations_json":
                self.tables.add(event.operations_json)
                self._note(TABLES)
            case "resumed_json":
                self.rewind_to(int(read_object(event.resumed_json, "the step where the run continues")["step"]))
            case "best_json":
                told = read_object(event.best_json, "the best result")
                self.add_best(int(told["step"]), is_result=bool(told["is_result"]))
            case "checkpoint_json":
                manifest = CheckpointManifest.parse(event.checkpoint_json)
                self.add_checkpoint(manifest)
                self.on_saved(self._run_id, manifest.step)

    def write_text(self, name: str, text: str) -> None:
        """Write a small file atomically."""
        write_durably(self._target(name), text.encode())
        self._note(name)

    def write_initial(self, content: Pieces) -> None:
        """Write the file of initial values, with which the run is resumed; a resumed run has it already."""
        path = self.path / INITIAL_FILE
        if not (self._resume and path.is_file() and FilePieces(path).sha256() == content.sha256()):
            write_pieces_durably(path, content)
            self._note(INITIAL_FILE)

    def _keep(self, *names: str) -> None:
        """Put aside files that the run is about to replace but has not written, and say so."""
        if self._is_copy:
            return
        written = read_written(self.path) | self._written
        others = [name for name in names if not self._is_own(self.path / name, written)]
        if aside := put_run_aside(self.path, others):
            named = ", ".join(name for name in others if os.path.lexists(aside / name))
            self.say(f"what was changed after the run wrote it is in {aside}: {named}")

    def _is_own(self, path: Path, written: dict[str, list[int]]) -> bool:
        if path.is_dir() and not path.is_symlink():
            return all(self._is_own(entry, written) for entry in path.iterdir())
        return is_plain_file(path) and _state(path) == written.get(str(path.relative_to(self.path)))

    def write_job(self, text: str) -> None:
        """Write the job, unless the present file, which may have a user's comments, is equal.

        The former length of a run that was made longer is stored first.

        Raises ``JobError``: the text is no job.
        """
        before, now = self._job(), parse_job(text, source="the job of the run")
        if before == now:
            return
        is_longer = before is not None and not set(changed_keys(before, now)).isdisjoint(LENGTH_KEYS)
        if before is not None and is_longer and self.checkpoints.steps():
            self.checkpoints.add_length(Length.of(before))
        self._keep(_JOB)
        self.write_text(_JOB, text)

    def _job(self) -> Job | None:
        """Read the present job; None if there is none, or a broken one that no checkpoint needs."""
        path = self.path / _JOB
        try:
            return parse_job(read_job_text(path), source=str(path)) if path.is_file() else None
        except JobError:
            if self.checkpoints.steps():
                raise
            return None

    def write_json(self, name: str, text: str) -> None:
        """Write a JSON document with indents; ``report.json`` gets the totals of the run's earlier parts.

        Raises ``IntegrityError``: ``text`` is no JSON.
        """
        try:
            value = parse_json(text)
        except ValueError as error:
            raise IntegrityError(
                f"{name} that was received is not JSON: {error}; use one version on all machines"
            ) from error
        if name == _REPORT:
            value = self._parts.completed(value, lambda: read_metrics(self.path))
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def add_metrics(self, line: str) -> None:
        """Append a line to ``metrics.jsonl``."""
        target = self._target(METRICS)
        with storage_errors(target), open(target, "a", encoding="utf-8", opener=itself) as file:
            file.write(line.rstrip("\n") + "\n")
        self._note(METRICS)

    def add_checkpoint(self, manifest: CheckpointManifest) -> None:
        """Write a manifest, which completes a checkpoint, after the metrics up to its step are on disk."""
        force_to_disk(self.path / METRICS)
        self.checkpoints.add(manifest)
        if self._best.steps():
            self._best.prune_before_best(self.checkpoints.read()[0])

    def add_best(self, step: int, *, is_result: bool) -> None:
        """Note that the best result up to a step is complete, or (``is_result``) publish it as that of the run.

        Raises ``IntegrityError``: the result of the run is missing.
        """
        if is_result:
            self._keep(*RESULT_FOLDERS)
            self._best.publish(step)
            result = (file for name in RESULT_FOLDERS for file in (self.path / name).rglob("*"))
            self._note(*(str(file.relative_to(self.path)) for file in result))
        else:
            self._best.complete(step)

    def rewind_to(self, step: int) -> None:
        """Drop everything after ``step``, from which the run resumes, and move the files of the former part away.

        Incomplete files are begun anew.
        """
        self._let_go()
        self.checkpoints.rewind_to(step)
        cut_metrics(self.path / METRICS, step)
        self.tables.rewind_to(step)
        self._note(METRICS, TABLES)
        self._best.rewind_to(step)
        self._parts.begin(step)

    def begin_anew(self) -> Path | None:
        """Put aside the files of a run that begins anew without a checkpoint; return their folder, None = no files."""
        self._let_go()
        return put_run_aside(self.path, [name for name in files_of_run(self.path) if name not in OF_COMMAND])

    def add_chunk(self, chunk: control_pb2.FileChunk) -> Path | None:
        """Append a chunk to a result file, of which several may grow together; return the path of a completed file.

        Raises ``IntegrityError``: the path leaves the folder, or the digest differs.
        """
        target = self._target(chunk.path)
        part = target.with_name(target.name + PART)
        with storage_errors(target):
            if chunk.path not in self._growing:
                drop_file(part)  # which may be a link that leads elsewhere
                self._growing[chunk.path] = FileJoiner(chunk.path, part.open("xb"), source="the coordinator")
            if not self._growing[chunk.path].add(chunk):
                self._growing[chunk.path].file.flush()
                return None
            self._growing.pop(chunk.path).file.close()
            if chunk.path.startswith(tuple(f"{name}/" for name in RESULT_FOLDERS)):
                self._keep(chunk.path)
            rename_durably(part, target)
        self._note(chunk.path)
        return target

    def _target(self, name: str) -> Path:
        target = self.path / name
        inside = target.resolve().is_relative_to(self.path.resolve())
        if not _PATH.fullmatch(name) or name.endswith(PART) or not inside:
            raise IntegrityError(f"the coordinator sent a file with the name {name!r}, which is not allowed")
        with storage_errors(target):
            make_folder(target.parent)
        return target


def require_no_links(folder: Path) -> None:
    """Refuse a run's folder with a link in place of one of its folders, through which files elsewhere would be removed.

    Raises ``UsageError``.
    """
    for name in (*_OWN_FOLDERS, f"{FOLDER}/{NODES}"):
        if (folder / name).is_symlink():
            raise UsageError(
                f"{folder / name} is a link, and a run writes and removes files in its own folder only; remove the "
                "link, or move what it names to its place"
            )


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def read_written(folder: Path) -> dict[str, list[int]]:
    """Read size and time of the files that a run has written; empty where that is not known."""
    try:
        return dict(read_json(folder / WRITTEN))
    except (OSError, ValueError, TypeError):
        return {}


def is_as_written(file: Path, written: list[int] | None, now: Iterable[Path]) -> bool:
    """Whether a file is as the run wrote it, or a present file of the run begins with its content.

    ``written`` are size and time when the run wrote it, None = not known; ``now`` are the present files of the run.
    """

    def begins_with_it(new: Path) -> bool:
        with file.open("rb") as begin, new.open("rb") as whole:
            return all(piece == whole.read(len(piece)) for piece in iter(lambda: begin.read(CHUNK_BYTES), b""))

    return _state(file) == written or any(is_plain_file(path) and begins_with_it(path) for path in now)


def lock_of(folder: Path) -> FileLock:
    """The lock of a run's folder, for every command that writes there."""
    busy = f"{{holder}} writes into {folder}; wait for its end, or choose another folder"
    return FileLock(folder / LOCK, busy=busy, is_reentrant=True)


@contextlib.contextmanager
def locked_for_resume(folder: Path) -> Iterator[None]:
    """Lock the folder of a run from the reading of it until the run resumes.

    Raises:
        UsageError: it is not the folder of a run.
        BusyError: another process writes there.
    """
    if not folder.is_dir():  # whoever reads it says so
        yield
        return
    require_free(folder, KIND)
    with lock_of(folder):
        yield


def remove_unused_folder(folder: Path) -> None:
    """Remove the folder of a run that has left no files but job, location, marker and lock."""
    ours = {_JOB, PLACE, marker(KIND), LOCK, WRITTEN}
    with contextlib.suppress(OSError):
        if {entry.name for entry in folder.iterdir()} <= ours:
            for name in ours:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def files_of_run(folder: Path) -> tuple[str, ...]:
    """List the files and folders of a run in a folder; none if the folder is missing.

    The plan is last: after an interrupted move of them all, the rest still counts as a run.

    Raises ``StorageError``: the path is no folder.
    """
    with storage_errors(folder):
        present = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    names = [name for name in present if name.removesuffix(PART) in _OWN_FILES + _OWN_FOLDERS]
    return tuple(sorted(names, key=lambda name: (name == _PLAN, name)))


def holds_run(names: Collection[str]) -> bool:
    """Whether files of a run are more than job, profile and log, which precede the plan."""
    return any(name.removesuffix(PART) in _OF_RUN for name in names)


def require_no_run(folder: Path, names: Sequence[str], *, replace: bool) -> None:
    """Refuse a folder with files of a run (``names``), unless they may be replaced.

    Raises ``UsageError``: they may not be replaced.
    """
    if holds_run(names) and not replace:
        first = [*sorted(names, key=lambda name: (name not in _OF_RUN, name))][:3]
        raise UsageError(
            f"{folder} already holds a run ({', '.join(first)}); choose another --out, or add --replace or --resume"
        )


def require_inputs_elsewhere(folder: Path, job: Job) -> None:
    """Refuse rows, a model or an adapter to begin from at a path that the run writes to.

    Raises ``UsageError``: names the key, the path and the remedy.
    """
    places = [(folder / name).resolve() for name in (*_OWN_FILES, *_OWN_FOLDERS)]
    inputs = {"data.train": job.data.train, "data.eval": job.data.eval, "model.path": job.model.path}
    start = job.adapter.from_
    if start and Path(start).resolve() == folder.resolve():
        raise UsageError(f"adapter.from = {start!r} is where the run writes its own files; give another --out")
    for key, text in (inputs | {"adapter.from": start}).items():
        path = Path(text).resolve()
        if text and any(path == place or place in path.parents for place in places):
            raise UsageError(f"{key} = {text!r} is where the run writes its own files; give another --out")


def put_run_aside(folder: Path, names: Iterable[str]) -> Path | None:
    """Move files of a run into a new folder beside it; return it, None if there was nothing to move.

    A log that is the output of this process stays.

    Raises ``StorageError``: it can't be made.
    """
    return put_aside(folder, [name for name in names if not _is_own_output(folder / name)], KIND)


def _is_own_output(path: Path) -> bool:
    """Whether the file is this process's standard output, as in a detached run."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl``; none where the file is missing.

    Raises ``IntegrityError``: a whole line is not readable; names it.
    """
    path = folder / METRICS
    try:
        text = read_given(path)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{path} can't be read ({error}); copy the run's folder again") from error
    whole = text[: text.rfind("\n") + 1]  # the rest is being written
    return [_line(line, f"{path}, line {number}") for number, line in enumerate(whole.splitlines(), start=1)]


_FIGURES: Final = {"step": int, "loss": int | float | None, "depth": int, "seconds": int | float, "bytes": dict}
"""Of a line of metrics, where it has them."""


def _line(text: str, where: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise IntegrityError(f"{where} is no JSON ({error}); copy the run's folder again") from error
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise IntegrityError(f"{where} is no JSON object with a kind; copy the run's folder again")
    require_kinds(value, _FIGURES, where)
    if is_step(value) and "step" not in value:
        raise IntegrityError(f"{where} has no step; copy the run's folder again")
    return value
