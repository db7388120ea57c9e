"""One rule for the signals that end a process: which are heard, and that the handlers are given back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ringtune.machine.signals import ENDS, handled

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", ENDS)
def test_signals_are_handled_and_their_handlers_given_back(number: signal.Signals) -> None:
    """Also if what is done meanwhile fails."""
    before = [signal.getsignal(each) for each in ENDS]
    heard: list[int] = []

    def hear(got: int, _frame: object) -> None:
        heard.append(got)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), handled(hear):
        os.kill(os.getpid(), number)
    assert heard == [number]
    assert [signal.getsignal(each) for each in ENDS] == before


def test_signals_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """``nohup`` is for that; Ctrl-C and the end of a service are heard all the same."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heard: list[int] = []
    try:
        with handled(lambda got, _: heard.append(got)):
            for number in ENDS:
                os.kill(os.getpid(), number)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [signal.SIGINT, signal.SIGTERM]


def test_signals_have_their_rule_in_one_place() -> None:
    """Nobody else asks whether a hang-up is ignored."""
    folders = ("proto", "coordinator", "edge", "sim")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in paths if "getsignal" in path.read_text(encoding="utf-8")] == ["signals.py"]
