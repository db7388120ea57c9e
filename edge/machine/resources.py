"""The processor and the memory of this device: budget, use, and the settings of glibc's heap.

glibc allocates blocks of some MiB from the kernel and returns them when freed, so that each received tensor costs a
thousand page faults: a third of the receiver's CPU time for 4 MiB tensors (measured: 1.7 ms instead of 2.9 ms each). So
an agent keeps freed memory, up to ``KEPT_BYTES`` of resident memory.

By default glibc gives each thread a heap (an arena), with free memory that other threads can't use; an agent has
a dozen threads. With one arena for all the demo's nodes peak 4 to 18 MiB lower, at the same speed of the channel.

Kept memory is fragmented. A tensor's memory is aligned, so a freed block of the same size fits only with the gaps
beside it, which small objects have often taken. A LoRA step of six blocks of MiniLM's shape needs 330 MiB and made a
heap of 800 MiB. A node without room for that (``ringtune.costs.memory_terms``) allocates tensors from the kernel.
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
from ringtune.costs.memory_terms import MemoryEstimate, has_room_for_heap
from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.costs.profile import ModelFacts
from ringtune.errors import ModelError
from ringtune.job.job import Job
from ringtune.machine.resources import (
    CGROUP,
    LIBRARY_BYTES,
    PROC,
    allowed_cores,
    cpu_quota,
    free_bytes,
    proc_bytes,
    trim_heap,
)
from ringtune.schedule.plan import Plan

# No slice fits into this: a board with less memory than its libraries take is refused, with both numbers.
_MIN_BYTES = 1 << 20


def memory_budget(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the bytes that a run may use: the free memory for this process, less what its libraries take.

    The process's own memory is added before its whole need is subtracted. Pages of its files are page cache, which
    counts as free although the process needs it.

    ``proc`` and ``cgroup`` are the mount points of procfs and control groups.
    """
    resident = proc_bytes(proc / "self" / "status", "VmRSS") or 0
    private = resident - (proc_bytes(proc / "self" / "status", "RssFile") or 0)
    return max(_MIN_BYTES, free_bytes(proc=proc, cgroup=cgroup) + private - max(resident, LIBRARY_BYTES))


def rss_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    resident = proc_bytes(PROC / "self" / "status", "VmRSS")
    if resident:
        return resident
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Highest resident memory of this process since its start or the last ``reset_peak``, in bytes."""
    peak = proc_bytes(PROC / "self" / "status", "VmHWM")
    if peak is not None:
        return peak
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def reset_peak() -> None:
    """Reset the peaks of resident and accelerator memory, so that each run reports its own.

    If the kernel refuses, that of resident memory stays.
    """
    if (cuda := _used_cuda()) is not None:
        cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release_memory() -> None:
    """Collect garbage and return freed memory to system and accelerator, so that runs do not add up."""
    gc.collect()
    trim_heap()
    if (cuda := _used_cuda()) is not None:
        cuda.empty_cache()


def _used_cuda() -> Any:
    """Return ``torch.cuda`` if this process has used it; never loads torch."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


_MODEL_KEYS = ("model name", "Model", "Hardware", "cpu model", "CPU part")


def cpu_model(*, proc: Path = PROC) -> str:
    """Name of the processor from the kernel; its architecture if there is none."""
    try:
        lines = (proc / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return next((values[key] for key in _MODEL_KEYS if values.get(key)), platform.machine() or "unknown processor")


def has_cuda_device(*, dev: Path = Path("/dev")) -> bool:
    """Whether ``dev`` has a device file of an NVIDIA card or a Jetson; never loads torch, which takes seconds."""
    return any((dev / name).exists() for name in ("nvidia0", "nvhost-gpu"))


def describe_hardware(*, threads: int, accelerator: str = "", proc: Path = PROC, cgroup: Path = CGROUP) -> str:
    """Describe processor, cores, quota and threads on one line; nodes with equal lines have comparable timings.

    ``accelerator`` is the name of the device that computes; empty = the processor.
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
"""Bytes of free memory kept at the end of the heap; larger single blocks are allocated from the kernel."""

RETURNED_BYTES: Final = 128 * 1024
"""Least size of a block that is returned to the kernel when freed, if memory is short."""

_M_TRIM_THRESHOLD: Final = -1  # of glibc's malloc.h
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGEST_HOLE: Final = 1 << 30
_GLIBC: Final = "libc.so.6"  # its own functions: blocks of a preloaded allocator begin otherwise
_WORD, _IS_MAPPED = ctypes.sizeof(ctypes.c_size_t), 2  # the word before a block has its size, and this bit


_holes: list[int] = []
"""Blocks that occupy the heap's free parts, untouched."""


def keep_freed_memory() -> bool:
    """Set glibc to keep up to ``KEPT_BYTES`` of freed memory, in one heap; False with another C library."""
    took = _set({_M_MMAP_THRESHOLD: KEPT_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES, _M_ARENA_MAX: 1})
    while _holes:
        ctypes.CDLL(_GLIBC).free(ctypes.c_void_p(_holes.pop()))
    return took


def return_freed_memory() -> bool:
    """Set glibc to return freed blocks of ``RETURNED_BYTES`` or more to the kernel; False with another C library.

    Free parts of the heap, which it would use first and keep, are returned and then occupied: measuring a block of a
    Llama of 1.1 billion parameters leaves 700 MiB of addresses. A step then takes 9 to 25 % more CPU time, for page
    faults. ``keep_freed_memory`` undoes it.
    """
    trim_heap()
    if not _set({_M_MMAP_THRESHOLD: RETURNED_BYTES}):
        return False
    library, size = ctypes.CDLL(_GLIBC), _LARGEST_HOLE
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    while size >= RETURNED_BYTES:
        address = library.malloc(size)
        if address and not ctypes.c_size_t.from_address(address - _WORD).value & _IS_MAPPED:
            _holes.append(address)
            continue
        library.free(ctypes.c_void_p(address))
        size //= 2
    return True


def _set(settings: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    took = [mallopt(name, value) for name, value in settings.items()]
    return all(took)


_WIDENED: Final = 2
"""Bytes in float32 over bytes of a 16-bit file."""


def facts_here(folder: Path, job: Job) -> tuple[ModelFacts, int]:
    """Return sizes of the model in ``folder``, and bytes of weights that they leave out: all if only a part is here.

    Raises ``ModelError``: the folder can't be used.
    """
    try:
        return model_facts(folder, job), 0
    except ModelError:  # only the weights of this node's slice are here
        pass
    files = (path.stat().st_size for path in folder.glob("*.safetensors"))
    return model_facts(folder, job, in_part=True), _WIDENED * sum(files)


def set_up_heap(
    plan: Plan, node: str, job: Job, model: ModelFacts, *, memory_bytes: int, data_bytes: int, besides_bytes: int = 0
) -> None:
    """Let the heap keep freed memory if the node has room for that; otherwise return it at once.

    ``besides_bytes`` are weights that ``model`` leaves out. If these train, their needs are unknown, and the heap keeps
    freed memory. ``data_bytes`` are rows and tokenizer.
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
    fit_heap(needs, memory_bytes - besides_bytes)


def fit_heap(needs: MemoryEstimate, memory_bytes: int) -> None:
    """Let the heap keep freed memory if that fits ``memory_bytes`` beside what is needed; else return it at once."""
    if has_room_for_heap(needs, memory_bytes):
        keep_freed_memory()
    else:
        return_freed_memory()
