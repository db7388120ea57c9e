"""Show progress where the caller sees it: a terminal, a notebook, a file, or nowhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from coordinator.records.step_lines import STEP_KIND
from coordinator.screen.output import make_progress
from coordinator.screen.progress import PlainProgress, Progress
from coordinator.screen.progress_lines import evaluating_line, step_line
from ringtune.texts import printable


def choose_progress(wanted: bool) -> Progress:
    """Make the progress that suits the standard output.

    Args:
        wanted: False = nothing is shown.
    """
    if not wanted:
        return Progress()
    return NotebookProgress(sys.stdout) if is_notebook() else make_progress(as_json=False)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython is asked only if it is loaded already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookProgress(PlainProgress):
    """Shows a run below the cell of a notebook: one line for the steps, written over, and others above it.

    A carriage return brings a notebook's output back to the line's begin, as on a terminal. Nothing is HTML, so the
    saved notebook reads well everywhere.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._width = 0

    def step(self, step: Mapping[str, Any]) -> None:
        """Write the newest step over the one before; of an evaluation how far it is."""
        if self._last.take(step):
            self._over(step_line(step))
        elif step["kind"] != STEP_KIND:
            self._over(evaluating_line(step))

    def note(self, text: str) -> None:
        """Write the text on a line of its own; the next step begins a new one."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0
        super().note(text)

    def _over(self, text: str) -> None:
        line = printable(text)
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = max(self._width, len(line))
