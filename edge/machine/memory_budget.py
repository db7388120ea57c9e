"""Find how much memory a run may use on this node: below the container's limit, not only the host's.

A process in a container sees the host's memory in ``/proc/meminfo``; the kernel kills it at the limit of
its control group. Every group up to the root counts.

Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from edge.machine.control_groups import CGROUP, PROC, group_folders

# Interpreter, torch, transformers and gRPC, resident before a run has built anything; measured on x86-64.
RUNTIME_BYTES = 448 << 20
# A run needs some room in any case; less than this is reported as this, and the plan says that it does not fit.
_LEAST_BYTES = 16 << 20
# "No limit" is written as a number near 2**63 by cgroup v1.
_NO_LIMIT_BYTES = 1 << 60
# Of both versions: the limit, what is used, and how the page cache is called in memory.stat.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A control group's memory: its limit and what its processes use now, without the page cache, in bytes."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes that are left below the limit."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_budget(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that a run may use here: what is free for this process, less its own runtime.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    own = _own_rss(proc)
    free = _host_available(proc)
    for limit in cgroup_limits(proc=proc, cgroup=cgroup):
        free = min(free, limit.free_bytes)
    return max(_LEAST_BYTES, free + own - max(own, RUNTIME_BYTES))


def cgroup_limits(*, proc: Path = PROC, cgroup: Path = CGROUP) -> tuple[Limit, ...]:
    """List the memory limits of this process's control groups; empty if there is none."""
    folders = group_folders("memory", proc=proc, cgroup=cgroup)
    return tuple(limit for folder in folders if (limit := _read_limit(folder)) is not None)


def _read_limit(folder: Path) -> Limit | None:
    for limit_name, usage_name, cache_key in _FILES:
        limit = _read_int(folder / limit_name)
        if limit is not None and limit < _NO_LIMIT_BYTES:
            used = (_read_int(folder / usage_name) or 0) - _reclaimable(folder / "memory.stat", cache_key)
            return Limit(limit_bytes=limit, used_bytes=max(0, used))
    return None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable(path: Path, key: str) -> int:
    """Bytes of page cache, which the kernel drops before it kills a process."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _host_available(proc: Path) -> int:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    import psutil

    return int(psutil.virtual_memory().available)


def _status_bytes(name: str, proc: Path) -> int | None:
    try:
        for line in (proc / "self" / "status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def _own_rss(proc: Path) -> int:
    return _status_bytes("VmRSS", proc) or 0


def rss_bytes() -> int:
    """Bytes of resident memory of this process now."""
    own = _own_rss(Path("/proc"))
    if own:
        return own
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Bytes of the highest resident memory of this process since its start or the last ``reset_peak``."""
    peak = _status_bytes("VmHWM", Path("/proc"))
    if peak is not None:
        return peak
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def reset_peak() -> None:
    """Reset the peak of resident memory, so that each run reports its own; no effect where the kernel refuses."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def give_memory_back() -> None:
    """Collect garbage and hand freed heap pages back to the system, so that runs do not add up."""
    gc.collect()
    if os.name == "posix" and sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
