"""Keep the shards of a node's newest runs on its disk, written whole or not at all, checked by digest.

::

    STATE/lock                          held by the process that writes here
    STATE/<run id>/step-<N>.safetensors

A shard alone is no checkpoint: the submitter's manifest makes it one. So a node never drops a shard by itself;
it is told from which step on they are needed. Of runs, the newest ``KEPT_RUNS`` stay.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from ringtune.errors import BusyError, IntegrityError, StorageError
from ringtune.files.durable import make_folder, remove_partial_files, storage_errors, write_durably
from ringtune.ids import check_run_id
from ringtune.rounds.checkpoint import Shard

_LOG = logging.getLogger(__name__)
KEPT_RUNS = 8
LOCK_WAIT_S = 10.0
_NAME = re.compile(r"step-(\d+)\.safetensors")


class StateFolder:
    """A node's folder, locked: one process writes there at a time, and a killed one leaves no lock.

    Args:
        path: of the folder; made if it is missing.
        timeout_s: how long to wait for a process that still has it (a killed run's agent is about to end).

    Raises:
        BusyError: another process has it.
        StorageError: it can't be made or written.
    """

    def __init__(self, path: Path, *, timeout_s: float = LOCK_WAIT_S) -> None:
        self.path = path
        with storage_errors(path):
            make_folder(path)
        self._lock = FileLock(path / "lock", thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(max(0.0, min(timeout_s, LOCK_WAIT_S)))
        except Timeout as error:
            raise BusyError(
                f"another agent uses the folder {path}; end it or give this node its own with --state"
            ) from error
        except OSError as error:  # no right to write, or a file system without locks
            raise StorageError(f"can't lock {path}: {error.strerror}; give another --state") from error

    def close(self) -> None:
        """Release the lock, so that another process may use the folder."""
        self._lock.release()

    def __enter__(self) -> StateFolder:
        """Return the folder, which is locked already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self.close()

    def run(self, run_id: str) -> RunShards:
        """Return the shards of a run.

        Raises:
            UsageError: the run id is none.
        """
        return RunShards(self.path / check_run_id(run_id))

    def drop_old_runs(self, current: str) -> None:
        """Delete the shards of all runs but the current one and the newest others, ``KEPT_RUNS`` in all.

        Run ids sort by time. Partial files that a crash left of the current run go too.
        """
        others = sorted(entry.name for entry in self.path.iterdir() if entry.is_dir() and entry.name != current)
        for name in others[: -(KEPT_RUNS - 1)]:
            shutil.rmtree(self.path / name, ignore_errors=True)
        remove_partial_files(self.path / current)


class RunShards:
    """The shards of one run at one node.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Path of the shard of a step."""
        return self.folder / f"step-{step}.safetensors"

    def steps(self) -> tuple[int, ...]:
        """List the steps that have a shard, ascending."""
        if not self.folder.is_dir():
            return ()
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return tuple(sorted(int(match[1]) for match in found if match))

    def write(self, step: int, content: bytes, *, node: str) -> Shard:
        """Write a shard to the disk; once this returns, the shard survives a power cut.

        Raises:
            StorageError: no room; shards that were there are intact.
        """
        try:
            write_durably(self.path(step), content)
        except StorageError as error:
            raise StorageError(f"node {node} did not save step {step}: {error}") from error
        return Shard(node=node, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))

    def read(self, step: int, sha256: str, *, node: str) -> bytes:
        """Read a shard and check its digest.

        Raises:
            IntegrityError: the shard is missing or has another digest; names it.
        """
        path = self.path(step)
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise IntegrityError(f"node {node} has no shard {path}") from error
        except OSError as error:
            raise IntegrityError(f"node {node} can't read its shard {path}: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise IntegrityError(f"node {node}: shard {path} is damaged (its digest differs)")
        return content

    def problem(self, step: int, sha256: str, *, node: str) -> str:
        """Describe what is wrong with a shard; empty if it is intact."""
        try:
            self.read(step, sha256, node=node)
        except IntegrityError as error:
            return str(error)
        return ""

    def keep_from(self, step: int) -> None:
        """Delete the shards of steps before ``step``."""
        for old in self.steps():
            if old < step:
                self.path(old).unlink(missing_ok=True)
