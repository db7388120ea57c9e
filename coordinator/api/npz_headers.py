"""Type and shape of the arrays of an npz file, and short arrays of labels, read without numpy.

An npz file is a zip of npy files: a magic, a version, and a Python dict of ``descr``, ``fortran_order`` and ``shape``
as text, then the numbers. The dict is matched by a pattern and never evaluated.

Source: NumPy, ``numpy/lib/format.py``, "Format Version 1.0" to "3.0".
"""

from __future__ import annotations

import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ringtune.errors import DataError

_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 1 << 16
_MAX_LABEL_BYTES = 1 << 30
_DESCR = re.compile(r"'descr':\s*'([<>|=]?)([a-zA-Z])(\d+)'")
_SHAPE = re.compile(r"'shape':\s*\(([\d,\s]*)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayHeader:
    """Type and shape of an array, from the header of its npy file.

    Attributes:
        kind: letter of the type: ``u``, ``i``, ``f``, ``U``.
        item_bytes: of one element; of a ``U`` four for each character.
        is_big_endian: the most significant byte is first.
        shape: of the array.
    """

    kind: str
    item_bytes: int
    is_big_endian: bool
    shape: tuple[int, ...]


class Archive:
    """An open npz file; a context manager.

    Args:
        path: of the file.

    Raises:
        DataError: it is no zip file, or can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except OSError as error:
            raise DataError(f"can't read {path}: {error.strerror}; set data.train and data.eval") from error
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise self._damaged(error) from error

    def __enter__(self) -> Archive:
        """Return the archive."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._zip.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(name.removesuffix(".npy") for name in self._zip.namelist())

    def header(self, name: str) -> ArrayHeader:
        """Read shape and type of an array.

        Raises:
            DataError: there is no such array, or it is damaged.
        """
        return self._read(name, with_content=False)[0]

    def labels(self, name: str) -> list[str]:
        """Read an array of whole numbers or names as text: numbers 3 and 1 are "3" and "1".

        Raises:
            DataError: there is no such array, it is damaged, or of another type or shape.
        """
        header, content = self._read(name, with_content=True)
        if len(header.shape) != 1 or header.kind not in "iuU":
            raise DataError(f"{self.path}: labels are of type {header.kind} and shape {list(header.shape)}; give a row")
        size = header.item_bytes
        parts = (content[first : first + size] for first in range(0, len(content), size))
        if header.kind == "U":
            coding = "utf-32-be" if header.is_big_endian else "utf-32-le"
            return [part.decode(coding, errors="replace").rstrip("\0") for part in parts]
        order = "big" if header.is_big_endian else "little"
        return [str(int.from_bytes(part, order, signed=header.kind == "i")) for part in parts]  # type: ignore[arg-type]

    def _read(self, name: str, *, with_content: bool) -> tuple[ArrayHeader, bytes]:
        if name not in self.names:
            raise DataError(f"{self.path} has no array {name!r}; it has {', '.join(self.names)}")
        try:
            with self._zip.open(f"{name}.npy") as file:
                header = _header(file)
                size = header.item_bytes * (header.shape[0] if header.shape else 1) if with_content else 0
                if size > _MAX_LABEL_BYTES:
                    raise ValueError(f"{size} bytes of labels")
                content = file.read(size)
                if len(content) != size:
                    raise ValueError("it ends early")
                return header, content
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is no readable npz file ({error}); write it with numpy.savez")


def _header(file: IO[bytes]) -> ArrayHeader:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("an array in it is no npy file")
    version = file.read(2)[:1]
    size = int.from_bytes(file.read(2 if version == b"\x01" else 4), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes")
    text = file.read(size).decode("utf-8", errors="replace")
    descr, shape = _DESCR.search(text), _SHAPE.search(text)
    if descr is None or shape is None:
        raise ValueError(f"a header that says {text.strip()[:80]!r}")
    kind, count = descr[2], int(descr[3])
    return ArrayHeader(
        kind=kind,
        item_bytes=count * 4 if kind == "U" else count,
        is_big_endian=descr[1] == ">",
        shape=tuple(int(part) for part in shape[1].split(",") if part.strip()),
    )
