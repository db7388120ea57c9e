"""The processor and the memory of this device: budget, use, and the settings of glibc's heap.

glibc takes blocks of some MiB fresh from the kernel and returns them when they are freed, so that each tensor that
arrives costs a thousand page faults: a third of the receiver's CPU time for 4 MiB tensors (measured: 1.7 ms instead of
2.9 ms each). So an agent keeps freed memory, which costs at most ``KEPT_BYTES`` of resident memory.

By default glibc gives each thread a heap of its own (an arena): what one thread frees there no other one can use, and
an agent has a dozen. With one arena for all of them the demo's nodes peak 4 to 18 MiB lower, and the channel is no
slower (``python -m tests.bench.channel``).

Kept memory is fragmented. A tensor's memory is aligned, so a freed one of the same size fits only with the slivers
beside it, and small objects have often taken these. A LoRA step of six blocks of MiniLM's shape needs 330 MiB and made
a heap of 800 MiB. A node without room for that (``ringtune.costs.memory_terms``) takes tensors fresh from the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.memory_terms import has_room_for_heap
from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.costs.profile import ModelFacts
from ringtune.errors import ModelError
from ringtune.job.job import Job
from ringtune.machine.resources import CGROUP, LIBRARY_BYTES, PROC, allowed_cores, cpu_quota, free_bytes, trim_heap
from ringtune.schedule.plan import Plan

# Nothing fits into so little: a board that has less than its libraries take is refused, with both numbers.
_MIN_BYTES = 1 << 20


def memory_budget(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that a run may use here: what is free for this process, less what its libraries take.

    What the process has of its own is given back before its whole need is taken off. Its files' pages are page
    cache, which counts as free, and yet it needs them.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    resident = _status_bytes("VmRSS", proc) or 0
    own = resident - (_status_bytes("RssFile", proc) or 0)
    return max(_MIN_BYTES, free_bytes(proc=proc, cgroup=cgroup) + own - max(resident, LIBRARY_BYTES))


def _status_bytes(name: str, proc: Path) -> int | None:
    try:
        for line in (proc / "self" / "status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def rss_bytes() -> int:
    """Bytes of resident memory of this process now."""
    own = _status_bytes("VmRSS", PROC)
    if own:
        return own
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Bytes of the highest resident memory of this process since its start or the last ``reset_peak``."""
    peak = _status_bytes("VmHWM", PROC)
    if peak is not None:
        return peak
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def reset_peak() -> None:
    """Reset the peaks of resident and accelerator memory, so that each run reports its own.

    That of resident memory stays where the kernel refuses.
    """
    if (cuda := _used_cuda()) is not None:
        cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release_memory() -> None:
    """Collect garbage and hand freed memory back to system and accelerator, so that runs do not add up."""
    gc.collect()
    trim_heap()
    if (cuda := _used_cuda()) is not None:
        cuda.empty_cache()


def _used_cuda() -> Any:
    """Return ``torch.cuda`` if this process has used it; torch is not loaded for the question."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


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


KEPT_BYTES: Final = 32 * 1024 * 1024
"""Bytes of free memory at the end of the heap that stay; larger single blocks still come from the kernel."""

RETURNED_BYTES: Final = 128 * 1024
"""From how many bytes on a block is the kernel's again as soon as it is freed, where memory is short."""

_M_TRIM_THRESHOLD: Final = -1  # of glibc's malloc.h
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_freed_memory() -> bool:
    """Tell glibc to keep up to ``KEPT_BYTES`` of freed memory, in one heap for all threads.

    Returns:
        Whether it took effect; with another C library nothing changes.
    """
    return _set({_M_MMAP_THRESHOLD: KEPT_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES, _M_ARENA_MAX: 1})


def return_freed_memory() -> bool:
    """Tell glibc to give every freed block of ``RETURNED_BYTES`` or more back to the kernel at once.

    A step then takes 9 to 25 % more processor time, for page faults. ``keep_freed_memory`` undoes it.

    Returns:
        Whether it took effect; with another C library nothing changes.
    """
    return _set({_M_MMAP_THRESHOLD: RETURNED_BYTES})


def _set(settings: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    took = [mallopt(name, value) for name, value in settings.items()]
    return all(took)


_WIDENED: Final = 2
"""A 16-bit file in memory as float32, over its bytes."""


def facts_here(folder: Path, job: Job) -> tuple[ModelFacts, int]:
    """Return sizes of the model, and bytes of weights that they leave out: all, where only a part of them is here.

    Args:
        folder: of the model on this machine.
        job: of the run.

    Raises:
        ModelError: the folder can't be used.
    """
    try:
        return model_facts(folder, job), 0
    except ModelError:  # the weights of other nodes' blocks are not here
        pass
    files = (path.stat().st_size for path in folder.glob("*.safetensors"))
    return model_facts(folder, job, in_part=True), _WIDENED * sum(files)


def set_up_heap(
    plan: Plan, node: str, job: Job, model: ModelFacts, *, memory_bytes: int, data_bytes: int, besides_bytes: int = 0
) -> None:
    """Let the heap keep freed memory where the node has room for that; otherwise give it back at once.

    Args:
        plan: of the run.
        node: this one.
        job: of the run.
        model: sizes of the model.
        memory_bytes: the node's budget.
        data_bytes: of its rows and tokenizer.
        besides_bytes: of weights that ``model`` leaves out. Where these train, nothing is known of what they need, and
            the heap keeps freed memory.
    """
    if besides_bytes and job.method.full_parameters:
        keep_freed_memory()
        return
    needs = node_memory(
        plan,
        node,
        model,
        optimizer=job.train.optimizer,
        activation_token_bytes=computed_token_bytes(model, job),
        dtype=job.model.dtype,
        data_bytes=data_bytes,
    )
    if has_room_for_heap(needs, memory_bytes - besides_bytes):
        keep_freed_memory()
    else:
        return_freed_memory()
