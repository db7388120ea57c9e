"""The memory budget reads the container's limit, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.machine.memory_budget import RUNTIME_BYTES, cgroup_limits, memory_budget

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    """Write a file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a host with 8000 MiB free and a process that holds 100 MiB."""
    folder = tmp_path / "proc"
    write(folder / "meminfo", f"MemTotal: 9000000 kB\nMemAvailable: {8000 * 1024} kB\n")
    write(folder / "self" / "status", f"Name: x\nVmRSS: {100 * 1024} kB\n")
    return folder


def test_budget_without_a_group_is_what_the_host_has(proc: Path, tmp_path: Path) -> None:
    """What is free, with what this process already has, less its runtime."""
    assert memory_budget(proc=proc, cgroup=tmp_path / "none") == 8000 * MIB + 100 * MIB - RUNTIME_BYTES


def test_budget_v2_takes_the_tightest_group_on_the_way_up(proc: Path, tmp_path: Path) -> None:
    """The inner group has no limit, the outer one has: page cache that can be dropped counts as free."""
    write(proc / "self" / "cgroup", "0::/outer/inner\n")
    cgroup = tmp_path / "cgroup"
    write(cgroup / "outer" / "inner" / "memory.max", "max\n")
    write(cgroup / "outer" / "memory.max", f"{2000 * MIB}\n")
    write(cgroup / "outer" / "memory.current", f"{700 * MIB}\n")
    write(cgroup / "outer" / "memory.stat", f"anon 1\ninactive_file {200 * MIB}\n")
    limits = cgroup_limits(proc=proc, cgroup=cgroup)
    assert [(limit.limit_bytes, limit.used_bytes) for limit in limits] == [(2000 * MIB, 500 * MIB)]
    assert memory_budget(proc=proc, cgroup=cgroup) == 1500 * MIB + 100 * MIB - RUNTIME_BYTES


def test_budget_v1_reads_the_memory_controller(proc: Path, tmp_path: Path) -> None:
    """Version 1 names differ, and its "no limit" is a huge number."""
    write(proc / "self" / "cgroup", "5:cpu:/box\n4:memory:/box\n")
    cgroup = tmp_path / "cgroup"
    write(cgroup / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroup / "memory" / "box" / "memory.limit_in_bytes", f"{1000 * MIB}\n")
    write(cgroup / "memory" / "box" / "memory.usage_in_bytes", f"{300 * MIB}\n")
    write(cgroup / "memory" / "box" / "memory.stat", f"cache 5\ntotal_inactive_file {100 * MIB}\n")
    assert memory_budget(proc=proc, cgroup=cgroup) == 800 * MIB + 100 * MIB - RUNTIME_BYTES


def test_budget_in_a_container_whose_path_is_the_hosts(proc: Path, tmp_path: Path) -> None:
    """In a container /proc/self/cgroup may name the host's path, which is not mounted: the mount is the group."""
    write(proc / "self" / "cgroup", "0::/system.slice/docker-123.scope\n")
    cgroup = tmp_path / "cgroup"
    write(cgroup / "memory.max", f"{512 * MIB}\n")
    write(cgroup / "memory.current", f"{100 * MIB}\n")
    assert [limit.free_bytes for limit in cgroup_limits(proc=proc, cgroup=cgroup)] == [412 * MIB]


def test_budget_is_never_zero(proc: Path, tmp_path: Path) -> None:
    """A full group gives a small number, so that the planner can say what does not fit."""
    write(proc / "self" / "cgroup", "0::/\n")
    write(tmp_path / "cgroup" / "memory.max", f"{100 * MIB}\n")
    write(tmp_path / "cgroup" / "memory.current", f"{100 * MIB}\n")
    assert memory_budget(proc=proc, cgroup=tmp_path / "cgroup") == 16 * MIB
