"""Paths and names in a job, checked before any system is asked for them."""

from __future__ import annotations

from typing import Final

from ringtune.errors import JobError
from ringtune.texts import shown

_MOST_BYTES: Final = 4095
_MOST_NAME_BYTES: Final = 255


def check_path(name: str, path: str) -> None:
    """Refuse a path that no file system has.

    Args:
        name: of the key.
        path: its value.

    Raises:
        JobError: it is too long, or a folder or file in it is.
    """
    longest = max(map(_size, path.split("/")))
    if _size(path) > _MOST_BYTES or longest > _MOST_NAME_BYTES:
        raise JobError(f"{name} = {shown(path)} is no path; one has at most {_MOST_BYTES:,} bytes, a name in it 255")


def check_text(name: str, value: str) -> None:
    """Refuse a name or path that is empty, or that nothing can have; arguments as ``check_path``."""
    if not value.strip():
        raise JobError(f"{name} is empty; give it a value")
    check_path(name, value)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
