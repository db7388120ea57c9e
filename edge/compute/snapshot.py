"""What a node has trained, at a turn boundary: kept in memory while a run moves to its next placement.

A snapshot holds the trained tensors of the node's slice with their optimizer state, and the head at the owner that has
it. It copies nothing: it keeps the very tensors, which nobody changes any more, while the rest of the slice is let go.
Nodes take each other's blocks over as safetensors files of the blocks that they host next.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from edge.compute.executor import NodeExecutor
from edge.model.tensor_bytes import is_finite
from edge.shards.block_files import METADATA
from edge.shards.shard_file import PREFIXES
from ringtune.engine.diverged import LOWER_THE_RATE
from ringtune.errors import DivergedError, FrameError, IntegrityError
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors
from ringtune.files.strict import parse_json
from ringtune.schedule.placement import Slice


class Snapshot:
    """The snapshot of one node in one run.

    Args:
        executor: of the node; it computes no more.
        piece: its slice.
        metadata: what the snapshot is of: run, and placement number or step.
        with_head: whether the node has the head.
    """

    def __init__(self, executor: NodeExecutor, piece: Slice, metadata: Mapping[str, str], *, with_head: bool) -> None:
        self.metadata = dict(metadata)
        self.head = executor.head_blob() if with_head else None
        self._piece = piece
        self._tensors = executor.part.tensors()

    def part(self, start: int, stop: int) -> Pieces:
        """Return the blocks ``[start, stop)`` as a file, read from the tensors when it is gone through.

        Raises:
            FrameError: the node did not host them.
        """
        if not self._piece.start <= start < stop <= self._piece.stop:
            raise FrameError(f"blocks [{start}, {stop}) are asked for, this node hosted {self._piece.text}; plan anew")
        found = {name: value for name, value in self._tensors.items() if start <= _block_of(name) < stop}
        return write_tensors(found, metadata={METADATA: json.dumps(self.metadata, sort_keys=True)})


def kept_file(executor: NodeExecutor, blocks: Collection[int], of: Mapping[str, str]) -> bytes:
    """Copy what was trained of some blocks, with its optimizer state, into a file; the executor computes on.

    Args:
        executor: of the node, between two turns.
        blocks: that were trained.
        of: what the file is of: run and step.

    Raises:
        DivergedError: a tensor is not finite; nobody shall ever go back to it.
    """
    found = {name: value for name, value in executor.part.tensors().items() if _block_of(name) in blocks}
    for name, value in found.items():
        if not is_finite(value):
            raise DivergedError(f"the training diverged: {name} is not finite at the turn's end; {LOWER_THE_RATE}")
    return bytes(write_tensors(found, metadata={METADATA: json.dumps(dict(of), sort_keys=True)}))


def take_over(executor: NodeExecutor, files: Sequence[Pieces], metadata: Mapping[str, str]) -> None:
    """Replace what trains of some blocks, with its optimizer state, by parts of snapshots.

    Args:
        executor: of the next slice.
        files: parts of snapshots, of different blocks.
        metadata: what the snapshots have to be of.

    Raises:
        IntegrityError: a file is unreadable, of something else, or its tensors are not those of this slice.
    """
    tensors: dict[str, TensorPieces] = {}
    for content in files:
        file = TensorFile(content, where="a snapshot")
        _check(file, metadata)
        tensors |= {name: file.tensor(name) for name in file.infos}
    executor.part.take_over(tensors, blocks={_block_of(name) for name in tensors})


def _check(file: TensorFile, metadata: Mapping[str, str]) -> None:
    try:
        found = dict(parse_json(file.metadata[METADATA]))
    except (KeyError, ValueError, TypeError) as error:
        raise IntegrityError("a snapshot does not say what it is of; use one version on all machines") from error
    if found != dict(metadata):
        raise IntegrityError(f"a snapshot is of {found}, expected is {dict(metadata)}; start the run again")


def _block_of(name: str) -> int:
    """The block of a tensor ``adapter/3.attention...``, or of its state."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            number = name.removeprefix(prefix).partition(".")[0]
            if number.isdecimal():
                return int(number)
    raise IntegrityError(f"a snapshot has a tensor {name!r} of no block; use one version on all machines")
