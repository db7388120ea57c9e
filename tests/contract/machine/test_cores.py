"""What a process may use of its processor, whichever version of control groups says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.machine.cores import CpuQuota, allowed_cores, busy_text, cpu_cores, cpu_quota, machine_load, usable_cores
from tests.support.fake_system import fake_system


@pytest.mark.parametrize(
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
    ids=["v2", "v2 without limit", "v1", "v1 without limit", "none", "v2 of a group above", "v1 of the own group"],
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
