"""Freed memory stays in the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import resource, sys
from edge.machine.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def touch():
    for _ in range(20):
        block = [bytearray(4 << 20) for _ in range(3)]
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


_THREADS_SCRIPT = """
import ctypes, sys, threading
from edge.machine.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
heaps, wait = set(), threading.Barrier(6)
def take():
    wait.wait()
    heaps.add(library.malloc(1 << 16) >> 26)  # the heap of a thread begins at a multiple of 64 MiB
    wait.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(heaps))
"""

_PIECES_SCRIPT = """
import ctypes, pathlib, sys
from edge.machine import allocator
assert allocator.keep_freed_memory()
if sys.argv[1] == "return":
    assert allocator.return_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)
library.posix_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
def tensor():
    address = ctypes.c_void_p()
    assert not library.posix_memalign(address, 64, 3 << 20)
    ctypes.memset(address, 1, 3 << 20)
    return address
def resident():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10
before = resident()
for _ in range(2):
    tensors = [tensor() for _ in range(40)]
    small = [library.malloc(size) for size in range(24, 1024, 8) for _ in range(40)]
    peak = resident() - before
    for each in tensors: library.free(each)
print(peak)
"""


def _answer(script: str, mode: str) -> int:
    command = [sys.executable, "-c", script, mode]
    return int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)  # noqa: S603


def _faults(mode: str) -> int:
    return _answer(_SCRIPT, mode)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_allocator_keeps_blocks_of_some_mib() -> None:
    """Blocks of 4 MiB that come and go cost almost no page faults, which they do otherwise."""
    assert _faults("keep") < 1000 < _faults("leave")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_allocator_has_one_heap_for_all_threads() -> None:
    """What one thread frees every other one can use; by default the memory of six threads lies in several heaps."""
    assert _answer(_THREADS_SCRIPT, "keep") <= 2 < _answer(_THREADS_SCRIPT, "leave")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_allocator_that_returns_memory_keeps_no_pieces() -> None:
    """Where small things took the slivers beside 120 MiB of tensors, the next 120 MiB do not fit into a kept heap."""
    assert _answer(_PIECES_SCRIPT, "return") < 140 < 200 < _answer(_PIECES_SCRIPT, "keep")
