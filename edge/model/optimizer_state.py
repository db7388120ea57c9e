"""Optimizer state of inactive units on disk: a safetensors file for each unit, mapped while the unit is updated.

The update writes into the mapping: the kernel reads and writes pages, and pages of an inactive unit are page cache,
which the kernel drops where memory is short. Disk space is allocated when the file is made, because a write into a page
without disk space would end the process.

The file is scratch and not forced to the disk. After a crash a run resumes from its checkpoint, which has its own copy.

A thread prefetches files by hints to the kernel alone, so no result depends on it and it takes no memory. Without
support for hints nothing is prefetched; pages are then read at their use.

State is evicted and prefetched by the units that the method trains at each step::

    step       0          1          2          3       two groups; node a has units 0 and 1, each a group
    updates    unit 0     unit 1     unit 0     unit 1
    evict      after 0    after 1    ...                unless the next step trains the unit again
    prefetch        unit 1     unit 0     unit 1        during the step before
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import mmap
import os
import queue
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from edge.model.optimizers import StateStore, UnitOptimizers, state_dtype
from edge.model.tensor_files import DTYPE_NAMES, torch_dtype
from ringtune.config.optimizers import STATE_GIVEN_BACK_BYTES, state_shapes
from ringtune.errors import IntegrityError, StorageError, UsageError
from ringtune.machine.resources import trim_heap
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.turns import Item
from ringtune.schedule.units import Units
from ringtune.storage.durable import check_writable, storage_errors
from ringtune.storage.pieces import FilePieces
from ringtune.storage.strict import parse_json
from ringtune.storage.tensor_files import DTYPE_BYTES, TensorInfo, TensorPieces, header_bytes, header_of

Parameters = Mapping[str, torch.nn.Parameter]


class DiskStateStore(StateStore):
    """The state of units, in ``FOLDER/<unit>.safetensors``.

    Args:
        folder: used by this store only; removed with the run.
        of: run and node, for the files' headers.
    """

    def __init__(self, folder: Path, optimizer: str, of: Mapping[str, str]) -> None:
        self._folder, self._optimizer = folder, optimizer
        self._of = dict(of)
        self._files: dict[int, StateFile] = {}
        self._reserved: dict[int, StateFile] = {}
        self._mapped: set[int] = set()
        self._ahead: set[int] = set()
        self._prefetcher = Prefetcher()

    def reserve(self, units: Mapping[int, Parameters]) -> None:
        """Allocate the disk space for the state of these units."""
        for unit, parameters in units.items():
            shapes = _shapes(self._optimizer, parameters)
            if shapes:
                self._reserved[unit] = self._made(unit, shapes)

    def load_state(self, unit: int, updated: Parameters) -> dict[str, torch.Tensor] | None:
        """Map the state of a unit, with zeros for parameters that have none yet; raises ``IntegrityError``."""
        shapes = _shapes(self._optimizer, updated)
        file = self._files.get(unit)
        if not shapes:
            return {}
        if file is None or not shapes.keys() <= file.infos.keys():
            self._extend(unit, shapes)
        elif unit in self._mapped:
            return None
        self._mapped.add(unit)
        self._ahead.discard(unit)
        if self._files[unit].size_bytes >= STATE_GIVEN_BACK_BYTES:
            trim_heap()  # memory of the step's graphs
        return self._files[unit].map()

    def parts(self, unit: int, updated: Parameters) -> Iterator[Parameters]:
        """Yield one parameter after the other; the pages of its state are released before the next one's are read."""
        file = self._files.get(unit)
        for name, parameter in updated.items():
            yield {name: parameter}
            if file is not None:
                file.release_pages(name)

    def evict_state(self, unit: int) -> bool:
        """Drop the mapping; the file has the state."""
        self._mapped.discard(unit)
        return True

    def prefetch(self, units: Iterable[int]) -> None:
        """Start to read the files of these units into the page cache, each once before it is mapped."""
        for unit in units:
            if unit in self._files and unit not in self._mapped and unit not in self._ahead:
                self._ahead.add(unit)
                self._prefetcher.ask(self._files[unit].path)

    def tensors(self, unit: int) -> dict[str, TensorPieces] | None:
        """Return the state of a unit, read from its file when iterated; empty if it was never updated."""
        return self._files[unit].pieces() if unit in self._files else {}

    def make_room(self, unit: int, infos: Mapping[str, TensorInfo]) -> bool:
        """Replace the file of a unit by one for ``infos``."""
        self._mapped.discard(unit)
        self._ahead.discard(unit)
        file = self._files.pop(unit, None)
        if file is not None:
            file.path.unlink(missing_ok=True)
        if infos:
            self._begin(unit, {name: (info.dtype, info.shape) for name, info in infos.items()})
        return True

    def fill(self, unit: int, name: str, source: TensorPieces) -> None:
        """Fill a tensor of a file."""
        self._files[unit].fill(name, source)

    def close(self) -> None:
        """Stop the prefetch, and remove the files."""
        self._prefetcher.close()
        for file in (*self._files.values(), *self._reserved.values()):
            file.path.unlink(missing_ok=True)
        self._files.clear()
        self._reserved.clear()
        self._mapped.clear()
        self._ahead.clear()

    def file_bytes(self, unit: int, parameters: Parameters) -> int:
        """Bytes of a unit's file after an update of all these parameters."""
        shapes = _shapes(self._optimizer, parameters)
        return StateFile(self._path(unit), self._origin(unit), shapes).size_bytes if shapes else 0

    def _extend(self, unit: int, shapes_needed: Shapes) -> None:
        """Make the file of a unit, or a larger one with the content of the old one."""
        before = self._files.get(unit)
        if before is None:
            self._begin(unit, shapes_needed)
            return
        kept = before.pieces()
        shapes = {name: (pieces.dtype, pieces.shape) for name, pieces in kept.items()}
        larger = StateFile(before.path.with_suffix(".larger"), self._origin(unit), {**shapes_needed, **shapes})
        larger.make()
        for name, pieces in kept.items():
            larger.fill(name, pieces)
        self._files[unit] = larger.moved(before.path)

    def _path(self, unit: int) -> Path:
        return self._folder / f"{unit}.safetensors"

    def _origin(self, unit: int) -> dict[str, str]:
        return {**self._of, "unit": str(unit)}

    def _begin(self, unit: int, shapes: Shapes) -> None:
        """Use the reserved file of a unit if it has the same tensors; otherwise make one."""
        reserved = self._reserved.pop(unit, None)
        is_fitting = reserved is not None and reserved.infos.keys() == shapes.keys()
        self._files[unit] = reserved if reserved is not None and is_fitting else self._made(unit, shapes)

    def _made(self, unit: int, shapes: Shapes) -> StateFile:
        file = StateFile(self._path(unit), self._origin(unit), shapes)
        file.make()
        return file


def _shapes(optimizer: str, parameters: Parameters) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of the state of some parameters, as ``name/key``."""
    return {
        f"{name}/{key}": (DTYPE_NAMES[state_dtype(key, parameter)], shape)
        for name, parameter in parameters.items()
        for key, shape in state_shapes(optimizer, tuple(parameter.shape)).items()
    }


def require_room(folder: Path, optimizers: Sequence[UnitOptimizers], of: Mapping[str, str]) -> None:
    """Refuse a folder without disk space for the state of all units of a node; ``of`` as for ``DiskStateStore``.

    Raises:
        StorageError: the folder can't be written, or its disk has less space; names both numbers.
        UsageError: the node computes on an accelerator; its optimizers can't update mapped tensors.
    """
    check_writable(folder / "unit.safetensors")
    needed_bytes = 0
    for each in optimizers:
        keeper = DiskStateStore(folder, each.name, of)
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


FORMAT = "ringtune-state-1"
_METADATA = "ringtune"

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> dtype, as ``F32``, and shape."""


class StateFile:
    """A file of tensors that only this process writes.

    Args:
        of: run and unit, for the header.

    Attributes:
        infos: its tensors by name, in the order of the data.
    """

    def __init__(self, path: Path, of: Mapping[str, str], shapes: Shapes) -> None:
        self.path = path
        self._of = dict(of)
        self._pages: Callable[[], mmap.mmap | None] = lambda: None
        # widest first, so that each tensor is aligned
        ordered = dict(sorted(shapes.items(), key=lambda item: (-DTYPE_BYTES[item[1][0]], item[0])))
        text = json.dumps({"format": FORMAT, **self._of}, sort_keys=True)
        self._header = header_bytes(ordered, metadata={_METADATA: text})
        self.size_bytes = len(self._header) + sum(
            math.prod(shape, start=DTYPE_BYTES[dtype]) for dtype, shape in ordered.values()
        )
        self.infos: dict[str, TensorInfo] = header_of(io.BytesIO(self._header), self.size_bytes, where=str(path))

    def make(self) -> None:
        """Make the file, with zeros in all tensors; one that was there is replaced."""
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            try:
                with self.path.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, self.size_bytes)
                    file.write(self._header)
            except BaseException:
                self.path.unlink(missing_ok=True)
                raise

    def moved(self, path: Path) -> StateFile:
        """Rename the file, in place of an old one; return itself."""
        with storage_errors(path):
            self.path.replace(path)
        self.path = path
        return self

    def map(self) -> dict[str, torch.Tensor]:
        """Return the tensors on the mapped file, mapped until the last one is freed; raises ``IntegrityError``."""
        with self._opened("r+b") as file:
            self._check(file)
            pages = mmap.mmap(file.fileno(), self.size_bytes, access=mmap.ACCESS_WRITE)
        self._pages = weakref.ref(pages)
        return {name: _tensor(pages, info) for name, info in self.infos.items()}

    def release_pages(self, parameter: str) -> None:
        """Release the resident pages of a mapped parameter's state ``parameter/key``; a later access reads the file."""
        pages = self._pages()
        if pages is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        for name, info in self.infos.items():
            if name.rpartition("/")[0] == parameter and info.nbytes:
                start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
                pages.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)

    def pieces(self) -> dict[str, TensorPieces]:
        """Return the tensors, read from the file when iterated; raises ``IntegrityError``."""
        with self._opened("rb") as file:
            self._check(file)
        return {
            name: TensorPieces(info.dtype, info.shape, FilePieces(self.path, info.offset, info.nbytes))
            for name, info in self.infos.items()
        }

    def fill(self, name: str, source: TensorPieces) -> None:
        """Replace a tensor by a source of its dtype and shape, a piece at a time; raises ``IntegrityError``."""
        info = self.infos[name]
        if source.data.size_bytes != info.nbytes:
            raise IntegrityError(
                f"{name} arrived with {source.data.size_bytes:,} bytes, its state has {info.nbytes:,}; copy it again"
            )
        with self._opened("r+b") as file, storage_errors(self.path):
            self._check(file)
            file.seek(info.offset)
            for piece in source.data:
                file.write(piece)

    def _check(self, file: io.BufferedIOBase) -> None:
        """Refuse a file with another header or size than this process wrote."""
        header, size_bytes = file.read(len(self._header)), os.fstat(file.fileno()).st_size
        if header == self._header and size_bytes == self.size_bytes:
            return
        other = "" if size_bytes != self.size_bytes else _origin(header)
        what = (
            f"is of {other}"
            if other and other != _in_words(self._of)
            else (f"is damaged ({size_bytes:,} bytes of {self.size_bytes:,})")
        )
        raise IntegrityError(
            f"the optimizer state {self.path} {what}, not of {_in_words(self._of)}; nothing but its run may write "
            "there: go on from the last checkpoint with --resume"
        )

    @contextlib.contextmanager
    def _opened(self, mode: str) -> Iterator[io.BufferedRandom]:
        try:
            file = self.path.open(mode)
        except OSError as error:
            raise IntegrityError(
                f"the optimizer state {self.path} of {_in_words(self._of)} can't be opened ({error.strerror}); go on "
                "from the last checkpoint with --resume"
            ) from error
        with file:
            yield file  # type: ignore[misc]


def _tensor(pages: mmap.mmap, info: TensorInfo) -> torch.Tensor:
    dtype = torch_dtype(info.dtype)
    if not info.nbytes:
        return torch.empty(info.shape, dtype=dtype)
    count = info.nbytes // dtype.itemsize
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=info.offset).view(info.shape)


def _origin(header: bytes) -> str:
    """Run and unit in a file's header; empty if it has none."""
    try:
        entry = parse_json(header[8:])["__metadata__"][_METADATA]
        values = dict(parse_json(entry))
        values.pop("format")
        return _in_words(values)
    except (ValueError, KeyError, TypeError):
        return ""


def _in_words(of: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(of.items()))


_LOG = logging.getLogger(__name__)
_HINT_BYTES = 128 * 1024  # the kernel cuts a longer hint
_CLOSE_S = 2.0


class Prefetcher:
    """A thread that prefetches files; started by the first file."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, path: Path) -> None:
        """Queue a file for the prefetch; a missing file is ignored."""
        if self._closing.is_set() or not hasattr(os, "posix_fadvise"):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="state-prefetch", daemon=True)
            self._thread.start()
        self._asked.put(path)

    def close(self) -> bool:
        """Stop the thread; False if it still runs after ``_CLOSE_S`` seconds."""
        self._closing.set()
        self._asked.put(None)
        if self._thread is None:
            return True
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._closing.is_set() and (path := self._asked.get()) is not None:
            try:
                self._read(path)
            except OSError as error:
                _LOG.debug("can't read %s ahead: %s", path, error)

    def _read(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for start in range(0, os.fstat(descriptor).st_size, _HINT_BYTES):
                if self._closing.is_set():
                    return
                os.posix_fadvise(descriptor, start, _HINT_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


class InactiveState:
    """Evicts and prefetches optimizer state by the units of each step.

    Args:
        optimizers: of the node's blocks, and of an owner's embedding and head.
    """

    def __init__(self, course: Course, optimizers: Sequence[UnitOptimizers]) -> None:
        self._course = course
        self._optimizers = tuple(optimizers)
        self._is_moved = course.method.drops_state
        self._step = -1
        if course.method.drops_state:
            for each in self._optimizers:
                each.keep_in(StateStore())

    def keep_on_disk(self, folder: Path, of: Mapping[str, str]) -> None:
        """Keep the state of inactive units, of which none has state yet, in files; raises as ``require_room``.

        Disk space is allocated at once, so that two nodes on one disk can't both count on it; ``of`` as for
        ``DiskStateStore``.
        """
        require_room(folder, self._optimizers, of)
        self._is_moved = True
        for each in self._optimizers:
            keeper = DiskStateStore(folder, each.name, of)
            each.keep_in(keeper)
            keeper.reserve(each.units)

    def begin(self, item: Item) -> None:
        """Prefetch the state for the step of an item and for the next step; called at each action."""
        if self._is_moved and item.kind.has_update and item.step != self._step:
            self._step = item.step
            for step in (item.step, item.step + 1):
                for each in self._optimizers:
                    each.prefetch(self._trained(step))

    def updated(self, step: int, units: Iterable[int]) -> None:
        """Evict the state of units that were updated at ``step`` and do not train at the next step."""
        if self._is_moved:
            goes_on = self._trained(step + 1)
            inactive = [unit for unit in units if unit not in goes_on]
            for each in self._optimizers:
                each.evict_state(inactive)

    def close(self) -> None:
        """Remove the files."""
        if self._is_moved:
            for each in self._optimizers:
                each.close()

    def _trained(self, step: int) -> Units:
        return self._course.method.trained(self._course, step)
