"""What all tests of the coordinator's packages share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a busy machine from adding a line to what a command says: one that takes 2 s says what it waits for."""
    monkeypatch.setattr("coordinator.screen.progress.QUIET_S", 3600.0)
