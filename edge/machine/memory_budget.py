"""Find how much memory a run may use on this node, and how much this process has resident."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from typing import Any

from ringtune.machine.control_groups import CGROUP, PROC
from ringtune.machine.heap import trim_heap
from ringtune.machine.memory import LIBRARY_BYTES, free_bytes

# Nothing fits into so little: a board that has less than its libraries take is refused, with both numbers.
_LEAST_BYTES = 1 << 20


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
    return max(_LEAST_BYTES, free_bytes(proc=proc, cgroup=cgroup) + own - max(resident, LIBRARY_BYTES))


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


def give_memory_back() -> None:
    """Collect garbage and hand freed memory back to system and accelerator, so that runs do not add up."""
    gc.collect()
    trim_heap()
    if (cuda := _used_cuda()) is not None:
        cuda.empty_cache()


def _used_cuda() -> Any:
    """Return ``torch.cuda`` if this process has used it; torch is not loaded for the question."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
