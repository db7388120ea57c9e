"""The optimizer state of one unit as a safetensors file, which is mapped into memory while the unit is updated.

The update writes into the mapping, so that nothing is read or written as a whole: the kernel brings pages in and takes
them out, and what an inactive unit has of them is page cache, which the kernel drops where memory is short. Room on
the disk is taken when the file is made. A write into a page that the disk has no room for would end the process.

The file is scratch: it is not forced to the disk. After a crash a run goes on from its checkpoint, which has its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from edge.model.tensor_bytes import torch_dtype
from ringtune.errors import IntegrityError
from ringtune.files.durable import storage_errors
from ringtune.files.pieces import FilePieces
from ringtune.files.safetensors_header import DTYPE_BYTES, TensorInfo, header_bytes, header_of
from ringtune.files.safetensors_stream import TensorPieces
from ringtune.files.strict import parse_json

FORMAT = "ringtune-state-1"
_METADATA = "ringtune"

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type, as ``F32``, and shape of each tensor by its name."""


class StateFile:
    """A file that was made by this process and that nobody else may write.

    Args:
        path: of the file.
        of: what it is of, such as the run and the unit.
        shapes: of its tensors.

    Attributes:
        infos: its tensors by name, in the order of the data.
        size_bytes: of the whole file.
    """

    def __init__(self, path: Path, of: Mapping[str, str], shapes: Shapes) -> None:
        self.path = path
        self._of = dict(of)
        self._pages: Callable[[], mmap.mmap | None] = lambda: None
        # widest first, so that each tensor is aligned
        ordered = dict(sorted(shapes.items(), key=lambda item: (-DTYPE_BYTES[item[1][0]], item[0])))
        text = json.dumps({"format": FORMAT, **self._of}, sort_keys=True)
        self._header = header_bytes(ordered, metadata={_METADATA: text})
        self.size_bytes = len(self._header) + sum(_num_bytes(*shape) for shape in ordered.values())
        self.infos: dict[str, TensorInfo] = header_of(io.BytesIO(self._header), self.size_bytes, where=str(path))

    def make(self) -> None:
        """Make the file, with zeros in all tensors; one that was there is replaced.

        Raises:
            StorageError: no room.
        """
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
        """Give the file another name, in place of what is there; return it under that name."""
        with storage_errors(path):
            self.path.replace(path)
        self.path = path
        return self

    def map(self) -> dict[str, torch.Tensor]:
        """Return the tensors, whose memory is the file; it is mapped until the last of them is gone.

        Raises:
            IntegrityError: the file is gone, was cut off, or is of something else.
        """
        with self._opened("r+b") as file:
            self._check(file)
            pages = mmap.mmap(file.fileno(), self.size_bytes, access=mmap.ACCESS_WRITE)
        self._pages = weakref.ref(pages)
        return {name: _tensor(pages, info) for name, info in self.infos.items()}

    def let_go_of(self, parameter: str) -> None:
        """Let go of the resident pages of a parameter's state where it is mapped; what was written is in the file.

        Whoever reads or writes there again gets them back from the page cache.

        Args:
            parameter: whose tensors are ``parameter/key``.
        """
        pages = self._pages()
        if pages is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        for name, info in self.infos.items():
            if name.rpartition("/")[0] == parameter and info.nbytes:
                start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
                pages.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)

    def pieces(self) -> dict[str, TensorPieces]:
        """Return the tensors, read from the file when they are gone through.

        Raises:
            IntegrityError: as ``map``.
        """
        with self._opened("rb") as file:
            self._check(file)
        return {
            name: TensorPieces(info.dtype, info.shape, FilePieces(self.path, info.offset, info.nbytes))
            for name, info in self.infos.items()
        }

    def fill(self, name: str, source: TensorPieces) -> None:
        """Replace the bytes of a tensor by those of a source of its type and shape, a piece at a time.

        Raises:
            IntegrityError: as ``map``, or the source has fewer or more bytes.
        """
        info = self.infos[name]
        if source.data.size_bytes != info.nbytes:
            raise IntegrityError(
                f"{name} came with {source.data.size_bytes:,} bytes, its state has {info.nbytes:,}; copy it again"
            )
        with self._opened("r+b") as file, storage_errors(self.path):
            self._check(file)
            file.seek(info.offset)
            for piece in source.data:
                file.write(piece)

    def _check(self, file: io.BufferedIOBase) -> None:
        """Refuse a file that is not the one that was made here."""
        found, size_bytes = file.read(len(self._header)), os.fstat(file.fileno()).st_size
        if found == self._header and size_bytes == self.size_bytes:
            return
        other = "" if size_bytes != self.size_bytes else _whose(found)
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


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = DTYPE_BYTES[dtype]
    for side in shape:
        count *= side
    return count


def _whose(header: bytes) -> str:
    """What a file is of by its header; empty if it does not say so."""
    try:
        entry = parse_json(header[8:])["__metadata__"][_METADATA]
        found = dict(parse_json(entry))
        found.pop("format")
        return _in_words(found)
    except (ValueError, KeyError, TypeError):
        return ""


def _in_words(of: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(of.items()))
