"""Check the machine: system, cores, memory within its control groups, disk, ports, and proxies."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from edge.doctor.check import Check, failed, passed, warned
from edge.machine.hardware import has_cuda_device
from edge.machine.memory_budget import memory_budget
from ringtune.costs.memory.sizes import CONTEXT_BYTES
from ringtune.machine.control_groups import CGROUP, PROC
from ringtune.machine.cores import usable_cores
from ringtune.machine.memory import LIBRARY_BYTES, memory_limits
from ringtune.quantities import format_bytes, format_seconds
from ringtune.rpc.addresses import split_address
from ringtune.rpc.channel_options import PROXY_VARIABLES

_LITTLE_MEMORY_BYTES = 256 << 20
_NO_MEMORY_BYTES = 32 << 20
_LITTLE_DISK_BYTES = 1 << 30
_NO_DISK_BYTES = 100 << 20
_SYNC_BYTES = 1 << 20
_SLOW_SYNC_S = 1.0
_OLDEST_PYTHON = (3, 11)


def check_system(*, pointer_bytes: int | None = None) -> Check:
    """Check for a 64-bit system, and warn if it is not Linux.

    Args:
        pointer_bytes: of this interpreter; found out if not given.
    """
    bits = 8 * (pointer_bytes or struct.calcsize("P"))
    found = f"{platform.system()} {platform.machine()}, {bits} bit"
    if bits < 64:
        return failed("system", found, "install a 64-bit system; there is no torch for 32 bit")
    if sys.platform != "linux":
        return warned("system", found, "only Linux is tested")
    return passed("system", found)


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    """Check that Python is 3.11 or newer."""
    found = ".".join(str(part) for part in version)
    if version[:2] < _OLDEST_PYTHON:
        return failed("python", found, "use Python 3.11 or newer")
    return passed("python", found)


def check_cores() -> Check:
    """Count the cores that this process may use, by affinity and quota."""
    cores, present = usable_cores(), os.cpu_count() or 1
    found = f"{cores} of {present} usable"
    return passed("cores", found)


def check_memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Check:
    """Check the memory that a run may use, below the limits of this process's control groups (version 1 and 2).

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    budget_bytes = memory_budget(proc=proc, cgroup=cgroup)
    limits = memory_limits(proc=proc, cgroup=cgroup)
    version = 2 if (cgroup / "cgroup.controllers").exists() else 1
    found = f"{format_bytes(budget_bytes)} for a run beside {format_bytes(LIBRARY_BYTES)} for the libraries"
    if limits:
        tightest = min(limits, key=lambda limit: limit.free_bytes)
        found += f"; control group v{version} allows {format_bytes(tightest.limit_bytes)}"
    if budget_bytes < _NO_MEMORY_BYTES:
        return failed("memory", found, "end other programs, or raise the container's limit")
    if budget_bytes < _LITTLE_MEMORY_BYTES:
        return warned("memory", found, "a small slice fits; 'ringtune plan' says which")
    return passed("memory", found)


def check_device(*, dev: Path = Path("/dev")) -> Check:
    """Name the accelerator that a node computes on, with its memory; without one it is the processor.

    Torch is loaded only where there is a device of NVIDIA's.

    Args:
        dev: where device files are.
    """
    if not has_cuda_device(dev=dev):
        return passed("device", "cpu, no CUDA device here")
    try:
        import torch
    except ImportError:
        return warned("device", "a CUDA device is here, but no torch", "install the extra node")
    if not torch.cuda.is_available():
        found = f"a CUDA device is here, but torch {torch.__version__} sees none, so that nodes compute on the CPU"
        return warned("device", found, "install the driver, and a torch that was built for CUDA")
    from edge.machine.accelerator import device_memory, numerics_of
    from edge.machine.bfloat16 import multiplies_bfloat16_fast

    memory = device_memory("cuda")
    assert memory is not None  # noqa: S101 - for the type checker
    free = memory.free + CONTEXT_BYTES  # this process has a context too
    bfloat16 = "multiplies bfloat16 fast" if multiplies_bfloat16_fast("cuda") else "bfloat16 is not fast"
    found = f"{numerics_of('cuda')}, {format_bytes(free)} of {format_bytes(memory.total)} free, {bfloat16}"
    if free < CONTEXT_BYTES + _LITTLE_MEMORY_BYTES:
        needs = f"end what uses it (a node takes {format_bytes(CONTEXT_BYTES)} before its slice), or use --device cpu"
        return warned("device", found, needs)
    return passed("device", found)


def check_disk(folder: Path) -> Check:
    """Check the room in a folder, and the seconds until a megabyte is safe on its disk."""
    name = "disk"
    try:
        free_bytes = shutil.disk_usage(folder).free
        sync_s = _sync_s(folder)
    except OSError as error:
        return failed(name, f"can't write to {folder}: {error.strerror}", "choose another folder with --disk")
    found = f"{format_bytes(free_bytes)} free in {folder}, 1 MiB is safe after {format_seconds(sync_s)}"
    if free_bytes < _NO_DISK_BYTES:
        return failed(name, found, "make room")
    if free_bytes < _LITTLE_DISK_BYTES:
        return warned(name, found, "make room for models and checkpoints")
    if sync_s > _SLOW_SYNC_S:
        return warned(name, found, "checkpoints will be slow; use a faster medium")
    return passed(name, found)


def _sync_s(folder: Path) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        start_s = time.perf_counter()
        file.write(bytes(_SYNC_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - start_s


def check_proxies(environment: Mapping[str, str]) -> Check:
    """Name the variables that set a proxy: what is fetched from a hub goes through it, calls between nodes do not.

    Args:
        environment: variables of the process; values, which may have a password, are not shown.
    """
    names = {name for known in PROXY_VARIABLES for name in (known, known.upper()) if environment.get(name)}
    if not names:
        return passed("proxy", "none set")
    return passed(
        "proxy", f"{', '.join(sorted(names))}: for fetching models from a hub only; nodes are called directly"
    )


def check_port(address: str) -> Check:
    """Check that ``host:port`` can be bound; port 0 stands for any."""
    host, port = split_address(address, option="--bind")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            return failed("port", f"{address}: {error.strerror}", "end what listens there, or choose another --bind")
    return passed("port", f"{address} can be bound")
