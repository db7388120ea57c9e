"""Keep freed memory in the process instead of giving it back to the kernel for every tensor.

glibc takes blocks of some MiB fresh from the kernel and returns them when they are freed, so that each
tensor that arrives costs a thousand page faults: a third of the receiver's CPU time for 4 MiB tensors
(measured: 1.7 ms instead of 2.9 ms each). An agent calls this once at its start; it costs at most
``KEPT_BYTES`` of resident memory.

By default glibc gives each thread an arena, a heap of its own: what one thread frees there no other one can use, and
an agent has a dozen. With one arena for all of them the demo's nodes peak 4 to 18 MiB lower, and the channel is no
slower (``python -m tests.bench.channel``).

What is kept is in pieces. A tensor's room is aligned, so a freed one of the same size fits only with the slivers beside
it, and small things have often taken these. A LoRA step of six blocks of MiniLM's shape needs 330 MiB and made a heap
of 800 MiB. A node without room for that (``ringtune.costs.memory.heap``) takes tensors fresh from the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

KEPT_BYTES: Final = 32 * 1024 * 1024
"""Bytes of free memory at the end of the heap that stay; larger single blocks still come from the kernel."""

RETURNED_BYTES: Final = 128 * 1024
"""From how many bytes on a block is the kernel's again as soon as it is freed, where memory is short."""

_M_TRIM_THRESHOLD: Final = -1  # of glibc's malloc.h
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_freed_memory() -> bool:
    """Tell glibc to keep up to ``KEPT_BYTES`` of freed memory, in one heap for all threads.

    Returns:
        Whether it took effect; with another C library nothing changes.
    """
    return _set({_M_MMAP_THRESHOLD: KEPT_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES, _M_ARENA_MAX: 1})


def return_freed_memory() -> bool:
    """Tell glibc to give every freed block of ``RETURNED_BYTES`` or more back to the kernel at once.

    A step then takes 9 to 25 % more processor time, for page faults. ``keep_freed_memory`` undoes it.

    Returns:
        Whether it took effect; with another C library nothing changes.
    """
    return _set({_M_MMAP_THRESHOLD: RETURNED_BYTES})


def _set(settings: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    took = [mallopt(name, value) for name, value in settings.items()]
    return all(took)
