"""Tests of ``ringtune.machine.resources``: memory, cores."""

from __future__ import annotations

from pathlib import Path

from ringtune.machine.resources import (
    CpuQuota,
    MemoryLimit,
    allowed_cores,
    busy_text,
    cpu_cores,
    cpu_quota,
    free_bytes,
    machine_load,
    memory_limits,
    usable_cores,
)
from tests.support.cases import cases
from tests.support.fake_system import fake_system

MIB = 1 << 20
HOST = {"proc/meminfo": f"MemTotal: 9000000 kB\nMemFree: 5 kB\nMemAvailable: {8000 * 1024} kB\n"}


def test_free_memory_without_a_group_is_what_the_machine_can_free(tmp_path: Path) -> None:
    """MemAvailable has the page cache in it."""
    proc, cgroup = fake_system(tmp_path, HOST)
    assert memory_limits(proc=proc, cgroup=cgroup) == ()
    assert free_bytes(proc=proc, cgroup=cgroup) == 8000 * MIB


def group_v2(folder: str, *, limit: str, used: int = 0, inactive: int = 0, active: int = 0) -> dict[str, str]:
    """Write the files of a group of version 2; sizes are in MiB."""
    return {
        f"cgroup/{folder}/memory.max": f"{limit}\n",
        f"cgroup/{folder}/memory.current": f"{used * MIB}\n",
        f"cgroup/{folder}/memory.stat": f"anon 1\ninactive_file {inactive * MIB}\nactive_file {active * MIB}\n",
    }


@cases(("outer", "inner", "free"), [(2000, "max", 1300), (2000, 3000, 1300), (9000, 1500, 1200)])
def test_tightest_of_nested_groups_counts(tmp_path: Path, outer: int, inner: int | str, free: int) -> None:
    """The limit may be on the own group or on any above it; each counts with its own use."""
    own = inner if isinstance(inner, str) else str(inner * MIB)
    files = HOST | {"proc/self/cgroup": "0::/outer/inner\n"}
    files |= group_v2("outer/inner", limit=own, used=300)
    files |= group_v2("outer", limit=str(outer * MIB), used=700)
    proc, cgroup = fake_system(tmp_path, files)
    assert free_bytes(proc=proc, cgroup=cgroup) == free * MIB


def test_page_cache_of_a_group_is_free(tmp_path: Path) -> None:
    """The kernel drops it before it ends a process, whether it was used twice (active) or once (inactive)."""
    files = HOST | {"proc/self/cgroup": "0::/box\n"}
    files |= group_v2("box", limit=str(1000 * MIB), used=900, inactive=200, active=400)
    proc, cgroup = fake_system(tmp_path, files)
    assert memory_limits(proc=proc, cgroup=cgroup) == (MemoryLimit(limit_bytes=1000 * MIB, used_bytes=300 * MIB),)
    assert free_bytes(proc=proc, cgroup=cgroup) == 700 * MIB


def test_version_1_has_other_names_and_a_huge_number_for_no_limit(tmp_path: Path) -> None:
    """The group of the controller counts, and what its children use is in its figures."""
    own = "cgroup/memory/box/memory"
    files = HOST | {
        "proc/self/cgroup": "5:cpu:/box\n4:memory:/box\n",
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        f"{own}.limit_in_bytes": f"{1000 * MIB}\n",
        f"{own}.usage_in_bytes": f"{600 * MIB}\n",
        f"{own}.stat": f"cache 5\nactive_file 9\ntotal_inactive_file {100 * MIB}\ntotal_active_file {200 * MIB}\n",
    }
    proc, cgroup = fake_system(tmp_path, files)
    assert memory_limits(proc=proc, cgroup=cgroup) == (MemoryLimit(limit_bytes=1000 * MIB, used_bytes=300 * MIB),)


def test_group_of_a_container_is_the_mount(tmp_path: Path) -> None:
    """In a container /proc/self/cgroup may name the host's path, which is not mounted."""
    files = HOST | {"proc/self/cgroup": "0::/system.slice/docker-123.scope\n"}
    files |= group_v2("", limit=str(512 * MIB), used=100)
    proc, cgroup = fake_system(tmp_path, files)
    assert [limit.free_bytes for limit in memory_limits(proc=proc, cgroup=cgroup)] == [412 * MIB]


def test_group_that_is_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    """A limit that was lowered meanwhile is no negative number."""
    files = HOST | {"proc/self/cgroup": "0::/box\n"} | group_v2("box", limit=str(100 * MIB), used=130)
    proc, cgroup = fake_system(tmp_path, files)
    assert free_bytes(proc=proc, cgroup=cgroup) == 0


@cases(
    ("files", "quota"),
    [
        ({"cgroup/cpu.max": "150000 100000\n"}, CpuQuota(1.5, 0.1)),
        ({"cgroup/cpu.max": "max 100000\n"}, None),
        ({"cgroup/cpu/cpu.cfs_quota_us": "20000\n", "cgroup/cpu/cpu.cfs_period_us": "10000\n"}, CpuQuota(2.0, 0.01)),
        ({"cgroup/cpu/cpu.cfs_quota_us": "-1\n", "cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
        (
            {"proc/self/cgroup": "0::/a/b\n", "cgroup/a/cpu.max": "50000 100000\n", "cgroup/a/b/cpu.max": "max 9\n"},
            CpuQuota(0.5, 0.1),
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/pi\n0::/\n",
                "cgroup/cpu,cpuacct/pi/cpu.cfs_quota_us": "2500\n",
                "cgroup/cpu,cpuacct/pi/cpu.cfs_period_us": "10000\n",
                "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cgroup/cpu,cpuacct/cpu.cfs_period_us": "10000\n",
            },
            CpuQuota(0.25, 0.01),
        ),
    ],
)
def test_cpu_quota_is_the_tightest_of_all_groups(tmp_path: Path, files: dict[str, str], quota: CpuQuota | None) -> None:
    """Threads beyond the quota would only be throttled, and timings have to be longer than its period."""
    proc, cgroup = fake_system(tmp_path, files)
    assert cpu_quota(proc=proc, cgroup=cgroup) == quota


def test_usable_cores_are_those_of_the_quota_rounded_up(tmp_path: Path) -> None:
    """A quota of half a core on any number of cores is one thread, and half a processor second a second."""
    half, none = {"cgroup/cpu.max": "50000 100000\n"}, {"cgroup/cpu.max": "max 100000\n"}
    proc, cgroup = fake_system(tmp_path / "half", half)
    assert (usable_cores(proc=proc, cgroup=cgroup), cpu_cores(proc=proc, cgroup=cgroup)) == (1, 0.5)
    proc, cgroup = fake_system(tmp_path / "none", none)
    assert usable_cores(proc=proc, cgroup=cgroup) == allowed_cores()


def test_busy_text_names_machines_with_more_to_do_than_the_run_itself() -> None:
    """Half more than its cores is busy; what the run's own nodes may take of it is not."""
    loads = {"b": 5.9, "a": 1.51, "c": 1.5, "d": 0.0}
    assert busy_text(loads, "when measured").startswith("busy when measured: a, b (5.9 threads for each core);")
    assert busy_text(loads, "at the end", own=2.0).startswith("busy at the end: b (")
    assert busy_text(loads, "at the end", own=4.0) == "" == busy_text({}, "when measured")
    assert machine_load() >= 0
