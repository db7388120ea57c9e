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


def _faults(mode: str) -> int:
    command = [sys.executable, "-c", _SCRIPT, mode]
    return int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)  # noqa: S603


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_allocator_keeps_blocks_of_some_mib() -> None:
    """Blocks of 4 MiB that come and go cost almost no page faults, which they do otherwise."""
    assert _faults("keep") < 1000 < _faults("leave")
