"""The one thread that computes."""

from __future__ import annotations

import threading

import pytest

from edge.machine.libraries import ComputeThread
from ringtune.errors import InterruptedRunError

WAIT_S = 20.0


def test_compute_thread_refuses_what_comes_after_its_end() -> None:
    """A call that comes while the agent ends is refused at once, so the process does not wait for its deadline."""
    thread = ComputeThread()
    assert thread.call(lambda: 7, timeout_s=WAIT_S, what="seven") == 7
    assert thread.close(WAIT_S)
    with pytest.raises(InterruptedRunError, match="the agent ends"):
        thread.call(lambda: 7, timeout_s=0.5, what="seven")


def test_compute_thread_refuses_what_was_queued_behind_its_end() -> None:
    """The same holds for what was asked just before, while the last work was still under way."""
    thread = ComputeThread()
    started, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert go_on.wait(WAIT_S)

    thread.submit(hold)
    assert started.wait(WAIT_S)
    assert not thread.close(0.0)
    late = thread.submit(lambda: 7)
    go_on.set()
    with pytest.raises(InterruptedRunError):
        late.result(WAIT_S)
