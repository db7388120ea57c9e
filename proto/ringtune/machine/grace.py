"""End a process that was told to end and does not: whatever a thread waits for, its grace time is the longest.

A thread that waits for a call has a deadline; one that waits for a disk that hangs, a pipe that nobody reads, or a lock
that such a thread holds has none. The order in which a process ends stays what it is: this is for what it forgets.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Final

_SAY_S: Final = 0.5
"""So long may it take to say why; standard error may be what hangs."""
_lock = threading.Lock()
_ends_s = float("inf")
_is_own = False


def own_process() -> None:
    """Say that this process is that of a command, and may be ended; nothing ends one into which it was only loaded."""
    global _is_own
    _is_own = True


def end_within(grace_s: float, code: int) -> None:
    """Let the process of a command end with an exit code after so many seconds, unless it has ended by itself.

    Of several calls the one with the earliest end counts. To be called where no lock is held by the same thread, such
    as in the handler of a signal.

    Args:
        grace_s: seconds from now.
        code: of the exit.
    """
    global _ends_s
    end_s = time.monotonic() + grace_s
    with _lock:
        if not _is_own or end_s >= _ends_s:
            return
        _ends_s = end_s
    threading.Thread(target=_end, args=(grace_s, code), name="grace", daemon=True).start()


def _end(grace_s: float, code: int) -> None:
    time.sleep(grace_s)
    saying = threading.Thread(target=_say, args=(grace_s,), name="grace-says", daemon=True)
    saying.start()
    saying.join(_SAY_S)
    os._exit(code)


def _say(grace_s: float) -> None:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    waiting = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident() and names.get(ident) != "grace":
            waiting.append(f"{names.get(ident, ident)} at {frame.f_code.co_filename}:{frame.f_lineno}")
    sys.stderr.write(f"error: did not end within {grace_s:g} s, so it ends now; threads: {'; '.join(waiting)}\n")
    sys.stderr.flush()
