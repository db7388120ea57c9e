"""What tests of the commands that predict share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.predictions import write_pair


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, ...]:
    """The arguments that name plan and profile."""
    plan, profile = write_pair(tmp_path / "in")
    return (str(plan), "--profile", str(profile))
