"""Describe the processor of this device, and the part of it that this process may use.

A quota of a control group lets a process compute for a part of every period, and stops it for the rest. Every group
up to the root counts: a quota may be set on any of them.

Source: Linux, Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

from edge.machine.control_groups import CGROUP, PROC, group_folders

_MODEL_KEYS = ("model name", "Model", "Hardware", "cpu model", "CPU part")


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


def cpu_model(*, proc: Path = PROC) -> str:
    """Name of the processor as the kernel has it; its architecture where the kernel has none."""
    try:
        lines = (proc / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return next((found[key] for key in _MODEL_KEYS if found.get(key)), platform.machine() or "unknown processor")


def describe_hardware(*, threads: int, accelerator: str = "", proc: Path = PROC, cgroup: Path = CGROUP) -> str:
    """Describe processor, cores, quota and threads on one line; nodes with equal lines have comparable timings.

    Args:
        threads: that compute.
        accelerator: name of the device that computes; empty = the processor itself.
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    quota = cpu_quota(proc=proc, cgroup=cgroup)
    parts = [
        *([accelerator] if accelerator else []),
        cpu_model(proc=proc),
        f"{usable_cores()} of {os.cpu_count() or 1} cores",
        f"quota {quota.cores:g} cores per {quota.period_s * 1000:g} ms" if quota else "no quota",
        f"{threads} thread{'' if threads == 1 else 's'}",
    ]
    return ", ".join(parts)


def cpu_cores() -> float:
    """Processor seconds that this process may use each second: its cores, or its quota if that is less."""
    quota = cpu_quota()
    return min(float(usable_cores()), quota.cores) if quota else float(usable_cores())


def usable_cores() -> int:
    """Number of cores that this process may run on, whatever its quota."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
