"""A coordinator that is ended saves its run first, whatever became of its terminal."""

from __future__ import annotations

import os
import signal

import pytest

from coordinator.server.coordinator import Coordinator
from coordinator.server.ending import Ending

RUN = "r20260102-030405-00000000"


def gone(_line: str) -> None:
    """A terminal that was closed: every write to it fails."""
    raise OSError(5, "Input/output error")


def test_ending_drains_the_run_though_the_terminal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP says that nobody can be told any more; the run gets its checkpoint all the same."""
    coordinator = Coordinator()
    coordinator.say = gone
    drained: list[str] = []
    monkeypatch.setattr(coordinator, "driven", lambda: "" if drained else RUN)
    monkeypatch.setattr(coordinator, "drain", lambda run_id, reason: drained.append(run_id))
    with Ending() as ending:
        os.kill(os.getpid(), signal.SIGHUP)
        assert ending.wait()
        ending.save(coordinator)
    assert drained == [RUN]
