"""What all tests of the coordinator's packages share."""

from __future__ import annotations

import pytest

CALL_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a busy machine from failing a call that takes milliseconds, and from adding a line about a wait of 2 s."""
    monkeypatch.setattr("coordinator.screen.progress.QUIET_S", 3600.0)
    for name in ("client.connection.CALL_S", "client.submit.CALL_S", "server.coordinator._BEGUN_S"):
        monkeypatch.setattr(f"coordinator.{name}", CALL_S)
