"""On which nodes' disks everything is that a run had trained at a step: in shards of a checkpoint, and in files beside.

A run on a [0,3), b [3,6) whose owner is a, and whose hosts keep copies for each other, after a checkpoint::

    blocks 0 to 2   in the shard of a, and in a file at b
    blocks 3 to 5   in the shard of b, and in a file at a
    head            in the shard of a, and in a file at the next owner, if there is one

So the run goes on where a disk is lost. A file says which run trained it: a run that went back to an earlier step may
come to this step with other weights, as one that left an owner out, and the two are never mixed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ringtune.rounds.checkpoint import CheckpointManifest
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Placement
from ringtune.schedule.stages.replicas import saves_head
from ringtune.schedule.turns.versions import weight_version


class SavedPart(NamedTuple):
    """A file beside the shards on a node's disk, which is whole.

    Attributes:
        step: optimizer steps done.
        attempt: id of the run that trained it.
        blocks: that it has.
        has_head: whether it is the head, and no blocks.
    """

    step: int
    attempt: str
    blocks: tuple[int, ...] = ()
    has_head: bool = False


class SavedSource(NamedTuple):
    """The blocks ``[start, stop)`` on a node's disk: in the shard with this digest; empty = in files beside shards."""

    node: str
    start: int
    stop: int
    sha256: str = ""


class _Holder(NamedTuple):
    """A node that has something, and the digest of the shard that it is in; empty = a file beside shards."""

    node: str
    sha256: str


class Whereabouts:
    """Who has which trained block, and the head, at the step of a manifest.

    Args:
        manifest: of a checkpoint, or of the end of a turn that nodes kept.
        course: of the run, as it was then.
        placement: that held then.
        parts: by node that is there: its files beside shards.
        problems: by node that is there: step -> what is wrong with its shard, empty = intact.
    """

    def __init__(
        self,
        manifest: CheckpointManifest,
        course: Course,
        placement: Placement,
        parts: Mapping[str, Sequence[SavedPart]],
        problems: Mapping[str, Mapping[int, str]],
    ) -> None:
        self._manifest, self._course, self._placement = manifest, course, placement
        settled = course.decided(manifest.unfreezing.unfreeze_at, manifest.operations)
        self._trained = tuple(one for one in range(course.num_blocks) if weight_version(settled, one, manifest.step))
        self._holders: dict[int, list[_Holder]] = {block: [] for block in self._trained}
        self._heads: list[_Holder] = []
        for shard in manifest.shards:
            if problems.get(shard.node, {}).get(manifest.step) == "":
                self._add_shard(_Holder(shard.node, shard.sha256))
        for node, files in sorted(parts.items()):
            for file in files:
                if file.attempt and (file.step, file.attempt) == (manifest.step, manifest.attempt):
                    self._add(_Holder(node, ""), file.blocks, has_head=file.has_head)

    def _add_shard(self, holder: _Holder) -> None:
        piece = self._placement.slice_of(holder.node)
        with_head = saves_head(self._course, holder.node, self._manifest.holder)
        self._add(holder, range(piece.start, piece.stop), has_head=with_head)

    def _add(self, holder: _Holder, blocks: Iterable[int], *, has_head: bool) -> None:
        for block in blocks:
            if block in self._holders and all(one.node != holder.node for one in self._holders[block]):
                self._holders[block].append(holder)
        if has_head and all(one.node != holder.node for one in self._heads):
            self._heads.append(holder)

    @property
    def missing(self) -> tuple[int, ...]:
        """Blocks that were trained, and that nobody has who is there."""
        return tuple(block for block in self._trained if not self._holders[block])

    def head_at(self, owners: Collection[str]) -> tuple[str, str] | None:
        """Who of some owners has the head, the one that had it first, with the digest of its shard; None = nobody.

        The digest is empty where the head is in a file beside shards.
        """
        found = [one for one in self._heads if one.node in owners]
        found.sort(key=lambda one: one.node != self._manifest.holder)
        return (found[0].node, found[0].sha256) if found else None

    def sources(self, placement: Placement, node: str) -> tuple[SavedSource, ...]:
        """From whom a node takes its blocks of a placement: from itself where it has them."""
        piece, found = placement.slice_of(node), list[SavedSource]()
        for block in range(piece.start, piece.stop):
            holders = self._holders.get(block)
            if not holders:
                continue  # it was not trained yet, so every node makes it by itself
            holder = next((one for one in holders if one.node == node), holders[0])
            last = found[-1] if found else None
            if last and (last.node, last.sha256, last.stop) == (*holder, block):
                found[-1] = last._replace(stop=block + 1)
            else:
                found.append(SavedSource(holder.node, block, block + 1, holder.sha256))
        return tuple(found)

    def why_not(self, owners: Collection[str]) -> str:
        """Say what is missing, and who had it; empty if all is there, the head at one of these owners."""
        if self.missing:
            hosts = sorted({self._placement.host_of(block) for block in self.missing})
            plural = "s" if len(self.missing) > 1 else ""
            listed = ", ".join(map(str, self.missing))
            return f"no node that is there has what was trained of block{plural} {listed}, which node " + (
                f"{', '.join(hosts)} had, or a copy of it"
            )
        if self.head_at(owners) is None:
            return f"no owner that is there has the head, which node {self._manifest.holder} had, or a copy of it"
        return ""
