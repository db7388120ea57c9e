"""Ctrl-C once, twice, and where there is nothing to ask; and a terminal that is closed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator.client.submit import Interrupts
from tests.support.processes import RUN_S, source_environment


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


_PRINTS = """
import sys
from pathlib import Path
from coordinator.client.submit import Interrupts

with Interrupts(log=Path(sys.argv[1])) as interrupts:
    with interrupts.asking(lambda: None):
        print("open", flush=True)
        sys.stdin.readline()  # until the terminal is closed
        print("closed, on the standard output", flush=True)
    print("closed, on the standard error", file=sys.stderr, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the way to a controlling terminal is Linux's")
def test_terminal_that_is_closed_is_followed_by_a_file(tmp_path: Path) -> None:
    """Both outputs go there after SIGHUP; before it, to the terminal."""
    ours, theirs = pty.openpty()
    log = tmp_path / "run.log"
    command = [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0)\n{_PRINTS}"]
    with subprocess.Popen(  # noqa: S603 - our own module
        [*command, str(log)],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=source_environment(),
    ) as process:
        os.close(theirs)
        shown = b""
        while b"\n" not in shown:
            shown += os.read(ours, 100)
        assert b"open" in shown
        os.close(ours)
        process.communicate(b"now\n", timeout=RUN_S)
    assert process.returncode == 0
    assert log.read_text().splitlines() == ["closed, on the standard output", "closed, on the standard error"]
