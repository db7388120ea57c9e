"""What a process may use of its processor, whichever version of control groups says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.machine.hardware import CpuQuota, cpu_model, cpu_quota, describe_hardware


def write(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Make files below a root; gives its proc and cgroup."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


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
    proc, cgroup = write(tmp_path, files)
    assert cpu_quota(proc=proc, cgroup=cgroup) == quota


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor\t: 0\nmodel name\t: Made-up 3000\n", "Made-up 3000"),
        ("processor\t: 0\nCPU part\t: 0xd08\n\nModel\t\t: Raspberry Pi 4 Model B\n", "Raspberry Pi 4 Model B"),
    ],
)
def test_cpu_model_is_what_the_kernel_calls_it(tmp_path: Path, cpuinfo: str, model: str) -> None:
    """On x86 a name for each core, on ARM one for the board."""
    proc, _ = write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert cpu_model(proc=proc) == model


def test_hardware_text_changes_with_everything_that_changes_timings(tmp_path: Path) -> None:
    """Another processor, quota, number of threads or accelerator: another text."""
    plain = write(tmp_path / "a", {"proc/cpuinfo": "model name: A\n"})
    limited = write(tmp_path / "b", {"proc/cpuinfo": "model name: A\n", "cgroup/cpu.max": "50000 100000\n"})
    other = write(tmp_path / "c", {"proc/cpuinfo": "model name: B\n"})
    texts = [describe_hardware(threads=1, proc=proc, cgroup=cgroup) for proc, cgroup in (plain, limited, other)]
    texts.append(describe_hardware(threads=2, proc=plain[0], cgroup=plain[1]))
    texts.append(describe_hardware(threads=1, accelerator="GPU", proc=plain[0], cgroup=plain[1]))
    assert len(set(texts)) == 5
    assert texts[0].startswith("A, ") and texts[0].endswith("no quota, 1 thread")
    assert "quota 0.5 cores per 100 ms" in texts[1]
