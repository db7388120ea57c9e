"""What an agent knows of snapshots, which need torch: what a node has trained, kept while its run moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ringtune.files.pieces import Pieces


class SnapshotLike(Protocol):
    """The part of ``edge.compute.snapshot.Snapshot`` that needs no torch."""

    @property
    def head(self) -> Pieces | None:
        """The head, if the node owns data."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the snapshot is of."""

    def part(self, start: int, stop: int) -> Pieces:
        """Return the blocks ``[start, stop)`` as a file."""


class TakenOver(NamedTuple):
    """What a node goes on with in its next placement.

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
