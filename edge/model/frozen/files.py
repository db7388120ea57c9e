"""Read frozen matrices of a model folder small: as they are on disk where they are so already, otherwise rounded once.

A matrix that is stored in bfloat16 is read as it is, without a float32 copy in between; one that may stay mapped does,
so that of a token table only the rows that are used become resident. Any other one is rounded a piece at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch

from edge.model.frozen.held import Held, Room, round_to_int8
from edge.model.frozen.matrix import FrozenMatrix
from edge.model.safetensors_files import SafetensorsFiles
from ringtune.errors import ModelError
from ringtune.schedule.frozen_weights import BFLOAT16, FrozenWeights


class FrozenFiles(SafetensorsFiles):
    """The tensors of a model folder, of which frozen matrices are held small.

    Args:
        folder: of the model.
        frozen: how they are held; None = in the type that is asked for.

    Attributes:
        room: where all of them are widened.
    """

    def __init__(self, folder: Path, frozen: FrozenWeights | None) -> None:
        super().__init__(folder)
        self.room = Room()
        self._frozen = frozen
        self._wide = torch.empty(0)

    def read_frozen(
        self, name: str, dtype: torch.dtype, *, private: bool = False, device: torch.device | None = None
    ) -> torch.Tensor:
        """Read a tensor that never trains; a matrix is held small. See ``SafetensorsFiles.read_frozen``.

        Raises:
            ModelError: also numbers that are not finite, of which int8 would spoil whole rows.
        """
        frozen = self._frozen
        if frozen is None or len(self.shape(name)) != 2:
            return super().read_frozen(name, dtype, private=private, device=device)
        held = self._held(name, frozen, private=private)
        return FrozenMatrix.of(held if device is None else held.to(device))

    def _held(self, name: str, frozen: FrozenWeights, *, private: bool) -> Held:
        if frozen.dtype == BFLOAT16:
            numbers = self.read(name, torch.bfloat16, private=private)
            return Held(numbers, None, native=frozen.native, room=self.room)
        rows, columns = self.shape(name)
        numbers, scales = torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, 1)
        for start, piece in self.row_pieces(name):
            own = slice(start, start + len(piece))
            wide = self._scratch(piece.numel()).view(piece.shape).copy_(piece)
            round_to_int8(wide, numbers[own], scales[own])
        if not scales.isfinite().all():
            raise ModelError(
                f"{self.folder}: tensor {name} has numbers that are not finite, which int8 can't hold; fetch the model "
                "again, or remove runtime.frozen"
            )
        return Held(numbers, scales, native=frozen.native, room=self.room)

    def _scratch(self, count: int) -> torch.Tensor:
        """Return memory in which rows are rounded, always the same."""
        if self._wide.numel() < count:
            self._wide = torch.empty(count)
        return self._wide[:count]
