"""The budget of a run is what is free for the agent, less what its libraries take."""

from __future__ import annotations

from pathlib import Path

from edge.machine.memory_budget import memory_budget
from ringtune.machine.memory import LIBRARY_BYTES
from tests.support.fake_system import FakeSystem, fake_system

MIB = 1 << 20
KIB_OF_MIB = 1024


def board(root: Path, *, resident: int, of_files: int, limit: int, used: int, page_cache: int = 0) -> FakeSystem:
    """Fake a board with a memory limit, and an agent on it that has so much resident; sizes are in MiB."""
    status = f"VmRSS: {resident * KIB_OF_MIB} kB\nRssFile: {of_files * KIB_OF_MIB} kB\n"
    return fake_system(
        root,
        {
            "proc/meminfo": f"MemAvailable: {8000 * KIB_OF_MIB} kB\n",
            "proc/self/status": status,
            "proc/self/cgroup": "0::/\n",
            "cgroup/memory.max": f"{limit * MIB}\n",
            "cgroup/memory.current": f"{used * MIB}\n",
            "cgroup/memory.stat": f"active_file {page_cache * MIB}\n",
        },
    )


def budget(system: FakeSystem) -> int:
    """Ask for the budget there."""
    return memory_budget(proc=system.proc, cgroup=system.cgroup)


def test_budget_is_the_limit_less_the_libraries_whether_they_are_loaded_or_not(tmp_path: Path) -> None:
    """An agent that joins has 60 MiB, one that has loaded its libraries has all of it, files' pages included."""
    libraries = LIBRARY_BYTES // MIB
    joins = board(tmp_path / "joins", resident=60, of_files=20, limit=1000, used=60, page_cache=20)
    loaded = board(
        tmp_path / "loaded", resident=libraries, of_files=114, limit=1000, used=libraries + 300, page_cache=414
    )
    assert budget(joins) == budget(loaded) == 1000 * MIB - LIBRARY_BYTES


def test_budget_has_no_room_that_is_used_already(tmp_path: Path) -> None:
    """What other processes hold of the group is gone, and what this one holds above its libraries too."""
    system = board(tmp_path, resident=500, of_files=100, limit=1000, used=600, page_cache=100)
    assert budget(system) == (1000 - 100 - 500) * MIB


def test_budget_is_never_zero(tmp_path: Path) -> None:
    """A full group gives a small number, so that the planner can say what does not fit."""
    assert budget(board(tmp_path, resident=100, of_files=0, limit=100, used=100)) == MIB
