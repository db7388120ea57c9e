"""Trained tensors with their optimizer state as tensors of a safetensors file, written and read one after the other.

A head that is handed over and a shard of a checkpoint are such files; they differ in the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from edge.model.optimizers.unit_optimizers import UnitOptimizers
from edge.model.tensor_bytes import DTYPE_NAMES, TORCH_DTYPES, fill, pieces_of
from ringtune.errors import IntegrityError
from ringtune.files.safetensors_header import TensorInfo
from ringtune.files.safetensors_stream import TensorFile, TensorPieces
from ringtune.jobs.optimizers import STEP


class Prefixes(NamedTuple):
    """How the names of trained tensors and of their optimizer state begin in a file."""

    value: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What training goes on from: some tensors, and the optimizer state of those that train.

    Attributes:
        values: the tensors by name; they are filled in place.
        parameters: those of them that the optimizers are over.
        optimizers: None if nothing trains.
        prefixes: of the names in a file.
        where: names the file in errors.
        part: of a node that the state is of, in errors.
    """

    values: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.nn.Parameter]
    optimizers: UnitOptimizers | None
    prefixes: Prefixes
    where: str
    part: str

    def tensors(self) -> dict[str, TensorPieces]:
        """Return every tensor by its name in a file; a parameter that was never updated has no optimizer state."""
        found = {f"{self.prefixes.value}{name}": pieces_of(value) for name, value in self.values.items()}
        if self.optimizers is not None:
            found |= {f"{self.prefixes.state}{name}": value for name, value in self.optimizers.tensors().items()}
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
        for name in dict.fromkeys(full.rpartition("/")[0] for full in state):
            self._check_state(name, state)

    def load(self, file: TensorFile) -> None:
        """Replace tensors and optimizer state by those of a checked file, one after the other.

        What is held of the file in memory is let go of as soon as it was read.
        """
        prefixes = self.prefixes
        if self.optimizers is not None:
            self.optimizers.make_room(_named(file.infos, prefixes.state))
        for name in file.infos:
            if self.optimizers is not None and name.startswith(prefixes.state):
                self.optimizers.fill(name.removeprefix(prefixes.state), file.tensor(name))
            elif name.startswith(prefixes.value):
                fill(self.values[name.removeprefix(prefixes.value)], file.tensor(name))
            else:
                continue
            file.let_go_of(name)

    def _check_state(self, name: str, state: Mapping[str, TensorInfo]) -> None:
        """Refuse state of an unknown tensor, or other state than the optimizer keeps of it."""
        parameter = self.parameters.get(name)
        if parameter is None or self.optimizers is None:
            raise IntegrityError(f"{self.where} has state of {name}, which does not train here")
        expected = self.optimizers.state_shapes(tuple(parameter.shape))
        given = {full.rpartition("/")[2] for full in state if full.rpartition("/")[0] == name}
        if given != expected.keys():
            raise IntegrityError(
                f"{self.where} has {', '.join(sorted(given))} of {name}, the optimizer keeps "
                f"{', '.join(sorted(expected)) or 'nothing'}; it is of another optimizer"
            )
        for key, shape in expected.items():
            info = state[f"{name}/{key}"]
            self._check_is(f"{name}/{key}", info, info.dtype if key == STEP else DTYPE_NAMES[parameter.dtype], shape)

    def _check_like(self, name: str, info: TensorInfo, expected: torch.Tensor) -> None:
        self._check_is(name, info, DTYPE_NAMES[expected.dtype], tuple(expected.shape))

    def _check_is(self, name: str, info: TensorInfo, dtype: str, shape: tuple[int, ...]) -> None:
        if (info.dtype, info.shape) != (dtype, shape):
            raise IntegrityError(
                f"{self.where} has {name} as {TORCH_DTYPES.get(info.dtype, info.dtype)} {list(info.shape)}, "
                f"expected {TORCH_DTYPES[dtype]} {list(shape)}"
            )


def _named(infos: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorInfo]:
    """Choose the tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): info for name, info in infos.items() if name.startswith(prefix)}
