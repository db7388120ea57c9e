"""What is forced to the disk, and in which order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def log_of_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log from now on the name of each file and folder that is forced to the disk, and each rename as ``a -> b``."""
    log: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        log.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(self: Path, target: Path) -> Path:
        log.append(f"{self.name} -> {Path(target).name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    return log
