"""A terminal that is closed: what is printed then goes to a file, and nothing fails."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import RUN_S, source_environment

_PRINTS = """
import sys
from pathlib import Path
from coordinator.submit.interrupts import Interrupts

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
