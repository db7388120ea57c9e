"""What the tests of the Python API share."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest


@pytest.fixture
def merging_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge in this process: one of its own loads torch anew, in seconds. What it prints and returns is the same."""

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        from edge.model import merge

        module, *arguments = command[3:]
        assert module == merge.__name__
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = merge.main(arguments)
        return subprocess.CompletedProcess(command, code, "", errors.getvalue())

    monkeypatch.setattr("coordinator.api.user_adapters.subprocess.run", run)
