"""Find how much memory is free for this process: below the limits of its control groups, not only the host's.

A process in a container sees the host's memory in ``/proc/meminfo``; the kernel ends it at the limit of its control
group. Every group up to the root counts. Page cache counts as free: the kernel drops it before it ends a process.

Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst; ``proc_meminfo(5)``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringtune.machine.control_groups import CGROUP, PROC, group_folders

OWN_LIBRARY_BYTES: Final = 259 << 20
"""What an idle agent has of its own, without pages of files, which can be read again; see ``LIBRARY_BYTES``."""

LIBRARY_BYTES: Final = 384 << 20
"""Resident bytes of an idle agent that has loaded its libraries, before it hosts anything.

Interpreter, torch, transformers, adapters and gRPC: 259 MiB of its own and 114 MiB of the libraries' files on x86-64,
where every file is read (``python -m tests.bench.memory``). Agents forked from one template share most of the former.
"""

# "No limit" is written as a number near 2**63 by version 1.
_NO_LIMIT_BYTES: Final = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """What a version of control groups calls its files, and the page cache in ``memory.stat``."""

    limit: str
    used: str
    page_cache: tuple[str, ...]


_VERSIONS: Final = (
    _Names(limit="memory.max", used="memory.current", page_cache=("inactive_file", "active_file")),
    _Names(
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
        page_cache=("total_inactive_file", "total_active_file"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """A control group's memory limit, and what its processes use now without the page cache, in bytes."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes that are left below the limit."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limits(*, proc: Path = PROC, cgroup: Path = CGROUP) -> tuple[MemoryLimit, ...]:
    """List the memory limits of this process's control groups and those above; empty if there is none.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    folders = group_folders("memory", proc=proc, cgroup=cgroup)
    return tuple(limit for folder in folders if (limit := _read_limit(folder)) is not None)


def free_bytes(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes of memory that are free for this process: of the machine, or of its tightest group if that is less."""
    limits = memory_limits(proc=proc, cgroup=cgroup)
    return min([_machine_free_bytes(proc), *(limit.free_bytes for limit in limits)])


def _read_limit(folder: Path) -> MemoryLimit | None:
    for names in _VERSIONS:
        limit = _read_int(folder / names.limit)
        if limit is not None and limit < _NO_LIMIT_BYTES:
            counts = _read_counts(folder / "memory.stat")
            page_cache = sum(counts.get(name, 0) for name in names.page_cache)
            used = _read_int(folder / names.used) or 0
            return MemoryLimit(limit_bytes=limit, used_bytes=max(0, used - page_cache))
    return None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _read_counts(path: Path) -> Mapping[str, int]:
    """Read lines ``name number``; those that are not so are left out."""
    found = {}
    try:
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            if number.isdecimal():
                found[name] = int(number)
    except OSError:
        pass
    return found


def _machine_free_bytes(proc: Path) -> int:
    """Bytes that the machine has free, page cache that can be dropped included."""
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
