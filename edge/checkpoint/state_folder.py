"""State folder of a node: shards of its newest runs, and other files of a run beside them.

::

    STATE/.ringtune-node                marker: the folder was absent or empty at a node's first use
    STATE/lock                          held by the process that writes here
    STATE/<run id>/step-<N>.safetensors
    STATE/<run id>/copy-<step>-<attempt>-<sha256>.safetensors    some blocks, with moments and counts
    STATE/<run id>/head-<step>-<attempt>-<sha256>                the head, as owners hand it over
    STATE/<run id>/best-<step>-<file>   the node's part of a best result, as it is collected at the run's end
    STATE/<run id>/best-<step>.json     written last: digest by file
    STATE/<run id>/moments/             optimizer state of inactive units, during the run
    STATE/<run id>/hidden/              activation cache, during the run
    STATE/<run id>/rows                 digest of the owner's rows at the run's start
    STATE/<run id>/texts.jsonl          texts of the newest evaluation, at their owner; see ``[generation]``
    STATE/<run id>/finished             made when the run ended well

Shards, copies and heads are written atomically, and checked by their digests; a copy or head has its digest in its
name, so that damage is found without a manifest. ``attempt`` is the run that trained it: the run of the folder's name,
or one that resumed it. A node writes copies of other nodes' parts at a checkpoint, and all ends of turns that it has in
memory at the loss of the coordinator.

A shard alone is no checkpoint: the submitter's manifest makes it one. So the coordinator decides from which step on a
node keeps shards. A run that can be resumed stays whole, as its shards are the only way to resume it;
``edge.checkpoint.retention`` limits finished runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from edge.checkpoint.retention import KEPT, FinishedRun, RetentionLimits
from edge.checkpoint.snapshots import HEAD, block_of, file_blocks, metadata, write_blocks
from ringtune.errors import IntegrityError, StorageError
from ringtune.ids import check_run_id, is_run_id
from ringtune.quantities import format_bytes
from ringtune.run_control.checkpoint import SavedPart, Shard
from ringtune.storage.durable import (
    PARTIAL_SUFFIX,
    FileLock,
    claim,
    drop_file,
    is_claimed,
    is_plain_file,
    make_private_folder,
    mark,
    marker,
    move_folder_aside,
    remove_partial_files,
    require_free,
    storage_errors,
    write_durably,
    write_pieces_durably,
)
from ringtune.storage.pieces import FilePieces, Piece, Pieces
from ringtune.storage.strict import read_object
from ringtune.storage.tensor_files import TensorFile, TensorPieces
from ringtune.techniques.generation import TEXTS
from ringtune.transport.parties import node_trust

_LOG = logging.getLogger(__name__)
LOCK_WAIT_S = 10.0
_NAME = re.compile(r"step-(?P<step>\d{1,18})\.safetensors")
_ANY_NAME = re.compile(".*", re.DOTALL)
_LOCK = "lock"
KIND = "node"
CACHE_FILE = "profile.json"
"""Cached timings; see ``edge.profiler.timing``."""

_FINISHED = "finished"
_ROWS = "rows"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOMENTS = "moments"
_HIDDEN = "hidden"
_OF_RUN = ("step-", "copy-", "head-", "best-", _MOMENTS, _HIDDEN, _ROWS, TEXTS, _FINISHED)


class StateFolder:
    """A node's folder, locked: one process writes there at a time, and the end of a process releases its lock.

    Args:
        path: made if missing.
        timeout_s: longest wait for the lock, which a killed run's agent may hold until its end; at most
            ``LOCK_WAIT_S``.

    Raises:
        BusyError: another process has the lock.
        StorageError: the folder can't be made or written.
    """

    def __init__(self, path: Path, node: str, *, timeout_s: float = LOCK_WAIT_S) -> None:
        self.path, self.node = path, node
        make_private_folder(path, is_ours=_is_ours)
        busy = f"another agent, {{holder}}, uses the folder {path}; end it or give this node its own with --state"
        self._lock = FileLock(path / _LOCK, busy=busy)
        self._lock.acquire(wait_s=min(timeout_s, LOCK_WAIT_S))

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> StateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, run_id: str) -> RunShards:
        """Return the shards of a run; raises ``UsageError``."""
        return RunShards(self.path / check_run_id(run_id), self.node)

    def drop_old_runs(self, current: str, kept: RetentionLimits = KEPT) -> None:
        """Delete the shards of finished runs beyond the limits ``kept``; never those of unfinished runs or ``current``.

        Partial files of a crash are deleted too. Unfinished runs that take more than the allowed size are counted in a
        warning, because only the user knows whether they will be resumed.
        """
        runs = {entry.name: RunShards(entry, self.node) for entry in self._run_folders()}
        for shards in runs.values():
            remove_partial_files(shards.folder)
        finished = [run for name, shards in runs.items() if name != current and (run := shards.finished_run())]
        for old in kept.to_drop(finished, now_unix_s=time.time()):
            _LOG.info("the shards of run %s are dropped: it is finished, and its room or time is up", old.run_id)
            shutil.rmtree(self.path / old.run_id, ignore_errors=True)
        self._warn_of_unfinished(runs, current, kept)

    def drop_moments(self) -> None:
        """Remove optimizer state and hidden states of all runs, also of a killed process; no run may be active here."""
        for entry in self._run_folders():
            shards = RunShards(entry, self.node)
            if shards.moments.is_dir() or shards.hidden.is_dir():
                shutil.rmtree(shards.moments, ignore_errors=True)
                shutil.rmtree(shards.hidden, ignore_errors=True)
                with contextlib.suppress(OSError):  # the folder has shards
                    entry.rmdir()

    def _run_folders(self) -> list[Path]:
        folders = (entry for entry in self.path.iterdir() if entry.is_dir() and not entry.is_symlink())
        return sorted(entry for entry in folders if is_run_id(entry.name))

    def _warn_of_unfinished(self, runs: Mapping[str, RunShards], current: str, kept: RetentionLimits) -> None:
        open_runs = [name for name, shards in runs.items() if name != current and not shards.is_finished()]
        held_bytes = sum(runs[name].size_bytes() for name in open_runs)
        if held_bytes > kept.size_bytes:
            _LOG.warning(
                "%d runs that never finished keep %s in %s, the oldest is %s; remove the folders of those that nobody "
                "goes on with",
                len(open_runs),
                format_bytes(held_bytes),
                self.path,
                open_runs[0],
            )


def _is_ours(name: str) -> bool:
    """Whether an entry of a node's folder has a name that nodes write, whole or in part."""
    return name == _LOCK or is_run_id(name) or name.startswith((CACHE_FILE, marker(KIND), ".measure-"))


def require_state_folder(folder: Path) -> None:
    """Refuse a folder that is neither empty nor a node's; writes nothing; raises ``UsageError`` or ``StorageError``.

    Earlier versions wrote no marker; their folder has shards, or no entries but a node's.
    """
    if folder.is_dir() and not _is_of_earlier_version(folder):
        require_free(folder, KIND)


def claim_state_folder(folder: Path) -> None:
    """Make a folder and mark it as a node's, unless it is one; see ``require_state_folder``.

    Raises:
        UsageError: the folder has other content.
        StorageError: the folder can't be made.
    """
    if folder.is_dir() and _is_of_earlier_version(folder):
        mark(folder, KIND)
    claim(folder, KIND)


def _is_of_earlier_version(folder: Path) -> bool:
    """Whether a folder without a marker has shards, or only entries of a node."""
    if is_claimed(folder, KIND):
        return False
    with storage_errors(folder):
        entries = list(folder.iterdir())
        runs = [entry for entry in entries if is_run_id(entry.name) and entry.is_dir()]
        of_runs = [path.name for run in runs for path in run.iterdir()]
    if any(map(_NAME.fullmatch, of_runs)):
        return True
    is_known = all(_is_ours(entry.name) or entry == node_trust(folder) for entry in entries)
    return is_known and all(name.startswith(_OF_RUN) for name in of_runs)


def room_bytes(folder: Path) -> int | None:
    """Return the bytes that a run may take in a node's folder; None if they can't be determined.

    Optimizer state and hidden states of a killed run count as free, because the next run removes them.
    """
    try:
        free_bytes = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        scratch = itertools.chain(folder.glob(f"*/{_MOMENTS}/*"), folder.glob(f"*/{_HIDDEN}/*"))
        left = [path.stat().st_size for path in scratch]
    except OSError:
        return None
    return free_bytes + sum(left)


def disk_of(folder: Path) -> str:
    """Name the disk of a node's folder, the same for all nodes of this machine; empty if it can't be determined.

    Example: ``0f3c...:65025``, the machine's boot id and the device number.
    """
    try:
        started = _BOOT.read_text(encoding="ascii").strip()
        return f"{started}:{(folder if folder.exists() else folder.parent).stat().st_dev}"
    except (OSError, UnicodeDecodeError):
        return ""


_BEST_NAME: Final = re.compile(rf"best-(\d{{1,18}})(?:-.+(?<!{re.escape(PARTIAL_SUFFIX)})|\.json)")
_PART_NAME: Final = re.compile(
    r"(copy|head)-(?P<step>\d{1,18})-(r[0-9-]{16}[0-9a-f]{8})-([0-9a-f]{64})(?:\.safetensors)?"
)
_MAX_STEPS: Final = 8
"""Newest steps of which a node lists its files: more than two checkpoints and three ends of turns."""


class _File(NamedTuple):
    """The parts of a file's name."""

    path: Path
    is_head: bool
    step: int
    attempt: str
    sha256: str


class RunShards:
    """The shards of one run at ``node`` in ``folder``, with copies, heads and best results beside them.

    Attributes:
        moments: the folder for optimizer state of inactive units.
        hidden: the folder for hidden states of the activation cache.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self.folder, self.node = folder, node
        self.moments, self.hidden = folder / _MOMENTS, folder / _HIDDEN

    def texts(self) -> Path:
        """Path of the file of texts, in a folder that is made if it is missing; raises ``StorageError``."""
        with storage_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        return self.folder / TEXTS

    def path(self, step: int) -> Path:
        """Path of the shard of a step."""
        return self.folder / f"step-{step}.safetensors"

    def steps(self) -> tuple[int, ...]:
        """List the steps that have a shard, ascending."""
        return tuple(sorted(int(match[1]) for match, _ in self.files(_NAME)))

    def size_bytes(self) -> int:
        """Bytes of all shards, copies, heads and marks."""
        return sum(path.stat().st_size for _, path in self.files(_ANY_NAME))

    def files(self, names: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
        """List the files with such names, in their order, each with its match; links and folders are ignored."""
        if self.folder.is_symlink() or not self.folder.is_dir():
            return []
        matches = ((names.fullmatch(path.name), path) for path in sorted(self.folder.iterdir()))
        return [(match, path) for match, path in matches if match and is_plain_file(path)]

    def rows(self) -> str:
        """Return the digest of the owner's rows at the run's start; empty if none was kept."""
        try:
            return (self.folder / _ROWS).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""

    def keep_rows(self, digest: str) -> None:
        """Keep the digest of the owner's rows, unless there is one already; raises ``StorageError``."""
        if digest and not self.rows():
            write_durably(self.folder / _ROWS, digest.encode())

    def finish(self) -> None:
        """Mark the run as finished, so that the retention rule may remove its shards; raises ``StorageError``."""
        if self.folder.is_dir():
            write_durably(self.folder / _FINISHED, b"")

    def reopen(self) -> None:
        """Remove the mark of a finished run that is resumed."""
        with storage_errors(self.folder):
            (self.folder / _FINISHED).unlink(missing_ok=True)

    def is_finished(self) -> bool:
        """Whether the run is marked as finished."""
        return (self.folder / _FINISHED).exists()

    def finished_run(self) -> FinishedRun | None:
        """Return size and end of a finished run; None for a run that may be resumed."""
        if not self.is_finished():
            return None
        ended_unix_s = (self.folder / _FINISHED).stat().st_mtime
        return FinishedRun(self.folder.name, ended_unix_s, self.size_bytes())

    def write(self, step: int, content: Pieces) -> Shard:
        """Write a shard to the disk, safe from a power cut; after a ``StorageError`` earlier shards are intact."""
        try:
            sha256 = _write_with_digest(self.path(step), content)
        except StorageError as error:
            raise StorageError(f"node {self.node} did not save step {step}: {error}") from error
        return Shard(node=self.node, sha256=sha256, size_bytes=content.size_bytes)

    def read(self, step: int, sha256: str) -> Pieces:
        """Check a shard's digest; return its content, which is read from the disk again when iterated.

        Raises ``IntegrityError``: the shard is missing, a link or folder, or has another digest; names it.
        """
        path = self.path(step)
        try:
            if self.folder.is_symlink() or ((path.is_symlink() or path.exists()) and not is_plain_file(path)):
                raise IntegrityError(f"node {self.node}: shard {path} is damaged (a link or folder is in its place)")
            if not path.exists():
                raise IntegrityError(f"node {self.node} has no shard {path}")
            content = FilePieces(path)
        except OSError as error:
            raise IntegrityError(f"node {self.node} can't read its shard {path}: {error.strerror}") from error
        if content.sha256() != sha256:
            raise IntegrityError(f"node {self.node}: shard {path} is damaged (its digest differs)")
        return content

    def problem(self, step: int, sha256: str) -> str:
        """Describe the damage of a shard; empty if it is intact."""
        try:
            self.read(step, sha256)
        except IntegrityError as error:
            return str(error)
        return ""

    def keep_from(self, step: int) -> None:
        """Delete shards, copies and heads of steps before ``step``."""
        for names in (_NAME, _PART_NAME):
            for match, path in self.files(names):
                if int(match["step"]) < step:
                    drop_file(path)

    # ---- copies and heads -------------------------------------------------------------------------

    def write_part(self, step: int, attempt: str, content: bytes | Pieces, *, is_head: bool) -> None:
        """Write trained blocks, or the head, to the disk, unless the same file is there; raises ``StorageError``."""
        kind, end = ("head", "") if is_head else ("copy", ".safetensors")
        pieces = content if isinstance(content, Pieces) else Pieces.of(content)
        path = self.folder / f"{kind}-{step}-{attempt}-{pieces.sha256()}{end}"
        if not path.exists():
            write_pieces_durably(path, pieces)

    # ---- best results -----------------------------------------------------------------------------

    def keep_best(self, step: int, files: Mapping[str, Pieces], *, needed_steps: Collection[int] = ()) -> None:
        """Write the node's part of the best result so far, that of ``step``; those of ``needed_steps`` stay, others go.

        Raises ``StorageError``: the disk is full.
        """
        for old, path in self._best_files():
            if old == step or old not in needed_steps:
                drop_file(path)
        digests = {name: _write_with_digest(self._best_path(step, name), content) for name, content in files.items()}
        write_durably(self._best_index(step), json.dumps(digests).encode())

    def best(self, step: int) -> dict[str, Pieces]:
        """Return the node's part of the best result of ``step`` by file name; raises ``IntegrityError``."""
        contents: dict[str, Pieces] = {}
        try:
            digests = read_object(self._best_index(step).read_text(encoding="utf-8"), str(self._best_index(step)))
            for name, digest in digests.items():
                contents[name] = content = FilePieces(self._best_path(step, name))
                if content.sha256() != digest:
                    raise IntegrityError(f"{self._best_path(step, name)} is damaged (its digest differs)")
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"node {self.node} has no best result of step {step} on its disk: {error}") from error
        return contents

    def _best_files(self) -> list[tuple[int, Path]]:
        return [(int(match[1]), path) for match, path in self.files(_BEST_NAME)]

    def _best_index(self, step: int) -> Path:
        return self.folder / f"best-{step}.json"

    def _best_path(self, step: int, name: str) -> Path:
        return self.folder / f"best-{step}-{name}"

    # ---- reading ----------------------------------------------------------------------------------

    def parts(self) -> tuple[SavedPart, ...]:
        """List the intact files of the newest steps, and best results; a damaged one is logged and left out."""
        files = list(self._files())
        newest = sorted({file.step for file in files})[-_MAX_STEPS:]
        parts = (self._checked(file) for file in files if file.step in newest)
        best_steps = sorted({step for step, _ in self._best_files()})
        return (*filter(None, parts), *filter(None, map(self._checked_best, best_steps)))

    def _checked_best(self, step: int) -> SavedPart | None:
        try:
            self.best(step)
        except IntegrityError as error:
            _LOG.warning("node %s: %s", self.node, error)
            return None
        return SavedPart(step, "", is_best=True)

    def _checked(self, file: _File) -> SavedPart | None:
        try:
            if file.is_head:
                self._content(file)
                return SavedPart(file.step, file.attempt, has_head=True)
            return SavedPart(file.step, file.attempt, blocks=tuple(sorted(file_blocks(self._tensors(file)))))
        except (IntegrityError, OSError) as error:
            _LOG.warning("node %s: %s", self.node, error)
            return None

    def part(self, step: int, attempt: str, start: int, stop: int, *, sha256: str = "") -> Pieces:
        """Return the blocks ``[start, stop)`` of run ``attempt`` after ``step`` steps as one file, read when iterated.

        They are in the shard with digest ``sha256``; empty = in copies. Raises ``IntegrityError``.
        """
        tensors: dict[str, TensorPieces] = {}
        missing = set(range(start, stop))
        for file in [self._shard(step, sha256)] if sha256 else self._tensor_files(step, attempt):
            taken = missing & file_blocks(file)
            tensors |= {name: file.tensor(name) for name in file.infos if block_of(name) in taken}
            missing -= taken
        if missing:
            raise IntegrityError(
                f"node {self.node} has no whole file with blocks {sorted(missing)} of run {attempt} after step {step}"
            )
        return write_blocks(tensors, range(start, stop), metadata(attempt, step))

    def head(self, step: int, attempt: str, *, sha256: str = "") -> Pieces:
        """Return the head after ``step`` steps: of the shard with digest ``sha256`` if it has one, else of a head file.

        Raises ``IntegrityError``: the head is damaged or missing.
        """
        if sha256:
            shard = self._shard(step, sha256)
            if HEAD in shard.infos:
                return shard.tensor(HEAD).data
        for file in self._files():
            if file.is_head and (file.step, file.attempt) == (step, attempt):
                return self._content(file)
        raise IntegrityError(f"node {self.node} has no head of run {attempt} after step {step}")

    def _shard(self, step: int, sha256: str) -> TensorFile:
        return TensorFile(self.read(step, sha256), where=str(self.path(step)))

    def _tensor_files(self, step: int, attempt: str) -> Iterator[TensorFile]:
        for file in self._files():
            if not file.is_head and (file.step, file.attempt) == (step, attempt):
                try:
                    yield self._tensors(file)
                except (IntegrityError, OSError) as error:  # another file may have its blocks
                    _LOG.warning("node %s: %s", self.node, error)

    def _tensors(self, file: _File) -> TensorFile:
        return TensorFile(self._content(file), where=str(file.path))

    def _content(self, file: _File) -> Pieces:
        content = FilePieces(file.path)
        if content.sha256() != file.sha256:
            raise IntegrityError(f"{file.path} is damaged (its digest differs), so it is not used")
        return content

    def _files(self) -> Iterator[_File]:
        for match, path in self.files(_PART_NAME):
            yield _File(path, match[1] == "head", int(match[2]), match[3], match[4])


def _write_with_digest(path: Path, content: Pieces) -> str:
    """Write a file piece by piece and return its digest; raises ``StorageError`` if the disk is full."""
    digest = hashlib.sha256()

    def digested() -> Iterator[Piece]:
        for piece in content:
            digest.update(piece)
            yield piece

    move_folder_aside(path)
    write_pieces_durably(path, digested())
    return digest.hexdigest()
