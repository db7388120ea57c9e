"""Count the processor cores that this process may use: by its affinity, and by the quotas of its control groups.

A quota of a control group lets a process compute for a part of every period, and stops it for the rest. Every group
up to the root counts: a quota may be set on any of them.

Source: Linux, Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ringtune.machine.control_groups import CGROUP, PROC, group_folders

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
        when: they were looked at, e.g. ``when it was measured``.
        own: at most so much of it for each core is the run's own.

    Example: ``busy when measured: node-0, node-1 (5.9 threads for each core); times are longer than they need be``.
    """
    busy = {node: load for node, load in sorted(loads.items()) if load > BUSY * max(1.0, own)}
    if not busy:
        return ""
    named = ", ".join([*busy][:5]) + (f" and {len(busy) - 5} more" if len(busy) > 5 else "")
    many = f"{max(busy.values()):.1f} threads for each core"
    return f"busy {when}: {named} ({many}); their times, and predictions from them, are not those of an idle machine"
