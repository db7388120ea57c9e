"""Bring files into the page cache in the background, so that an update soon after does not wait for the disk.

The thread only gives the kernel a hint for each piece: it runs nothing of torch, draws no random number, and maps
nothing, so that no result depends on it and a process holds nothing more. What has not come in time comes when it is
used. Where the kernel takes no hints nothing is read ahead.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path

_LOG = logging.getLogger(__name__)
_HINT_BYTES = 128 * 1024  # a longer hint is cut off to what the kernel reads ahead at once
_CLOSE_S = 2.0


class Prefetcher:
    """A thread that reads files ahead; it begins with the first file."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, path: Path) -> None:
        """Ask for a file to be read ahead, and return at once; a file that is not there is left alone."""
        if self._closing.is_set() or not hasattr(os, "posix_fadvise"):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="state-prefetch", daemon=True)
            self._thread.start()
        self._asked.put(path)

    def close(self) -> bool:
        """End the thread; False if the disk keeps it for longer than ``_CLOSE_S`` seconds."""
        self._closing.set()
        self._asked.put(None)
        if self._thread is None:
            return True
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._closing.is_set() and (path := self._asked.get()) is not None:
            try:
                self._read(path)
            except OSError as error:
                _LOG.debug("can't read %s ahead: %s", path, error)

    def _read(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for start in range(0, os.fstat(descriptor).st_size, _HINT_BYTES):
                if self._closing.is_set():
                    return
                os.posix_fadvise(descriptor, start, _HINT_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
