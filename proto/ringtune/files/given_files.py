"""Read files that a user names or that were copied from elsewhere: only files, whole, and never endlessly."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, Final

from ringtune.files.strict import parse_json

_MOST_BYTES: Final = 1 << 30


def read_given(path: Path, *, encoding: str = "utf-8") -> str:
    """Read a text file.

    Raises:
        OSError: it is not there, no file (a pipe would be waited for), or longer than any text that is meant.
        UnicodeDecodeError: it is in another encoding.
    """
    if path.exists() and not path.is_file():
        what = (errno.EISDIR, "it is a folder") if path.is_dir() else (errno.EINVAL, "it is a pipe or device, no file")
        raise OSError(*what, str(path))
    if path.stat().st_size > _MOST_BYTES:
        raise OSError(errno.EFBIG, "it is too long", str(path))
    return path.read_text(encoding=encoding)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: as ``read_given``.
        ValueError: no JSON, or nested too deeply.
    """
    return parse_json(read_given(path))
