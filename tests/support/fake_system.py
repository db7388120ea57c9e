"""Files of the kernel as some other machine has them: procfs and control groups below a folder of a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class FakeSystem(NamedTuple):
    """Where procfs and the control groups of a made-up machine are."""

    proc: Path
    cgroup: Path


def fake_system(root: Path, files: Mapping[str, str]) -> FakeSystem:
    """Write files below ``root``; names begin with ``proc/`` or ``cgroup/``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return FakeSystem(root / "proc", root / "cgroup")
