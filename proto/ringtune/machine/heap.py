"""The heap of a process: what is freed there stays with the process until somebody hands it back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys


def trim_heap() -> None:
    """Hand freed heap pages back to the system; no effect with another C library than glibc."""
    if os.name == "posix" and sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
