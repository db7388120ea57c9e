"""Saves and loads one run's shards at one node; the node's folder is locked during the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edge.checkpoint.retention import KEPT, RetentionLimits
from edge.checkpoint.snapshots import shard_digests
from edge.checkpoint.state_folder import LOCK_WAIT_S, RunShards, StateFolder
from ringtune.errors import (
    BusyError,
    DataError,
    DeadlineError,
    DivergedError,
    IntegrityError,
    InterruptedRunError,
    StorageError,
    UsageError,
)
from ringtune.ids import check_run_id
from ringtune.quantities import format_seconds
from ringtune.run_control.checkpoint import SavedPart, Shard
from ringtune.schedule.migration import Source
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import Piece, Pieces

_LOG = logging.getLogger(__name__)
_NO_FOLDER = "has no folder for checkpoints; start it with --state DIR"
_NO_FOLDER_FOR_STATE = (
    "has no folder for the optimizer state of inactive units; start it with --state DIR, or set hift.state = 'memory'"
)

NO_FOLDER_FOR_BEST = "has no folder for the best result; start it with --state DIR, or leave train.keep_best out"


class Saver:
    """Saves and loads the shards of a run; locks the node's folder from the first use until ``close``.

    Args:
        run_id: names the folder of the shards; the first run's, if it was resumed.
        rows: digest of the node's rows for this run; empty = it has none.
    """

    def __init__(
        self, folder: Path, run_id: str, plan: Plan, node: str, *, kept: RetentionLimits = KEPT, rows: str = ""
    ) -> None:
        self._folder, self._run_id = folder, run_id
        self._plan_digest, self._head_unit = plan.digest, plan.course.head
        self._node, self._kept, self._rows = node, kept, rows
        self._state: StateFolder | None = None
        self._digests: dict[int, str] = {}
        self._best_lock, self._best_step, self._is_over = threading.Lock(), 0, False

    def open(self, *, timeout_s: float = LOCK_WAIT_S) -> RunShards:
        """Lock the node's folder at the first call, return the run's shards; raises ``BusyError``, ``StorageError``."""
        if self._state is None:
            self._state = StateFolder(self._folder, self._node, timeout_s=timeout_s)
            self._state.drop_moments()
            self._state.run(self._run_id).reopen()
            self._state.drop_old_runs(self._run_id, self._kept)
        return self._state.run(self._run_id)

    def save(self, step: int, executor: Any, *, with_head: bool) -> tuple[Shard, Mapping[int, str]]:
        """Write this node's shard of the checkpoint at ``step``; return it, and the digests of its units.

        After a ``StorageError`` earlier ones are intact.
        """
        content = executor.shard(self._metadata(step), with_head=with_head)
        shards = self.open()
        shards.keep_rows(self._rows)
        shard = shards.write(step, content)
        self._digests[step] = shard.sha256
        return shard, shard_digests(content, self._head_unit)

    def saved_blocks(self, step: int, attempt: str, start: int, stop: int) -> Pieces:
        """Return blocks of the shard saved at ``step`` as a file of run ``attempt``; raises ``IntegrityError``."""
        return self.open().part(step, attempt, start, stop, sha256=self._digests[step])

    def keep_best(
        self, step: int, files: Mapping[str, Pieces], *, needed_steps: Collection[int] = (), timeout_s: float
    ) -> None:
        """Keep the node's part of the best result so far, see ``RunShards.keep_best``; from any thread.

        A call that is repeated, or late, waits for the one under way and writes nothing: the tensors may be others by
        then.

        Raises:
            DeadlineError: another call still writes after ``timeout_s`` seconds.
            InterruptedRunError: the run has ended.
            StorageError: the disk is full.
        """
        if not self._best_lock.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlineError(
                f"node {self._node}: waited {format_seconds(timeout_s)} for the best result of step {step}"
            )
        try:
            self._check_open()
            if step > self._best_step:
                checked = {name: self._until_over(content) for name, content in files.items()}
                self.open().keep_best(step, checked, needed_steps=needed_steps)
                self._best_step = step
        finally:
            self._best_lock.release()

    def _until_over(self, content: Pieces) -> Pieces:
        def read() -> Iterator[Piece]:
            for piece in content:
                self._check_open()
                yield piece

        return Pieces(content.size_bytes, read)

    def _check_open(self) -> None:
        if self._is_over:
            raise InterruptedRunError(f"the run ended before node {self._node} had kept its best result")

    def load(self, step: int, sha256: str, executor: Any, *, with_head: bool, plan_digest: str = "") -> None:
        """Load the shard of ``step`` with this hex digest into the executor.

        ``with_head`` says whether this node held the head at that step; ``plan_digest`` is of the plan under which the
        shard was written, empty = this run's plan. Raises ``IntegrityError``, ``DivergedError`` or ``DataError``.
        """
        shards = self.open()
        self.require_rows()
        content = shards.read(step, sha256)
        try:
            written = self._metadata(step) | ({"plan_digest": plan_digest} if plan_digest else {})
            executor.load_shard(content, written, with_head=with_head)
        except (IntegrityError, DivergedError) as error:
            raise type(error)(f"node {self._node}, {shards.path(step)}: {error}") from error

    def require_rows(self) -> None:
        """Refuse rows of this owner that differ from those of the run's start; raises ``DataError``."""
        if self._rows:
            _refuse_other_rows(self._node, self.open().rows(), self._rows)

    def keep_from(self, step: int) -> None:
        """Delete shards, copies and heads of steps before ``step``."""
        self.open().keep_from(step)

    @property
    def place(self) -> tuple[str, str]:
        """The run id under which shards are kept, and the digest of the node's rows; empty = it has none."""
        return self._run_id, self._rows

    def close(self, *, is_finished: bool = False) -> None:
        """Release the lock, so that another process may use the folder.

        With ``is_finished`` the run ended well, and the retention rule may remove its shards.
        """
        if self._state is None:
            return
        self._is_over = True
        try:
            with self._best_lock:  # another run may use the folder after this
                self._state.drop_moments()
                if is_finished:
                    self._state.run(self._run_id).finish()
        except StorageError as error:
            _LOG.warning("node %s keeps the shards of run %s for ever: %s", self._node, self._run_id, error)
        finally:
            self._state.close()

    def _metadata(self, step: int) -> dict[str, str]:
        return {"run_id": self._run_id, "plan_digest": self._plan_digest, "node": self._node, "step": str(step)}


class ShardRequest(NamedTuple):
    """A node's shard of a checkpoint, as the manifest names it."""

    step: int
    sha256: str


class SavedStart(NamedTuple):
    """The blocks from which a node resumes, where they lie on the disks of several nodes.

    Attributes:
        head_sha256: digest of the shard that has the head; empty = a head file beside the shards.
        head_from: at an owner where every owner has embedding and head: the node that has them on its disk.
        digests: of units as they were trained; a unit without one is not checked.
    """

    attempt: str
    sources: tuple[Source, ...]
    head_sha256: str = ""
    head_from: str = ""
    digests: Mapping[int, str] = {}


class ResumeShard(NamedTuple):
    """The shard from which a resumed run continues, and the holder of its head.

    Attributes:
        run_id: the run that wrote the shard; later shards are kept under it too.
        plan_digest: of the plan under which the shard was written; empty = that of the run.
        saved: sources of the blocks in place of the shard; None = the shard has them.
    """

    run_id: str
    shard: ShardRequest
    holder: str
    plan_digest: str = ""
    saved: SavedStart | None = None


def open_saver(
    state: Path | None,
    plan: Plan,
    node: str,
    run_id: str,
    *,
    is_resumed: bool,
    timeout_s: float,
    keeps_state: bool = False,
    keeps_best: bool = False,
    kept: RetentionLimits = KEPT,
    rows: str = "",
) -> Saver | None:
    """Make the saver of a run; None if this node has no folder and needs none.

    The folder is locked at once if the plan asks for checkpoints, the run is resumed, or the optimizer state of
    inactive units (``keeps_state``) or the best result is kept there. The other arguments are as for ``Saver``.

    Raises ``UsageError`` where a folder is needed and there is none, ``BusyError`` and ``StorageError``.
    """
    is_needed = is_resumed or plan.course.checkpoint_every > 0 or keeps_state or keeps_best
    if state is None:
        if is_needed:
            lacks = _NO_FOLDER_FOR_STATE if keeps_state else NO_FOLDER_FOR_BEST if keeps_best else _NO_FOLDER
            raise UsageError(f"node {node} {lacks}")
        return None
    saver = Saver(state, run_id, plan, node, kept=kept, rows=rows)
    if is_needed:
        saver.open(timeout_s=timeout_s)
    return saver


def check_shards(
    state: Path | None, node: str, run_id: str, requests: Sequence[ShardRequest], *, timeout_s: float
) -> list[str]:
    """Describe the damage of each of these shards on the disk, empty = none; raises ``BusyError``, ``StorageError``."""
    if state is None:
        return [f"node {node} {_NO_FOLDER}"] * len(requests)
    with StateFolder(state, node, timeout_s=timeout_s) as folder:
        shards = folder.run(run_id)
        return [shards.problem(entry.step, entry.sha256) for entry in requests]


def saved_parts(state: Path | None, node: str, run_id: str) -> RunShards | None:
    """Return the files of a run for reading, without a lock; None where the node has no folder."""
    return RunShards(state / check_run_id(run_id), node) if state is not None else None


def require_rows(state: Path | None, node: str, run_id: str, rows: str) -> None:
    """Refuse rows whose digest differs from that of a run's start, if the node's folder has it."""
    if (shards := saved_parts(state, node, run_id)) is not None:
        _refuse_other_rows(node, shards.rows(), rows)


def _refuse_other_rows(node: str, kept: str, rows: str) -> None:
    if kept not in ("", rows):
        raise DataError(
            f"owner {node}: its rows, or their order, are not those that the run began with, so it would not go on as "
            "it was; put the files back as they were, or train anew without --resume"
        )


def list_parts(state: Path | None, node: str, run_id: str) -> tuple[SavedPart, ...]:
    """List the intact copies and heads beside the shards of a run."""
    parts = saved_parts(state, node, run_id)
    return parts.parts() if parts is not None else ()


def finish_run(state: Path | None, node: str, run_id: str) -> None:
    """Mark a run as finished, so that the retention rule may remove its shards; a failure is only logged."""
    if state is None:
        return
    try:
        with StateFolder(state, node) as folder:
            folder.run(run_id).finish()
    except (BusyError, StorageError) as error:
        _LOG.warning("node %s keeps the shards of run %s for ever: %s", node, run_id, error)
