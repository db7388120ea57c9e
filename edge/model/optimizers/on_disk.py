"""Keep the optimizer state of inactive units on a disk, a file each, and map it while a unit is updated."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from edge.model.optimizers.prefetch import Prefetcher
from edge.model.optimizers.state_file import Shapes, StateFile
from edge.model.optimizers.torch_optimizers import state_dtype
from edge.model.optimizers.unit_optimizers import UnitOptimizers
from edge.model.tensor_bytes import DTYPE_NAMES
from ringtune.costs.memory.units.unit_state import STATE_GIVEN_BACK_BYTES
from ringtune.errors import StorageError, UsageError
from ringtune.files.durable import check_writable
from ringtune.files.safetensors_header import TensorInfo
from ringtune.files.safetensors_stream import TensorPieces
from ringtune.jobs.optimizers import state_shapes
from ringtune.machine.heap import trim_heap
from ringtune.quantities import format_bytes

Parameters = Mapping[str, torch.nn.Parameter]


class OnDisk:
    """The state of units, in ``FOLDER/<unit>.safetensors``.

    Args:
        folder: nobody else writes there; it is removed with the run.
        optimizer: of the job.
        of: what the files are of: run and node.
    """

    def __init__(self, folder: Path, optimizer: str, of: Mapping[str, str]) -> None:
        self._folder = folder
        self._optimizer = optimizer
        self._of = dict(of)
        self._files: dict[int, StateFile] = {}
        self._reserved: dict[int, StateFile] = {}
        self._mapped: set[int] = set()
        self._ahead: set[int] = set()
        self._prefetcher = Prefetcher()

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the files that were asked for ahead and are not mapped yet (for benchmarks)."""
        return sum(self._files[unit].size_bytes for unit in self._ahead)

    def reserve(self, units: Mapping[int, Parameters]) -> None:
        """Take the room on the disk that the state of these units will need, so that nobody else can.

        Raises:
            StorageError: no room.
        """
        for unit, parameters in units.items():
            shapes = _shapes(self._optimizer, parameters)
            if shapes:
                self._reserved[unit] = self._made(unit, shapes)

    def take_out(self, unit: int, updated: Parameters) -> dict[str, torch.Tensor] | None:
        """Map the state of a unit, with zeros for parameters that have none yet.

        Raises:
            StorageError: no room on the disk.
            IntegrityError: the file is not the one that was made here.
        """
        wanted = _shapes(self._optimizer, updated)
        file = self._files.get(unit)
        if not wanted:
            return {}
        if file is None or not wanted.keys() <= file.infos.keys():
            self._extend(unit, wanted)
        elif unit in self._mapped:
            return None
        self._mapped.add(unit)
        self._ahead.discard(unit)
        if self._files[unit].size_bytes >= STATE_GIVEN_BACK_BYTES:
            trim_heap()  # of what the graphs of the step took
        return self._files[unit].map()

    def parts(self, unit: int, updated: Parameters) -> Iterator[Parameters]:
        """Yield one parameter after the other; pages of the state of one are let go of before the next one's come."""
        file = self._files.get(unit)
        for name, parameter in updated.items():
            yield {name: parameter}
            if file is not None:
                file.let_go_of(name)

    def put_away(self, unit: int) -> bool:
        """Let go of the mapping; what was written is in the file."""
        self._mapped.discard(unit)
        return True

    def prefetch(self, units: Iterable[int]) -> None:
        """Begin to bring the files of these units into the page cache, each once before it is mapped."""
        for unit in units:
            if unit in self._files and unit not in self._mapped and unit not in self._ahead:
                self._ahead.add(unit)
                self._prefetcher.ask(self._files[unit].path)

    def tensors(self, unit: int) -> dict[str, TensorPieces] | None:
        """Return the state of a unit, read from its file; none if it was never updated."""
        return self._files[unit].pieces() if unit in self._files else {}

    def make_room(self, unit: int, wanted: Mapping[str, TensorInfo]) -> bool:
        """Make the file of a unit anew, for what is named."""
        self._mapped.discard(unit)
        self._ahead.discard(unit)
        file = self._files.pop(unit, None)
        if file is not None:
            file.path.unlink(missing_ok=True)
        if wanted:
            self._begin(unit, {name: (info.dtype, info.shape) for name, info in wanted.items()})
        return True

    def fill(self, unit: int, name: str, source: TensorPieces) -> None:
        """Fill a tensor of a file."""
        self._files[unit].fill(name, source)

    def close(self) -> None:
        """End the reading ahead, and remove the files."""
        self._prefetcher.close()
        for file in (*self._files.values(), *self._reserved.values()):
            file.path.unlink(missing_ok=True)
        self._files.clear()
        self._reserved.clear()
        self._mapped.clear()
        self._ahead.clear()

    def file_bytes(self, unit: int, parameters: Parameters) -> int:
        """Bytes of the file of a unit once all of these parameters were updated."""
        shapes = _shapes(self._optimizer, parameters)
        return StateFile(self._path(unit), self._whose(unit), shapes).size_bytes if shapes else 0

    def _extend(self, unit: int, wanted: Shapes) -> None:
        """Make the file of a unit, or a larger one with what the smaller one has."""
        before = self._files.get(unit)
        if before is None:
            self._begin(unit, wanted)
            return
        kept = before.pieces()
        shapes = {name: (pieces.dtype, pieces.shape) for name, pieces in kept.items()}
        larger = StateFile(before.path.with_suffix(".larger"), self._whose(unit), {**wanted, **shapes})
        larger.make()
        for name, pieces in kept.items():
            larger.fill(name, pieces)
        self._files[unit] = larger.moved(before.path)

    def _path(self, unit: int) -> Path:
        return self._folder / f"{unit}.safetensors"

    def _whose(self, unit: int) -> dict[str, str]:
        return {**self._of, "unit": str(unit)}

    def _begin(self, unit: int, shapes: Shapes) -> None:
        """Use the file that was reserved for a unit if it is for the same tensors, else one in its place."""
        reserved = self._reserved.pop(unit, None)
        is_fitting = reserved is not None and reserved.infos.keys() == shapes.keys()
        self._files[unit] = reserved if reserved is not None and is_fitting else self._made(unit, shapes)

    def _made(self, unit: int, shapes: Shapes) -> StateFile:
        file = StateFile(self._path(unit), self._whose(unit), shapes)
        file.make()
        return file


def _shapes(optimizer: str, parameters: Parameters) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and shapes of the state of some parameters, as ``name/key``."""
    return {
        f"{name}/{key}": (DTYPE_NAMES[state_dtype(key, parameter)], shape)
        for name, parameter in parameters.items()
        for key, shape in state_shapes(optimizer, tuple(parameter.shape)).items()
    }


def require_room(folder: Path, optimizers: Sequence[UnitOptimizers], of: Mapping[str, str]) -> None:
    """Refuse a folder in which the state of all units has no room.

    Args:
        folder: for the files.
        optimizers: of the node.
        of: what the files are of: run and node.

    Raises:
        StorageError: it can't be written, or its disk has less room; both numbers are in the message.
        UsageError: the node computes on an accelerator, whose optimizers can't update what is mapped.
    """
    check_writable(folder / "unit.safetensors")
    needed_bytes = 0
    for each in optimizers:
        keeper = OnDisk(folder, each.name, of)
        for unit, parameters in each.units.items():
            if any(parameter.device.type != "cpu" for parameter in parameters.values()):
                raise UsageError(
                    f"node {of['node']} computes on an accelerator, where optimizer state can't be kept on the disk; "
                    "start it with --device cpu, or set hift.state = 'memory'"
                )
            needed_bytes += keeper.file_bytes(unit, parameters)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise StorageError(
            f"node {of['node']}: the optimizer state of inactive units needs {format_bytes(needed_bytes)} in {folder}, "
            f"{format_bytes(free_bytes)} are free; make room, give another --state, or set hift.state = 'memory'"
        )
