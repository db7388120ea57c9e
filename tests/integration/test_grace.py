"""A process that was told to end does, within its grace time, whatever its threads wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.server.server import CoordinatorServer
from tests.integration.test_signals import line_with
from tests.support.processes import source_environment

END_S = 60.0
GRACE_S = 1.0

# A thread that never ends holds the process up at its exit, too: the interpreter would wait for it for ever.
_STUCK = f"""
import sys, threading
threading.Thread(target=threading.Event().wait, name="stuck").start()
from ringtune.machine import process as grace
grace.mark_command_process()
from coordinator.client import submit as interrupts
from coordinator.server import coordinator as ending
from edge.agent import agent, process
process.GRACE_S = interrupts.GRACE_S = ending.GRACE_S = {GRACE_S}
ending.SAVE_S = 0.0
"""
_CLI = """
from ringtune import cli
cli.app(sys.argv[1:], prog_name="ringtune")
"""
_NODE_WAITS = "agent.Agent.abandon = lambda *_: threading.Event().wait()\n"
_DISK_HANGS = "agent.Agent.close = lambda *_: open(sys.argv[-1]).read()\n"
_COORDINATOR_WAITS = "ending.ShutdownSignals.save = lambda *_: threading.Event().wait()\n"
_LOCK_IS_HELD = """
lock = threading.Lock()
lock.acquire()
ending.ShutdownSignals.save = lambda *_: lock.acquire()
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process with a thread that never ends."""
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-c", _STUCK + script, *arguments],
        env=source_environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], word: str, number: signal.Signals) -> str:
    """What a process says that gets a signal once it has said a word."""
    try:
        assert line_with(process, word)
        process.send_signal(number)
        output, _ = process.communicate(timeout=END_S)
    finally:
        process.kill()
    return output


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize("waits", [_NODE_WAITS, _DISK_HANGS], ids=["a call", "a disk"])
def test_node_ends_whatever_it_waits_for(tmp_path: Path, waits: str) -> None:
    """A report that is never answered, a file that can't be read to its end; it says what it waited for."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = waits.replace("sys.argv[-1]", repr(str(fifo))) + _CLI
    with (
        CoordinatorServer("127.0.0.1:0", lease_s=30.0) as server,
        start(
            script, "node", "--coordinator", server.address, "--name", "a", "--state", str(tmp_path / "s")
        ) as process,
    ):
        output = ended(process, "joined", signal.SIGTERM)
        assert process.returncode == 128 + signal.SIGTERM
    assert f"did not end within {GRACE_S:g} s" in output and "stuck at" in output


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize("waits", [_COORDINATOR_WAITS, _LOCK_IS_HELD], ids=["a call", "a lock"])
def test_coordinator_ends_whatever_it_waits_for(tmp_path: Path, waits: str) -> None:
    """A run that is never saved, a lock that is never free."""
    with start(waits + _CLI, "coordinator", "--bind", "127.0.0.1:0", "--state", str(tmp_path)) as process:
        output = ended(process, "listening", signal.SIGTERM)
        assert process.returncode == 128 + signal.SIGTERM
    assert f"did not end within {GRACE_S:g} s" in output


@pytest.mark.promise("6 every wait ends")
def test_command_that_is_told_to_end_at_once_does(tmp_path: Path) -> None:
    """Ctrl-C in a command that waits for something that never comes, and is not woken."""
    script = """
from coordinator.client.submit import Interrupts
with Interrupts():
    print("begun", flush=True)
    while True:
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
"""
    with start(script) as process:
        output = ended(process, "begun", signal.SIGINT)
        assert process.returncode == 130
    assert f"did not end within {GRACE_S:g} s" in output


def test_earliest_end_counts_and_a_pipe_that_nobody_reads_is_no_reason_to_stay() -> None:
    """The second signal asks for less patience; who can't say why it ends does so without a word."""
    script = """
import os
from ringtune.machine.process import end_within
end_within(3600.0, 3)
end_within(0.1, 4)
end_within(3600.0, 5)
read, write = os.pipe()
os.set_blocking(write, False)
try:
    while True:
        os.write(write, bytes(65536))
except BlockingIOError:
    os.set_blocking(write, True)
os.dup2(write, 2)
threading.Event().wait()
"""
    began_s = time.monotonic()
    with start(script) as process:
        try:
            assert process.wait(END_S) == 4
        finally:
            process.kill()
    assert time.monotonic() - began_s < END_S
