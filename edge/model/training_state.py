"""Trained tensors with their optimizer state as tensors of a safetensors file, written and read one after the other.

A head that is handed over and a shard of a checkpoint are such files; they differ in the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from edge.model.optimizers import optimizer_tensors, room_for_state
from edge.model.tensor_bytes import DTYPE_NAMES, TORCH_DTYPES, fill, pieces_of, torch_dtype
from ringtune.errors import IntegrityError
from ringtune.files.safetensors_header import TensorInfo
from ringtune.files.safetensors_stream import TensorFile, TensorPieces

_STEP = "/step"


class Prefixes(NamedTuple):
    """How the names of trained tensors and of their optimizer state begin in a file."""

    value: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What training goes on from: some tensors, and the optimizer state of those that train.

    Attributes:
        values: the tensors by name; they are filled in place.
        parameters: those of them that the optimizer is over.
        optimizer: None if nothing trains.
        prefixes: of the names in a file.
        where: names the file in errors.
        part: of a node that the state is of, in errors.
    """

    values: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    prefixes: Prefixes
    where: str
    part: str

    def tensors(self) -> dict[str, TensorPieces]:
        """Return every tensor by its name in a file; a parameter that was never updated has no optimizer state."""
        found = {f"{self.prefixes.value}{name}": pieces_of(value) for name, value in self.values.items()}
        if self.optimizer is not None:
            state = optimizer_tensors(self.optimizer, self.parameters)
            found |= {f"{self.prefixes.state}{name}": pieces_of(value) for name, value in state.items()}
        return found

    def check(self, file: TensorFile, *, besides: tuple[str, ...] = ()) -> None:
        """Refuse a file that is not of this state.

        Args:
            file: as ``tensors`` makes it.
            besides: names of other tensors in it.

        Raises:
            IntegrityError: tensors with other names, shapes or types.
        """
        own = {name: info for name, info in file.infos.items() if name not in besides}
        given, state = _named(own, self.prefixes.value), _named(own, self.prefixes.state)
        if given.keys() != self.values.keys() or len(given) + len(state) != len(own):
            raise IntegrityError(
                f"{self.where} has the tensors {sorted(own)[:3]}..., not those of this node's {self.part}"
            )
        for name, info in given.items():
            self._check_like(name, info, self.values[name])
        for name, info in state.items():
            parameter = self.parameters.get(name.rpartition("/")[0])
            if parameter is None:
                raise IntegrityError(f"{self.where} has state {name} of an unknown tensor")
            if not name.endswith(_STEP):
                self._check_like(name, info, parameter)

    def load(self, file: TensorFile) -> None:
        """Replace tensors and optimizer state by those of a checked file, one after the other.

        What is held of the file in memory is let go of as soon as it was read.
        """
        state = _named(file.infos, self.prefixes.state)
        targets = {f"{self.prefixes.value}{name}": value for name, value in self.values.items()}
        if self.optimizer is not None:
            wanted = {name: (torch_dtype(info.dtype), info.shape) for name, info in state.items()}
            room = room_for_state(self.optimizer, self.parameters, wanted)
            targets |= {f"{self.prefixes.state}{name}": value for name, value in room.items()}
        for name in file.infos:
            if name in targets:
                fill(targets[name], file.tensor(name))
                file.let_go_of(name)

    def _check_like(self, name: str, info: TensorInfo, expected: torch.Tensor) -> None:
        if info.shape != tuple(expected.shape) or info.dtype != DTYPE_NAMES[expected.dtype]:
            raise IntegrityError(
                f"{self.where} has {name} as {TORCH_DTYPES.get(info.dtype, info.dtype)} {list(info.shape)}, "
                f"expected {expected.dtype} {list(expected.shape)}"
            )


def _named(infos: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorInfo]:
    """Choose the tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): info for name, info in infos.items() if name.startswith(prefix)}
