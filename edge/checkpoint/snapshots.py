"""Snapshots of trained blocks in memory: of the ends of the last turns, and of a run during a migration.

``TurnSnapshots`` keeps files with moments and step counts, of this node and of the host before it in the ring. Owners
keep the head at the ends of their own turns, and of the turns of the owner before them. A file is made once, when the
turn ends, and never changes; after the loss of a node the others resume from the last turn that all nodes had done.

``SnapshotShelf`` keeps the node's own snapshot from its pause until the first turn after the move, or the run's end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from ringtune.errors import FrameError
from ringtune.schedule.migration import TURNS_KEPT
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, tensors_digest, write_tensors

FILE: Final = "kept.safetensors"
_MAX_BLOCKS: Final = 1 << 16


class SnapshotFile(NamedTuple):
    """Trained blocks, or the head, at the end of a turn as a file; ``step`` counts the optimizer steps done."""

    step: int
    content: bytes
    is_head: bool


Save = Callable[[SnapshotFile], None]


class TurnSnapshots:
    """Keeps files of the ends of turns; thread-safe."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._run_id = ""
        self._since_placement_number = 0
        self._files: dict[int, dict[str, bytes]] = {}  # step -> origin -> file
        self._heads: dict[int, bytes] = {}
        self._saves: dict[int, Save] = {}

    def begin(self, run_id: str) -> None:
        """Keep files of this run from now on; drop those of another run."""
        with self._lock:
            if run_id != self._run_id:
                self._run_id, self._since_placement_number = run_id, 0
                self._files, self._heads, self._saves = {}, {}, {}

    def keep(
        self,
        run_id: str,
        step: int,
        origin: str,
        file: bytes,
        head: bytes | None = None,
        *,
        placement_number: int | None = None,
    ) -> None:
        """Keep a node's trained blocks after ``step`` steps, and the head if the node has it.

        Of each node all but ``TURNS_KEPT`` turns are dropped, and what is older than this node's own: a neighbour that
        sends copies of turns to come has no part in others'. ``origin`` is the node that trained the blocks; for a part
        of its blocks, with the name of the part, as ``a/part``. ``placement_number`` is of the placement in which
        another node trained them; None = they are this node's own, or it asked for them.

        Raises ``FrameError``: the run is not active here, or the placement is from before a recovery.
        """
        with self._lock:
            self._check(run_id, placement_number)
            self._files.setdefault(step, {})[origin] = file
            if head is not None:
                self._heads[step] = head
            self._drop_old(_node_of(origin))
            oldest = min(self._files)
            self._heads = {at: content for at, content in self._heads.items() if at >= oldest}
            save = self._saves.get(step) if not self._is_own(origin) else None
        if save is not None:
            save(SnapshotFile(step, file, is_head=False))

    def keep_head(self, run_id: str, step: int, head: bytes, *, placement_number: int | None = None) -> None:
        """Keep another owner's head after ``step`` steps until that turn is dropped; the rest as for ``keep``."""
        with self._lock:
            self._check(run_id, placement_number)
            self._heads[step] = head
            for old in sorted(self._heads)[: -TURNS_KEPT - 1]:
                del self._heads[old]
            save = self._saves.get(step)
        if save is not None:
            save(SnapshotFile(step, head, is_head=True))

    def save_at(self, step: int, save: Save, *, with_head: bool) -> None:
        """Save other nodes' files of ``step``: those in memory now, and those that arrive later.

        ``save`` is called for each file, on the thread that received it, before the file is acknowledged. ``with_head``
        says that the head in memory is another owner's.
        """
        with self._lock:
            newest = sorted({*self._saves, step})[-TURNS_KEPT:]
            self._saves = {at: self._saves.get(at, save) for at in newest}
            files = [file for origin, file in self._files.get(step, {}).items() if not self._is_own(origin)]
            saved = [SnapshotFile(step, file, is_head=False) for file in files]
            if with_head and step in self._heads:
                saved.append(SnapshotFile(step, self._heads[step], is_head=True))
        for each in saved:
            save(each)

    def _is_own(self, origin: str) -> bool:
        return _node_of(origin) == self._node

    def _drop_old(self, node: str) -> None:
        """Drop the old turns of a node, and where it is this one those of all; the lock is held."""
        steps = sorted(step for step, files in self._files.items() if node in map(_node_of, files))
        oldest, is_own = steps[-TURNS_KEPT:][0], node == self._node
        for step in [step for step in self._files if step < oldest]:
            left = {} if is_own else {name: file for name, file in self._files[step].items() if _node_of(name) != node}
            self._files[step] = left
            if not left:
                del self._files[step]

    def everything(self) -> tuple[str, tuple[SnapshotFile, ...]]:
        """Return the id of the active run (empty = none) and all of its files."""
        with self._lock:
            files = [
                SnapshotFile(step, file, is_head=False) for step, of in self._files.items() for file in of.values()
            ]
            heads = [SnapshotFile(step, head, is_head=True) for step, head in self._heads.items()]
            return self._run_id, (*files, *heads)

    def check_run(self, run_id: str) -> None:
        """Refuse files of a run that is not active here; raises ``FrameError``."""
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
        """Drop the turns after ``step``, to be done anew; refuse files of placements before ``placement_number``."""
        with self._lock:
            self._since_placement_number = placement_number
            self._files = {at: files for at, files in self._files.items() if at <= step}
            self._heads = {at: head for at, head in self._heads.items() if at <= step}

    def drop(self, run_id: str = "") -> None:
        """Drop the files of a run; an empty id is any run."""
        with self._lock:
            if run_id in ("", self._run_id):
                self._run_id, self._files, self._heads, self._saves = "", {}, {}, {}

    def head(self, run_id: str, step: int) -> Pieces:
        """Return the head after ``step`` steps; raises ``FrameError``."""
        with self._lock:
            if run_id != self._run_id or step not in self._heads:
                raise FrameError(f"node {self._node} keeps no head of run {run_id} after step {step}")
            return Pieces.of(self._heads[step])

    def part(self, run_id: str, step: int, start: int, stop: int) -> Pieces:
        """Return the blocks ``[start, stop)`` after ``step`` steps as one file; raises ``FrameError``."""
        with self._lock:
            files = list(self._files.get(step, {}).values()) if run_id == self._run_id else []
        tensors, missing = dict[str, TensorPieces](), set(range(start, stop))
        for content in files:
            file = TensorFile(Pieces.of(content), where="what was kept of a turn")
            tensors |= {name: file.tensor(name) for name in file.infos if start <= block_of(name) < stop}
            missing -= file_blocks(file)
        if missing:
            raise FrameError(
                f"node {self._node} keeps blocks {sorted(missing)} of run {run_id} after step {step} no longer"
            )
        return write_blocks(tensors, range(start, stop), metadata(run_id, step))


def _node_of(origin: str) -> str:
    return origin.partition("/")[0]


class SnapshotShelf:
    """Keeps one snapshot of a node, for itself and others; thread-safe."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._of: tuple[str, int] = ("", -1)
        self._snapshot: Snapshot | None = None

    def put(self, run_id: str, placement_number: int, snapshot: Snapshot | None) -> None:
        """Replace the kept snapshot; None = keep none."""
        with self._lock:
            self._of, self._snapshot = (run_id, placement_number), snapshot

    def drop(self, run_id: str = "") -> None:
        """Drop the snapshot of a run; an empty id is any run."""
        with self._lock:
            if run_id in ("", self._of[0]):
                self._of, self._snapshot = ("", -1), None

    def drop_others(self, run_id: str) -> None:
        """Drop the snapshot of any other run."""
        with self._lock:
            if run_id != self._of[0]:
                self._of, self._snapshot = ("", -1), None

    def get(self, run_id: str, placement_number: int) -> Snapshot:
        """Return the snapshot of a run in a placement; raises ``FrameError``."""
        with self._lock:
            if self._snapshot is None or self._of != (run_id, placement_number):
                raise FrameError(f"node {self._node} keeps no snapshot of run {run_id} in placement {placement_number}")
            return self._snapshot


HEAD_FILE: Final = "head.safetensors"


def part_name(start: int, stop: int) -> str:
    """Name the file of blocks ``[start, stop)`` on the wire."""
    return f"blocks-{start}-{stop}.safetensors"


class Snapshot:
    """The trained tensors of one node in one run, without a copy.

    ``executor`` must not compute any more; ``blocks`` are those that it trains; ``metadata`` is run, and placement
    number or step.
    """

    def __init__(self, executor: Any, blocks: Collection[int], metadata: Mapping[str, str], *, with_head: bool) -> None:
        self.metadata = dict(metadata)
        self.head = executor.head_blob() if with_head else None
        self._blocks = frozenset(blocks)
        self._tensors = executor.part.tensors()

    def part(self, start: int, stop: int) -> Pieces:
        """Return the blocks ``[start, stop)`` as a file, read from the tensors when iterated; raises ``FrameError``."""
        if not self._blocks.issuperset(range(start, stop)) or start >= stop:
            raise FrameError(
                f"blocks [{start}, {stop}) are asked for, this node trained {sorted(self._blocks)}; plan anew"
            )
        tensors = {name: value for name, value in self._tensors.items() if start <= block_of(name) < stop}
        return write_blocks(tensors, range(start, stop), self.metadata)


class MigratedState(NamedTuple):
    """The trained state with which a node begins its next placement.

    Attributes:
        metadata: required in ``files``.
        is_resumed: whether the state was read from disks.
    """

    files: tuple[Pieces, ...]
    metadata: Mapping[str, str]
    head: Pieces | None
    shards_run: str
    is_resumed: bool = False


METADATA: Final = "ringtune"
"""Metadata key of these files; its value is JSON with the run, and the step or placement number."""

WITHOUT_TENSORS: Final = "blocks_without_tensors"
"""Metadata key of the blocks of a file that have no trained tensor (``leave_out``): their indices, joined by spaces."""

STATE: Final = "moments"
"""Prefix of the names of optimizer state."""

COUNT: Final = "/count"
"""Suffix of the number of micro-batches of a running average."""

HEAD: Final = "head"
"""Name of the tensor of a shard with the bytes of the head."""


def metadata(run_id: str, step: int) -> dict[str, str]:
    """Metadata of a file of the end of a turn."""
    return {"run": run_id, "step": str(step)}


def write_blocks(tensors: Mapping[str, TensorPieces], blocks: Iterable[int], of: Mapping[str, str]) -> Pieces:
    """Make a file of all trained tensors of ``blocks``; ``of`` is run, and step or placement number."""
    without = sorted(set(blocks) - {block_of(name) for name in tensors})
    more = {WITHOUT_TENSORS: " ".join(map(str, without))} if without else {}
    # one entry, so that equal tensors are equal bytes
    return write_tensors(tensors, metadata={METADATA: json.dumps(dict(of), sort_keys=True), **more})


def file_blocks(file: TensorFile) -> set[int]:
    """Return the blocks of a file, with those that have no trained tensor."""
    numbers = (text for text in file.metadata.get(WITHOUT_TENSORS, "").split() if text.isdecimal() and len(text) < 10)
    return {block for block in (*map(block_of, file.infos), *map(int, numbers)) if 0 <= block < _MAX_BLOCKS}


def block_digests(file: Pieces) -> dict[int, str]:
    """Return the SHA-256, hex, of each block of a file: over names, types, shapes and bytes, in the order of names.

    The digest of a block is the same in any file that has all of it. Raises ``IntegrityError``.
    """
    tensors = TensorFile(file, where="a file of trained blocks")
    blocks: dict[int, dict[str, TensorPieces]] = {}
    for name in tensors.infos:
        blocks.setdefault(block_of(name), {})[name] = tensors.tensor(name)
    return {block: tensors_digest(block_tensors) for block, block_tensors in blocks.items()}


def shard_digests(shard: Pieces, head_unit: int) -> dict[int, str]:
    """Return the digests of the trained blocks of a shard, and of the head in it as unit ``head_unit``."""
    digests = {block: sha256 for block, sha256 in block_digests(shard).items() if block >= 0}
    file = TensorFile(shard, where="a shard")
    return digests | ({head_unit: file.tensor(HEAD).data.sha256()} if HEAD in file.infos else {})


def block_of(name: str) -> int:
    """Block index of a tensor, the number before the first dot of the last part with one; -1 for other tensors.

    Example: 3 for ``3.output.weight``, ``adapter/3.output.weight``, a user's ``adapter/anna/3.output.weight``, its
    optimizer state ``moments/anna/3.output.weight/step``, and ``velora/3.output/count``.
    """
    number = next((part for part in reversed(name.split("/")) if "." in part), "").partition(".")[0]
    return int(number) if number.isdecimal() and len(number) < 10 else -1
