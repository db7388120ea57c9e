"""What the tests of the Python API share."""

from __future__ import annotations

import pytest

from tests.support.typed import calling


@pytest.fixture
def merging_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge in this process."""
    from edge.model import merge

    monkeypatch.setattr("coordinator.client.saved_run.subprocess.run", calling(merge))
