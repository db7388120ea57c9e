"""Shapes and types of the arrays of an npz file, and arrays of labels, without reading the images.

Numpy is imported when a file is read, because that takes a tenth of a second.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from ringtune.errors import DataError
from ringtune.storage.text_files import check_archive

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
_UNREADABLE: Final = (OSError, ValueError, EOFError, MemoryError, KeyError, NotImplementedError, zlib.error)


class Archive:
    """An open npz file, as a context manager; raises ``DataError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_archive(path)
            self._zip = zipfile.ZipFile(path)
        except OSError as error:
            raise DataError(f"can't read {path}: {error.strerror}; set data.train and data.eval") from error
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise self._damaged(error) from error

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(name.removesuffix(".npy") for name in self._zip.namelist())

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Read shape and type of an array; raises ``DataError``."""
        return self._read(name, _header)

    def labels(self, name: str) -> list[str]:
        """Read a one-dimensional array of integers or names as text: 3 and 1 are "3" and "1".

        Raises:
            DataError: there is no such array, it is damaged, or of another type or shape.
        """
        shape, kind = self.header(name)
        if len(shape) != 1 or kind.kind not in "iuU":
            raise DataError(f"{self.path}: labels are of type {kind.kind} and shape {list(shape)}; give a row")
        from numpy.lib import format as npy

        labels = self._read(name, lambda file: npy.read_array(file, allow_pickle=False))
        return [str(label) for label in labels.tolist()]

    def _read(self, name: str, read: Callable[[IO[bytes]], T]) -> T:
        if name not in self.names:
            raise DataError(f"{self.path} has no array {name!r}; it has {', '.join(self.names)}")
        try:
            with self._zip.open(f"{name}.npy") as file:
                return read(file)
        except (*_UNREADABLE, zipfile.BadZipFile) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is no readable npz file ({error}); write it with numpy.savez")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    from numpy.lib import format as npy

    is_first = npy.read_magic(file) == (1, 0)
    shape, _, kind = (npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0)(file)
    if kind.hasobject:
        raise ValueError("an array of objects, which is a pickle")
    return shape, kind
