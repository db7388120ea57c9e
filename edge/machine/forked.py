"""Set up a forked process: which process's end ends it, and the command line that lists of processes show.

Linux only: elsewhere nothing happens, and the process is listed under the name of the one that it was forked from.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # of linux/prctl.h
_ARG_START, _ARG_END = 45, 46  # of the fields of /proc/PID/stat behind the name, counted from 0


def count_threads() -> int:
    """Number of threads of this process, those of libraries included."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return threading.active_count()


def die_with(parent: int) -> bool:
    """Let the kernel kill this process as soon as its parent has ended.

    Args:
        parent: process id of the parent, asked for before the fork.

    Returns:
        Whether the parent still lives.

    Source: Linux, prctl(2), ``PR_SET_PDEATHSIG``.
    """
    try:
        zero = ctypes.c_ulong(0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), zero, zero, zero)
    except (OSError, AttributeError):
        pass
    return os.getppid() == parent


def set_command_line(words: Sequence[str]) -> None:
    """Show these words as the command line of this process, as many as there is room for.

    The room is what the process was started with; the kernel reads the command line from there.

    Source: Linux, proc(5), ``/proc/PID/stat`` fields 48 and 49.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, room = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
    except (OSError, ValueError, IndexError):
        return
    if start > 0 and room > 1:
        text = b"\0".join(os.fsencode(word) for word in words)[: room - 1]
        ctypes.memmove(start, text.ljust(room, b"\0"), room)
