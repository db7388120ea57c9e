"""Snapshots of trained blocks in memory: of the ends of the last turns, and of a run during a migration.

``TurnSnapshots`` has files of the ends of the last turns, with moments and step counts: of this node, and of the host
before it in the ring. Owners keep the head at the ends of their own turns, and at those of the owner before them. A
file is made once, when the turn ends, and never changes; after the loss of a node the others resume from the files of
the last turn that all had done.

``SnapshotShelf`` has the node's own snapshot from its rest until the first turn after the move, or the end of the run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from ringtune.errors import FrameError
from ringtune.schedule.migration import TURNS_KEPT
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors

FILE: Final = "kept.safetensors"
MAX_BYTES: Final = 1 << 30
"""Most bytes of a copy; adapters with their moments have some megabytes."""


class SnapshotFile(NamedTuple):
    """A file of what was trained until the end of a turn, or the head then."""

    step: int
    content: bytes
    is_head: bool


Save = Callable[[SnapshotFile], None]


class TurnSnapshots:
    """Keeps files of the ends of turns; safe for threads.

    Args:
        node: this node.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._run_id = ""
        self._since_placement_number = 0
        self._files: dict[int, dict[str, bytes]] = {}  # step -> whose, or which part of whose -> file
        self._heads: dict[int, bytes] = {}
        self._saves: dict[int, Save] = {}

    def begin(self, run_id: str) -> None:
        """Keep files of this run from now on, and of no other."""
        with self._lock:
            if run_id != self._run_id:
                self._run_id, self._since_placement_number = run_id, 0
                self._files, self._heads, self._saves = {}, {}, {}

    def keep(
        self,
        run_id: str,
        step: int,
        whose: str,
        file: bytes,
        head: bytes | None = None,
        *,
        placement_number: int | None = None,
    ) -> None:
        """Keep what a node had trained after ``step`` steps, and the head; drop the oldest turn.

        Args:
            run_id: of the run.
            step: optimizer steps done.
            whose: the node that trained them, and the part of its blocks if it is one.
            file: the trained tensors.
            head: as it was then; None = the node does not have it.
            placement_number: of the placement in which another node trained it; None = it is this node's own, or was
                asked for.

        Raises:
            FrameError: it belongs to a run that is not active here, or to the time before a recovery.
        """
        with self._lock:
            self._check(run_id, placement_number)
            self._files.setdefault(step, {})[whose] = file
            if head is not None:
                self._heads[step] = head
            for old in sorted(self._files)[:-TURNS_KEPT]:
                del self._files[old]
            oldest = min(self._files)
            self._heads = {at: content for at, content in self._heads.items() if at >= oldest}
            save = self._saves.get(step) if whose != self._node else None
        if save is not None:
            save(SnapshotFile(step, file, is_head=False))

    def keep_head(self, run_id: str, step: int, head: bytes, *, placement_number: int | None = None) -> None:
        """Keep another owner's head after ``step`` steps, until that turn is forgotten; arguments as ``keep``.

        Raises:
            FrameError: it belongs to a run that is not active here, or to the time before a recovery.
        """
        with self._lock:
            self._check(run_id, placement_number)
            self._heads[step] = head
            for old in sorted(self._heads)[: -TURNS_KEPT - 1]:
                del self._heads[old]
            save = self._saves.get(step)
        if save is not None:
            save(SnapshotFile(step, head, is_head=True))

    def save_at(self, step: int, save: Save, *, with_head: bool) -> None:
        """Save other nodes' files of the end of ``step``: those here, and those that arrive later.

        Args:
            step: optimizer steps done.
            save: saves each file, on the thread that received it, before it is acknowledged.
            with_head: whether the head is another owner's, too.
        """
        with self._lock:
            newest = sorted({*self._saves, step})[-TURNS_KEPT:]
            self._saves = {at: self._saves.get(at, save) for at in newest}
            files = [file for whose, file in self._files.get(step, {}).items() if whose != self._node]
            found = [SnapshotFile(step, file, is_head=False) for file in files]
            if with_head and step in self._heads:
                found.append(SnapshotFile(step, self._heads[step], is_head=True))
        for each in found:
            save(each)

    def everything(self) -> tuple[str, tuple[SnapshotFile, ...]]:
        """Return all files of the run that is kept, with its id; empty = none is."""
        with self._lock:
            files = [
                SnapshotFile(step, file, is_head=False) for step, of in self._files.items() for file in of.values()
            ]
            heads = [SnapshotFile(step, head, is_head=True) for step, head in self._heads.items()]
            return self._run_id, (*files, *heads)

    def check_run(self, run_id: str) -> None:
        """Refuse files of a run that is not under way here.

        Raises:
            FrameError: this one is not.
        """
        if not run_id or run_id != self._run_id:
            raise FrameError(f"node {self._node} keeps nothing of run {run_id or '(none)'}; prepare it first")

    def _check(self, run_id: str, placement_number: int | None) -> None:
        self.check_run(run_id)
        if placement_number is not None and placement_number < self._since_placement_number:
            raise FrameError(
                f"node {self._node} takes nothing of placement {placement_number} of run {run_id}: it went back before "
                f"placement {self._since_placement_number}, without the node that sends it"
            )

    def rewind(self, step: int, placement_number: int) -> None:
        """Forget the turns after ``step``: they are done anew in this placement; what others did before is refused."""
        with self._lock:
            self._since_placement_number = placement_number
            self._files = {at: files for at, files in self._files.items() if at <= step}
            self._heads = {at: head for at, head in self._heads.items() if at <= step}

    def drop(self, run_id: str = "") -> None:
        """Drop the files of a run; empty = of any run."""
        with self._lock:
            if run_id in ("", self._run_id):
                self._run_id, self._files, self._heads, self._saves = "", {}, {}, {}

    def head(self, run_id: str, step: int) -> Pieces:
        """Return the head as it was after ``step`` steps.

        Raises:
            FrameError: this node does not keep it.
        """
        with self._lock:
            if run_id != self._run_id or step not in self._heads:
                raise FrameError(f"node {self._node} keeps no head of run {run_id} after step {step}")
            return Pieces.of(self._heads[step])

    def part(self, run_id: str, step: int, start: int, stop: int) -> Pieces:
        """Return the blocks ``[start, stop)`` as they were after ``step`` steps.

        Raises:
            FrameError: this node does not keep all of them.
        """
        with self._lock:
            files = list(self._files.get(step, {}).values()) if run_id == self._run_id else []
        found: dict[str, TensorPieces] = {}
        for content in files:
            file = TensorFile(Pieces.of(content), where="what was kept of a turn")
            found |= {name: file.tensor(name) for name in file.infos if start <= block_of(name) < stop}
        missing = set(range(start, stop)) - {block_of(name) for name in found}
        if missing:
            raise FrameError(
                f"node {self._node} keeps blocks {sorted(missing)} of run {run_id} after step {step} no longer"
            )
        return write_tensors(found, metadata={METADATA: json.dumps(metadata(run_id, step), sort_keys=True)})


class SnapshotShelf:
    """Keeps the snapshot of a node for itself and others; safe for threads.

    Args:
        node: this node.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._of: tuple[str, int] = ("", -1)
        self._snapshot: SnapshotLike | None = None

    def put(self, run_id: str, placement_number: int, snapshot: SnapshotLike | None) -> None:
        """Keep a snapshot in place of the one before; None = keep none."""
        with self._lock:
            self._of, self._snapshot = (run_id, placement_number), snapshot

    def drop(self, run_id: str = "") -> None:
        """Drop the snapshot of a run; empty = of any run."""
        with self._lock:
            if run_id in ("", self._of[0]):
                self._of, self._snapshot = ("", -1), None

    def drop_others(self, run_id: str) -> None:
        """Drop the snapshot of any other run."""
        with self._lock:
            if run_id != self._of[0]:
                self._of, self._snapshot = ("", -1), None

    def get(self, run_id: str, placement_number: int) -> SnapshotLike:
        """Return the snapshot of a run in a placement.

        Raises:
            FrameError: there is none.
        """
        with self._lock:
            if self._snapshot is None or self._of != (run_id, placement_number):
                raise FrameError(f"node {self._node} keeps no snapshot of run {run_id} in placement {placement_number}")
            return self._snapshot


HEAD_FILE: Final = "head.safetensors"


def part_name(start: int, stop: int) -> str:
    """Name the file of some blocks on the wire."""
    return f"blocks-{start}-{stop}.safetensors"


class SnapshotLike(Protocol):
    """The part of ``edge.agent.torch_backend.Snapshot`` that needs no torch."""

    @property
    def head(self) -> Pieces | None:
        """The head, if the node owns data."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Run, and placement number or step."""

    def part(self, start: int, stop: int) -> Pieces:
        """Return the blocks ``[start, stop)`` as a file."""


class MigratedState(NamedTuple):
    """The trained tensors with which a node begins its next placement.

    Attributes:
        files: parts of snapshots, of its blocks.
        metadata: what they have to be of.
        head: the head, at the owner that has it.
        shards_run: under which run its shards of checkpoints are kept.
        is_resumed: whether it was taken off disks.
    """

    files: tuple[Pieces, ...]
    metadata: Mapping[str, str]
    head: Pieces | None
    shards_run: str
    is_resumed: bool = False


METADATA: Final = "ringtune"
"""The entry of a file's metadata that says what it is of."""

HEAD: Final = "head"
"""The tensor of a shard that is the head, as bytes."""


def metadata(run_id: str, step: int) -> dict[str, str]:
    """The metadata of a file of the end of a turn."""
    return {"run": run_id, "step": str(step)}


def block_of(name: str) -> int:
    """The block of a tensor ``adapter/3.attention...``, or of its state; -1 if it is of none."""
    number = name.partition("/")[2].partition(".")[0]
    return int(number) if number.isdecimal() else -1
