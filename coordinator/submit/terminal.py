"""The terminal of a command, which may be closed while the command still has something to save.

Closing a terminal sends SIGHUP, and from then on every write to it fails. What a command prints then goes to a file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TextIO

from ringtune.machine.outputs import lasting


class Terminal:
    """Guards what a command prints while in its context.

    Args:
        log: gets what is printed after the terminal was closed; None, or a file that can't be written = nobody does.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._descriptors: list[int] = []
        self._before: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)

    def __enter__(self) -> Terminal:
        """Note which of the outputs are terminals."""
        self._descriptors = [number for number in (1, 2) if os.isatty(number)]
        if self._descriptors:
            self._before = (sys.stdout, sys.stderr)
            sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the outputs as they were; those of a terminal that was closed go on into the file."""
        if self._descriptors:
            sys.stdout, sys.stderr = self._before

    def closed(self) -> None:
        """Write into the file from now on what would have gone to the terminal."""
        if not self._descriptors:
            return
        target = self._open()
        for number in self._descriptors:
            os.dup2(target, number)
        os.close(target)

    def _open(self) -> int:
        if self._log is not None:
            with contextlib.suppress(OSError):
                return os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return os.open(os.devnull, os.O_WRONLY)
