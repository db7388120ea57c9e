"""What all tests of the coordinator's packages share."""

from __future__ import annotations

import pytest

CALL_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a busy machine from failing a call that takes milliseconds, and from adding a line about a wait of 2 s.

    So that each node learns of its release, which the coordinator else gives up after 4 s.
    """
    monkeypatch.setattr("coordinator.screen.progress.QUIET_S", 3600.0)
    for name in (
        "coordinator.client.connection.CALL_S",
        "coordinator.client.submit.CALL_S",
        "coordinator.run.driver._RELEASE_WAIT_S",
        "coordinator.run.node_client._RELEASE_S",
        "coordinator.server.coordinator._BEGUN_S",
        "ringtune.transport.tls._PEEK_S",
    ):
        monkeypatch.setattr(name, CALL_S)
