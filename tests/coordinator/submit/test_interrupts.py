"""Ctrl-C once, twice, and where there is nothing to ask."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from coordinator.submit.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupts_ask_at_the_first_signal_and_raise_at_the_second(number: signal.Signals) -> None:
    """The first one leaves the main thread alone."""
    asked = threading.Event()
    with Interrupts() as interrupts, interrupts.asking(asked.set):
        os.kill(os.getpid(), number)
        assert asked.wait(30.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_interrupts_raise_where_nothing_can_be_asked() -> None:
    """Before a run and after it Ctrl-C is what it always is; the handlers are given back."""
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        with interrupts.asking(lambda: None):
            pass
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_interrupts_leave_a_run_under_nohup_alone() -> None:
    """A hang-up that was ignored before is ignored still."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.asking(lambda: pytest.fail("nobody stops it")):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
