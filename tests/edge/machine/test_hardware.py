"""The text that describes a processor and what a process may use of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.machine.hardware import cpu_model, describe_hardware
from tests.support.fake_system import fake_system


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor\t: 0\nmodel name\t: Made-up 3000\n", "Made-up 3000"),
        ("processor\t: 0\nCPU part\t: 0xd08\n\nModel\t\t: Raspberry Pi 4 Model B\n", "Raspberry Pi 4 Model B"),
    ],
)
def test_cpu_model_is_what_the_kernel_calls_it(tmp_path: Path, cpuinfo: str, model: str) -> None:
    """On x86 a name for each core, on ARM one for the board."""
    proc, _ = fake_system(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert cpu_model(proc=proc) == model


def test_hardware_text_changes_with_everything_that_changes_timings(tmp_path: Path) -> None:
    """Another processor, quota, number of threads or accelerator: another text."""
    plain = fake_system(tmp_path / "a", {"proc/cpuinfo": "model name: A\n"})
    limited = fake_system(tmp_path / "b", {"proc/cpuinfo": "model name: A\n", "cgroup/cpu.max": "50000 100000\n"})
    other = fake_system(tmp_path / "c", {"proc/cpuinfo": "model name: B\n"})
    texts = [describe_hardware(threads=1, proc=proc, cgroup=cgroup) for proc, cgroup in (plain, limited, other)]
    texts.append(describe_hardware(threads=2, proc=plain[0], cgroup=plain[1]))
    texts.append(describe_hardware(threads=1, accelerator="GPU", proc=plain[0], cgroup=plain[1]))
    assert len(set(texts)) == 5
    assert texts[0].startswith("A, ") and texts[0].endswith("no quota, 1 thread")
    assert "quota 0.5 cores per 100 ms" in texts[1]
