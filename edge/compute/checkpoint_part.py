"""A node's part of a checkpoint: what it trained, with all that it goes on from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from torch import nn

from edge.compute.helping.sums import Sums
from edge.compute.hosting import Hosted
from edge.compute.offloading import Offloading
from edge.compute.saving.vectors import Vectors
from edge.model.finite import require_finite_values
from edge.model.training_state import TrainingState
from edge.shards.shard_file import PREFIXES, Besides, load_shard, to_shard
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors
from ringtune.schedule.placement import Slice

_WHERE: Final = "the blocks that were taken over"


class CheckpointPart:
    """Writes and reads the part of one node.

    Args:
        piece: the node's slice.
        hosted: what it hosts, and what it fits for others.
        offloading: knows which adapters helpers train.
        vectors: VeLoRA's; None without VeLoRA.
    """

    def __init__(self, piece: Slice, hosted: Hosted, offloading: Offloading, vectors: Vectors | None) -> None:
        self._piece, self._hosted = piece, hosted
        self._offloading, self._vectors = offloading, vectors

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What trains here: of the slice, and of others' blocks."""
        own = self._hosted.blocks.parameters(self._piece.start, self._piece.stop)
        return own | self._hosted.fitted()

    def write(self, head: Pieces | None, metadata: Mapping[str, str]) -> Pieces:
        """Return the part, read when it is gone through; see ``shard_file.to_shard``.

        Raises:
            DivergedError: a trained weight is not finite.
        """
        require_finite_values(self.trained, "the part of this node")
        return to_shard(
            self.trained,
            self._hosted.optimizers,
            head,
            metadata,
            besides=self._besides(),
            installed=self._offloading.installed,
        )

    def load(self, data: Pieces, metadata: Mapping[str, str], *, with_head: bool) -> Pieces | None:
        """Go on from a part, and return the head in it; see ``shard_file.load_shard``."""
        head = load_shard(
            data,
            self.trained,
            self._hosted.optimizers,
            metadata,
            with_head=with_head,
            besides=self._besides(),
            installed=self._offloading.installed,
        )
        self._offloading.loaded()
        return head

    def tensors(self) -> dict[str, TensorPieces]:
        """Return what trains here with its optimizer state, by its names in a part."""
        return self._state(self.trained).tensors()

    def take_over(self, tensors: Mapping[str, TensorPieces], *, blocks: Collection[int]) -> None:
        """Go on from the tensors of some blocks, as ``tensors`` of other nodes gave them; others were not trained yet.

        Raises:
            IntegrityError: they are not those of these blocks.
        """
        trained = {name: value for name, value in self.trained.items() if int(name.partition(".")[0]) in blocks}
        state, file = self._state(trained), TensorFile(write_tensors(tensors), where=_WHERE)
        state.check(file)
        state.load(file)

    def _state(self, parameters: Mapping[str, nn.Parameter]) -> TrainingState:
        optimizers = self._hosted.optimizers
        return TrainingState(
            values=parameters,
            parameters=parameters,
            optimizers=optimizers,
            prefixes=PREFIXES,
            where=_WHERE,
            part="blocks",
        )

    def _besides(self) -> dict[str, Besides]:
        fitted = self._hosted.fitted()
        found: dict[str, Besides] = {} if self._vectors is None else {"velora": self._vectors}
        if self._offloading.vectors is not None:
            found["pairs"] = self._offloading.vectors
        if fitted:
            found["sums"] = Sums(fitted)
        return found
