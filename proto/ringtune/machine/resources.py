"""Cores and memory that this process may use, within the limits of its control groups (versions 1 and 2), and its heap.

A quota of a control group lets a process compute for a part of every period, and stops it for the rest. In a container
``/proc/meminfo`` has the host's memory; the kernel kills a process at the limit of its control group. Every group up to
the root counts, for quotas and for memory. Page cache counts as free: the kernel drops it first.

Freed heap memory stays with the process until ``trim_heap``.

Source: Linux, Documentation/admin-guide/cgroup-v1/cgroups.rst, cgroup-v1/memory.rst and cgroup-v2.rst,
Documentation/scheduler/sched-bwc.rst; ``proc_meminfo(5)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ringtune.texts import listed

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")


def group_folders(controller: str, *, proc: Path, cgroup: Path) -> list[Path]:
    """List the folders of this process's control groups for ``cpu`` or ``memory``, innermost first, with their parents.

    In a container the mount point is the group.
    """
    groups = {cgroup: "", cgroup / controller: ""}
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            groups |= {cgroup: path, cgroup / "unified": path}
        elif controller in controllers.split(","):
            groups |= {cgroup / controller: path, cgroup / controllers: path}
    folders = []
    for mount, path in groups.items():
        group = mount / path.strip("/")
        folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return folders


BUSY: Final = 1.5
"""Runnable threads per core from which on a machine counts as busy."""


class CpuQuota(NamedTuple):
    """A limit of ``cores`` on average in each period: 0.25 cores per 10 ms are 2.5 ms of each 10."""

    cores: float
    period_s: float


def cpu_quota(*, proc: Path = PROC, cgroup: Path = CGROUP) -> CpuQuota | None:
    """Return the tightest quota on this process; None if there is none."""
    quotas = [
        quota for folder in group_folders("cpu", proc=proc, cgroup=cgroup) if (quota := _read_quota(folder)) is not None
    ]
    return min(quotas, default=None)


def _read_quota(folder: Path) -> CpuQuota | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else CpuQuota(int(limit) / int(period), int(period) / 1e6)
    except (OSError, ValueError):
        pass
    limit_us, period_us = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return CpuQuota(limit_us / period_us, period_us / 1e6) if period_us and limit_us and limit_us > 0 else None


def allowed_cores() -> int:
    """Number of cores that this process may run on, whatever its quota."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def cpu_cores(*, proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Processor seconds per second that this process may use: its cores, or its quota if that is less."""
    quota = cpu_quota(proc=proc, cgroup=cgroup)
    return min(float(allowed_cores()), quota.cores) if quota else float(allowed_cores())


def usable_cores(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Number of threads that have a core: cores, or the quota rounded up if that is less; at least 1.

    Example: 4 cores with a quota of 1.5 are 2.
    """
    return max(1, math.ceil(cpu_cores(proc=proc, cgroup=cgroup)))


def machine_load() -> float:
    """Running and runnable threads per core of the whole machine, mean of a minute; 0 = unknown.

    Example: 11.8 threads on 2 cores are 5.9.
    """
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def busy_text(loads: Mapping[str, float], when: str, *, own: float = 0.0) -> str:
    """Write which machines were busy with other work, and the consequence; empty if none was.

    Args:
        loads: node -> ``machine_load`` of its machine.
        when: time of the reading, such as ``when it was measured``.
        own: load per core of the run itself, at most.

    Example: ``busy when measured: node-0, node-1 (5.9 threads for each core); their times, and predictions ...``.
    """
    busy = {node: load for node, load in sorted(loads.items()) if load > BUSY * max(1.0, own)}
    if not busy:
        return ""
    many = f"{max(busy.values()):.1f} threads for each core"
    named = f"{listed([*busy], 5)} ({many})"
    return f"busy {when}: {named}; their times, and predictions from them, are not those of an idle machine"


OWN_LIBRARY_BYTES: Final = 192 << 20
"""Resident bytes of an idle agent, without pages of files, which can be read again; see ``LIBRARY_BYTES``."""

LIBRARY_BYTES: Final = 316 << 20
"""Resident bytes of an idle agent that has loaded its libraries, before it hosts anything.

Interpreter, torch, transformers, adapters and gRPC: 192 MiB private and 114 MiB of the libraries' files on x86-64
(``python -m tests.bench.memory``). Agents forked from one template share most of the former.
"""

# Version 1 writes "no limit" as a number near 2**63.
_NO_LIMIT_BYTES: Final = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """File names of a version of control groups, and its names of the page cache in ``memory.stat``."""

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
    """Memory limit of a control group, and its current use without the page cache, in bytes."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes left below the limit."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limits(*, proc: Path = PROC, cgroup: Path = CGROUP) -> tuple[MemoryLimit, ...]:
    """List the memory limits of this process's control groups and their parents."""
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
    """Parse lines ``name number``; others are left out."""
    counts = {}
    try:
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            if number.isdecimal():
                counts[name] = int(number)
    except OSError:
        pass
    return counts


def _machine_free_bytes(proc: Path) -> int:
    free = proc_bytes(proc / "meminfo", "MemAvailable")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if free is None else free


def proc_bytes(path: Path, name: str) -> int | None:
    """Return the bytes in a line ``NAME: 123 kB`` of a file of procfs; None if it can't be read."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def trim_heap() -> None:
    """Return freed heap pages to the system; no effect with another C library than glibc."""
    if os.name == "posix" and sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
