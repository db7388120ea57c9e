"""What functions of the Python API have in common: a run by its folder, and errors in words of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from ringtune.errors import RingTuneError

_OPTION: Final = re.compile(r"(?<![\w-])--([a-z][a-z-]*)(?: (?=[A-Z])|=)?")
_COMMAND: Final = "ringtune "


class HasFolder(Protocol):
    """What a ``Run`` is to those who only want its files."""

    @property
    def folder(self) -> Path:
        """Where they are."""


RunLike: TypeAlias = HasFolder | str | PathLike[str]


def folder_of(run: RunLike) -> Path:
    """Return the folder of a run, or the path that was given for one."""
    return Path(run) if isinstance(run, str | PathLike) else run.folder


@contextmanager
def python_words(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Say errors with arguments of Python: ``--data FILE`` is ``data=FILE``, ``--column`` an entry of ``columns``.

    A command that a message tells to type stays as it is.

    Args:
        names: parts of messages -> what stands in their place, such as a temporary file.
    """
    try:
        yield
    except RingTuneError as error:
        error.args = tuple(_in_python(part, names or {}) if isinstance(part, str) else part for part in error.args)
        raise


def _in_python(text: str, names: Mapping[str, str]) -> str:
    for name, instead in names.items():
        text = text.replace(name, instead)
    before, command, rest = text.partition(_COMMAND)
    before = re.sub(r"--column (\w+)=([\w.]+)", r"columns={'\1': '\2'}", before)
    return _OPTION.sub(lambda found: found[1].replace("-", "_") + "=", before) + command + rest
