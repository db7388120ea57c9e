"""Choose the kind of progress that suits the output: terminal, file or JSON lines."""

from __future__ import annotations

import sys
from typing import TextIO

from coordinator.screen.progress import JsonProgress, PlainProgress, Progress


def make_progress(*, as_json: bool, live: bool = True, stream: TextIO | None = None) -> Progress:
    """Make the progress that suits the output: JSON lines, a redrawn terminal, or plain lines.

    Args:
        as_json: JSON lines, wherever it goes.
        live: whether a terminal may be redrawn.
        stream: the standard output if not given.
    """
    stream = sys.stdout if stream is None else stream
    if as_json:
        return JsonProgress(stream)
    if live and stream.isatty():
        from coordinator.screen.live_progress import LiveProgress

        return LiveProgress()
    return PlainProgress(stream)
