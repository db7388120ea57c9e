"""Describe the processor of this device, and the part of it that this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ringtune.machine.control_groups import CGROUP, PROC
from ringtune.machine.cores import allowed_cores, cpu_quota

_MODEL_KEYS = ("model name", "Model", "Hardware", "cpu model", "CPU part")


def cpu_model(*, proc: Path = PROC) -> str:
    """Name of the processor as the kernel has it; its architecture where the kernel has none."""
    try:
        lines = (proc / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return next((found[key] for key in _MODEL_KEYS if found.get(key)), platform.machine() or "unknown processor")


def has_cuda_device(*, dev: Path = Path("/dev")) -> bool:
    """Whether there is a device file of NVIDIA's, of a card or of a Jetson; torch is not asked, which takes seconds.

    Args:
        dev: where device files are.
    """
    return any((dev / name).exists() for name in ("nvidia0", "nvhost-gpu"))


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
        f"{allowed_cores()} of {os.cpu_count() or 1} cores",
        f"quota {quota.cores:g} cores per {quota.period_s * 1000:g} ms" if quota else "no quota",
        f"{threads} thread{'' if threads == 1 else 's'}",
    ]
    return ", ".join(parts)
