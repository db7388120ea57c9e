"""Snapshots at the ends of train turns: copied to the next host in the ring, and saved at the loss of the coordinator.

::

    compute thread   trained tensors -> a file in ``TurnSnapshots`` of this node
    own thread       that file -> next host, a helper's -> the hosts of the blocks, and the head -> next owner, if the
                     turn is this node's; once all have arrived, the node reports the turn as done
    checkpoint       copies from other nodes of that step are written to this disk before they are acknowledged

Before a node without coordinator releases its run, it writes all snapshots in its memory to its disk: one of them is of
the last turn that every node had done, and only the coordinator's records say which.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from edge.checkpoint.snapshot_servicer import push
from edge.checkpoint.snapshots import Save, SnapshotFile, TurnSnapshots, block_digests, metadata
from edge.checkpoint.state_folder import StateFolder
from ringtune.errors import BusyError, ConnectionFailedError, IntegrityError, RingTuneError, StorageError
from ringtune.schedule.migration import copies_of, copy_holders, head_holders, trained_blocks
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn
from ringtune.storage.pieces import Piece, Pieces
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.5


class _Copy(NamedTuple):
    """A file for ``holder``, which ``content`` reads, and a function to call after its arrival."""

    step: int
    content: Callable[[], Pieces]
    holder: str
    is_head: bool
    then: Callable[[], None]
    is_saved: bool = False


class CopySender:
    """Sends copies to other nodes, one after the other on a thread of its own.

    Args:
        patience_s: seconds of retries before the holder of a copy counts as lost.
        on_lost: called with a node that takes no copy, and the reason.
        on_failed: called with the error where this node can't read what it sends.
    """

    def __init__(
        self,
        run_id: str,
        node: str,
        placement_number: int,
        *,
        addresses: Mapping[str, str],
        patience_s: float,
        on_lost: Callable[[str, str], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        self._run_id, self._node, self._placement_number = run_id, node, placement_number
        self._addresses, self._patience_s = addresses, patience_s
        self._on_lost, self._on_failed = on_lost, on_failed
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._send_all, name=f"copies-{self._node}", daemon=True).start()

    def put(self, copy: _Copy) -> None:
        """Queue a copy."""
        self._copies.put(copy)

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._copies.put(None)

    # ---- on its own thread ------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (copy := self._copies.get()) is not None and not self._closed.is_set():
            unread: list[IntegrityError] = []
            try:
                self._send(copy, _noting(copy, unread))
            except RingTuneError as error:
                if unread:
                    self._on_failed(unread[0])
                elif not self._closed.is_set():
                    self._on_lost(copy.holder, f"it takes no copy of what was trained: {error}")
                return
            copy.then()

    def _send(self, copy: _Copy, content: Pieces) -> None:
        """Send a copy; retry for ``patience_s`` while the holder can't be reached."""
        deadline_s = time.monotonic() + self._patience_s
        terms = control_pb2.KeepChunk(
            run_id=self._run_id,
            step=copy.step,
            node=self._node,
            is_head=copy.is_head,
            is_saved=copy.is_saved,
            placement_number=self._placement_number,
        )
        while True:
            try:
                push(terms, content, copy.holder, self._addresses.get(copy.holder, ""), self._patience_s)
            except ConnectionFailedError as error:
                if self._closed.is_set() or time.monotonic() > deadline_s:
                    raise
                _LOG.info("node %s takes no copy yet: %s", copy.holder, error)
            else:
                return
            self._closed.wait(_RETRY_S)


def _noting(copy: _Copy, problems: list[IntegrityError]) -> Pieces:
    """Return the content of a copy; what is damaged on this node's disk is noted before the error is raised."""

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except IntegrityError as error:
            problems.append(error)
            raise

    def read() -> Iterator[Piece]:
        with noted():
            yield from content

    with noted():
        content = copy.content()
    return Pieces(content.size_bytes, read)


class CheckpointCopier:
    """Copies a host's blocks of each checkpoint to the disks of other hosts, where all parameters train.

    Every owner has embedding and head in its own shard, so only blocks are copied. The checkpoint's turn is done once
    all copies are on other disks.
    """

    def __init__(self, plan: Plan, node: str, blocks: Callable[[int], Pieces], sender: CopySender) -> None:
        self._holders, self._blocks, self._sender = copy_holders(plan.placement, node), blocks, sender
        if self._holders:
            sender.start()

    def copy_outgoing_head(self, index: int, turns: Iterable[Turn]) -> None:
        """Do nothing: the head is not handed over."""

    def end(self, turn: Turn, then: Callable[[Mapping[int, str]], None]) -> None:
        """Copy the blocks of a checkpoint; call ``then`` after all arrivals, at once for other turns."""
        if turn.kind is not StepKind.CHECKPOINT or not self._holders:
            then({})
            return
        step = turn.first_step
        read = functools.partial(self._blocks, step)
        for holder in self._holders:
            last = functools.partial(then, {}) if holder == self._holders[-1] else _nothing
            self._sender.put(_Copy(step, read, holder, is_head=False, then=last, is_saved=True))

    def close(self) -> None:
        """Send no more copies."""
        self._sender.close()


class TurnSnapshotter:
    """Keeps and copies the ends of the turns of one run at one node, in one placement.

    Args:
        make_file: makes a file of the trained tensors of some blocks, from executor, blocks and metadata.
        save: writes a file to this node's disk; None = it has none.
    """

    def __init__(
        self,
        run_id: str,
        node: str,
        plan: Plan,
        executor: Any,
        kept: TurnSnapshots,
        *,
        make_file: Callable[[Any, tuple[int, ...], Mapping[str, str]], bytes],
        sender: CopySender,
        save: Save | None = None,
    ) -> None:
        self._run_id, self._node, self._plan, self._executor = run_id, node, plan, executor
        self._kept, self._make_file, self._sender, self._save = kept, make_file, sender, save
        self._copies = copies_of(plan.placement, node)
        self._head_holders = head_holders(plan.course, plan.placement, node)
        self._heads: dict[int, bytes] = {}
        kept.begin(run_id)
        if self._copies or self._head_holders:
            sender.start()

    # ---- on the compute thread --------------------------------------------------------------------

    def copy_outgoing_head(self, index: int, turns: Iterable[Turn]) -> None:
        """Copy the head before its hand-over to the owner of turn ``index``, for the last train turn of this owner."""
        mine = [turn.index for turn in turns if turn.kind is StepKind.TRAIN and turn.owner == self._node]
        done = max((turn for turn in mine if turn < index), default=None)
        if done is not None:
            self._heads[done] = bytes(self._executor.head_blob())

    def end(self, turn: Turn, then: Callable[[Mapping[int, str]], None]) -> None:
        """Keep the trained blocks and the head at the end of a turn; call ``then`` after the arrival of all copies.

        ``then`` gets the digests of what was copied, computed on the sender's thread: beside the next turn's work.
        """
        if turn.kind is StepKind.CHECKPOINT and self._save is not None:
            self._kept.save_at(turn.first_step, self._save, with_head=turn.owner != self._node)
        if turn.kind is not StepKind.TRAIN:
            then({})
            return
        blocks, step = trained_blocks(self._plan.course, self._plan.placement, self._node, turn), turn.end_step
        head = self._heads.pop(turn.index, None)
        if turn.owner == self._node and head is None:
            head = bytes(self._executor.head_blob())
        files: list[tuple[bytes, tuple[str, ...], bool]] = []
        if self._head_holders and head is not None:
            files.append((head, self._head_holders, True))
        kept = set[int]()
        for part, holders in self._parts(blocks).items():
            file = self._make_file(self._executor, part, metadata(self._run_id, step))
            if not kept.issuperset(part) or not part:
                self._kept.keep(self._run_id, step, f"{self._node}/{len(kept)}", file, head)
                kept.update(part)
            if holders and part:
                files.append((file, holders, False))
        head_unit = self._plan.course.head

        def arrived() -> None:
            digests: dict[int, str] = {}
            for content, _, is_head in files:
                file = Pieces.of(content)
                digests |= {head_unit: file.sha256()} if is_head else block_digests(file)
            then(digests)

        copies = [(content, holder, is_head) for content, holders, is_head in files for holder in holders]
        for number, (content, holder, is_head) in enumerate(copies, start=1):
            read, last = functools.partial(Pieces.of, content), number == len(copies)
            self._sender.put(_Copy(step, read, holder, is_head, arrived if last else _nothing))
        if not copies:
            then({})

    def _parts(self, blocks: tuple[int, ...]) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Return the parts of trained blocks that are one file, with the holders that each is sent to; one at least.

        The largest is first, so that few files have a block twice: those of a helper of several hosts, with several
        copies.
        """
        holders_of = dict[tuple[int, ...], list[str]]()
        for holder, copied in self._copies.items():
            holders_of.setdefault(tuple(block for block in blocks if block in copied), []).append(holder)
        if rest := tuple(block for block in blocks if not any(block in part for part in holders_of)):
            holders_of[rest] = []
        parts = sorted(holders_of.items(), key=lambda entry: -len(entry[0]))
        return {part: tuple(holders) for part, holders in parts if part} or {(): ()}

    def close(self) -> None:
        """Stop the thread that sends copies."""
        self._sender.close()


def _nothing() -> None:
    """Do nothing after a copy that is not the last of its turn."""


def save_turns(
    state: Path, node: str, shards_run: str, attempt: str, files: Sequence[SnapshotFile], *, rows: str = ""
) -> tuple[int, ...]:
    """Write the snapshots in a node's memory beside the shards of its run; the caller holds no lock of its folder.

    Shards are kept under the id ``shards_run``; ``attempt`` is the run that trained the snapshots. ``rows`` is the
    digest of the node's rows for this run; empty = it has none.

    Returns:
        The steps, ascending; none after a failure, which is logged: the run then resumes from its newest checkpoint.
    """
    steps = tuple(sorted({file.step for file in files}))
    try:
        with StateFolder(state, node) as folder:
            shards = folder.run(shards_run)
            shards.keep_rows(rows)
            for file in files:
                shards.write_part(file.step, attempt, file.content, is_head=file.is_head)
            shards.keep_from(min((*steps, *shards.steps())))
    except (BusyError, StorageError) as error:
        _LOG.warning("node %s did not save the last turns of run %s: %s", node, attempt, error)
        return ()
    _LOG.info("node %s saved the ends of steps %s of run %s", node, ", ".join(map(str, steps)), attempt)
    return steps
