"""Cores and memory that this process may use, below the limits of its control groups (both versions), and its heap.

A quota of a control group lets a process compute for a part of every period, and stops it for the rest. In a container
``/proc/meminfo`` has the host's memory; the kernel ends a process at the limit of its control group. Every group up to
the root counts, for quotas and for memory. Page cache counts as free: the kernel drops it before it ends a process.

Memory that is freed in the heap stays with the process until ``trim_heap``.

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
    """List the folders of this process's groups and those above, innermost first.

    In a container the mount is the group.

    Args:
        controller: ``cpu`` or ``memory``.
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
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
"""A machine is busy if so many threads want to compute for each of its cores."""


class CpuQuota(NamedTuple):
    """A limit of ``cores`` on average, counted anew every period: 0.25 cores per 10 ms are 2.5 ms of each 10."""

    cores: float
    period_s: float


def cpu_quota(*, proc: Path = PROC, cgroup: Path = CGROUP) -> CpuQuota | None:
    """Find the tightest quota on this process; None if there is none.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    found = [
        quota for folder in group_folders("cpu", proc=proc, cgroup=cgroup) if (quota := _read_quota(folder)) is not None
    ]
    return min(found, default=None)


def _read_quota(folder: Path) -> CpuQuota | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else CpuQuota(int(limit) / int(period), int(period) / 1e6)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return CpuQuota(limit_us / period_us, period_us / 1e6) if limit_us > 0 else None


def allowed_cores() -> int:
    """Count the cores that this process may run on, whatever its quota."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def cpu_cores(*, proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Processor seconds that this process may use each second: its cores, or its quota if that is less."""
    quota = cpu_quota(proc=proc, cgroup=cgroup)
    return min(float(allowed_cores()), quota.cores) if quota else float(allowed_cores())


def usable_cores(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Number of threads that have a core here: the affinity, capped by the quota, rounded up; at least 1.

    Example: 4 cores with a quota of 1.5 are 2.
    """
    return max(1, math.ceil(cpu_cores(proc=proc, cgroup=cgroup)))


def machine_load() -> float:
    """Threads for each core of the whole machine that computed or wanted to, the mean of a minute; 0 = not known.

    Example: 11.8 threads on 2 cores are 5.9.
    """
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def busy_text(loads: Mapping[str, float], when: str, *, own: float = 0.0) -> str:
    """Say which machines were busy with something else, and what follows; empty where none was.

    Args:
        loads: of the machine of each node, as ``machine_load`` counts.
        when: they were read, e.g. ``when it was measured``.
        own: at most so much of it for each core is the run's own.

    Example: ``busy when measured: node-0, node-1 (5.9 threads for each core); times are longer than they need be``.
    """
    busy = {node: load for node, load in sorted(loads.items()) if load > BUSY * max(1.0, own)}
    if not busy:
        return ""
    many = f"{max(busy.values()):.1f} threads for each core"
    named = f"{listed([*busy], 5)} ({many})"
    return f"busy {when}: {named}; their times, and predictions from them, are not those of an idle machine"


OWN_LIBRARY_BYTES: Final = 192 << 20
"""The bytes of an idle agent, without pages of files, which can be read again; see ``LIBRARY_BYTES``."""

LIBRARY_BYTES: Final = 316 << 20
"""Resident bytes of an idle agent that has loaded its libraries, before it hosts anything.

Interpreter, torch, transformers, adapters and gRPC: 192 MiB of its own and 114 MiB of the libraries' files on x86-64,
where every file is read (``python -m tests.bench.memory``). Agents forked from one template share most of the former.
"""

# "No limit" is written as a number near 2**63 by version 1.
_NO_LIMIT_BYTES: Final = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """The file names of a version of control groups, and its name of the page cache in ``memory.stat``."""

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


def trim_heap() -> None:
    """Hand freed heap pages back to the system; no effect with another C library than glibc."""
    if os.name == "posix" and sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
