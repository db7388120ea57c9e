"""Handle the signals that ask a process to end: Ctrl-C, the end of a service, a closed terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let ``handler`` handle SIGINT, SIGTERM and SIGHUP in this context; to be entered in the main thread.

    SIGHUP stays ignored where it was, so that ``nohup`` does what it is for. The handlers that were there before are
    given back. A handler runs between any two instructions of the main thread, so it should only note the signal,
    start a thread, or raise.

    Args:
        handler: called with the number of the signal, and the frame that it interrupts.
    """
    hears = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    wanted = [number for number in ENDS if hears or number != signal.SIGHUP]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
