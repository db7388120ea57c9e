"""The folder of a run, of which a handle or a path is given."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Protocol, TypeAlias


class HasFolder(Protocol):
    """What a ``Run`` is to those who only want its files."""

    @property
    def folder(self) -> Path:
        """Where they are."""


RunLike: TypeAlias = HasFolder | str | PathLike[str]


def folder_of(run: RunLike) -> Path:
    """Return the folder of a run, or the path that was given for one."""
    return Path(run) if isinstance(run, str | PathLike) else run.folder
