"""What the tests of the coordinator's services share."""

from __future__ import annotations

import pytest

from ringtune.transport import enrollment

CALL_S = 60.0


@pytest.fixture(autouse=True)
def patient_with_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a busy machine time for certificates: a node waits 3 s for a renewal, for its next heartbeat's sake."""
    for name in ("_RENEW_S", "_CALL_S"):
        monkeypatch.setattr(enrollment, name, CALL_S)
