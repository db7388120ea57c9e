"""Processes below this one, as the kernel lists them: cheap enough to ask before and after each test."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import psutil

KEPT: Final[set[int]] = set()
"""Process ids that outlive tests on purpose; whoever adds one ends it and takes it out."""

_MAX_LISTINGS: Final = 20
_LISTS = (
    Path(f"/proc/{os.getpid()}/task").is_dir() and Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
)


def processes_below() -> set[int]:
    """Children of this process, theirs and so on; those that are kept do not count, but their children do."""
    found: set[int] = set()
    ahead = [os.getpid()]
    while ahead:
        fresh = [pid for pid in _children(ahead.pop()) if pid not in found]
        found.update(fresh)
        ahead += fresh
    return found - KEPT


def _children(pid: int) -> list[int]:
    """Each thread has a list of those that it has started.

    The kernel leaves one out if another one is reaped while it lists them; two listings that agree have them all.
    """
    if not _LISTS:
        return [child.pid for child in psutil.Process(pid).children()]
    before: list[int] | None = None
    for _ in range(_MAX_LISTINGS):
        try:
            tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - before and after each test, a file for every thread
        except OSError:  # it has just ended
            return []
        with contextlib.suppress(OSError):  # a thread has just ended: its children are now on another one's list
            listed = [child for task in tasks for child in _children_of_thread(f"/proc/{pid}/task/{task}/children")]
            if listed == before:
                break
            before = listed
    return before or []


def _children_of_thread(path: str) -> list[int]:
    with open(path, "rb", buffering=0) as listing:  # noqa: PTH123
        return [int(word) for word in listing.read().split()]


def still_running(pids: set[int], grace_s: float) -> list[psutil.Process]:
    """Those of these processes that do not end within ``grace_s`` seconds."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return list(psutil.wait_procs(processes, timeout=grace_s)[1]) if processes else []


def kill(process: psutil.Process) -> str:
    """Kill a process and return how it was called; one that ends just then has no words."""
    words: list[str] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()[:6]
        process.kill()
    return " ".join(words)
