"""Recognise a file that only points to its content: what git leaves where Git LFS was not installed.

Source: the specification of Git LFS, version 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_BEGIN: Final = b"version https://git-lfs.github.com/spec/"
_MOST_BYTES: Final = 1024


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS; False if it can't be read."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def pointer_advice(path: Path) -> str:
    """Say that a file is a pointer and what to do."""
    return f"{path} is a pointer of Git LFS in place of the file; run 'git lfs pull' where the folder was cloned"
