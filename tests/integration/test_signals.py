"""A process that is told to end does: whichever thread gets the signal, and whatever its threads wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coordinator.server.server import CoordinatorServer
from tests.support.cluster import START_S
from tests.support.processes import source_environment

END_S = 60.0
GRACE_S = 1.0
ASLEEP_S = 0.05

# The main thread blocks the signals, so that the kernel picks the other thread, as it may do at any time.
_DEFLECTED = """
import signal, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""
# A thread that never ends holds the process up at its exit, too: the interpreter would wait for it for ever.
_THREAD = """
import sys, threading
threading.Thread(target=threading.Event().wait, name="stuck").start()
from ringtune.machine import process as grace
grace.mark_command_process()
"""
_STUCK = f"""{_THREAD}
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
_DISK_HANGS = "agent.Agent.close = lambda *_: open(sys.argv[-1]).read()\n"
_LOCK_IS_HELD = """
lock = threading.Lock()
lock.acquire()
ending.ShutdownSignals.save = lambda *_: lock.acquire()
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs a script and has these arguments."""
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-c", script, *arguments],
        env=source_environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def line_with(process: subprocess.Popen[str], word: str) -> str:
    """The first line that has the word; the process is killed if it does not come."""
    assert process.stdout is not None
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        return next((line for line in process.stdout if word in line), "")
    finally:
        timer.cancel()


def wait_until_asleep(pid: int) -> None:
    """Wait until the main thread has slept for ``ASLEEP_S`` without a break: it waits (Linux; elsewhere at once)."""
    status = Path(f"/proc/{pid}/task/{pid}/status")
    deadline_s, before = time.monotonic() + START_S, ""
    while status.exists() and time.monotonic() < deadline_s:
        lines = [line for line in status.read_text().splitlines() if line.startswith(("State", "voluntary"))]
        if (now := " ".join(lines)) == before and "S (sleeping)" in now:
            return
        before = now
        time.sleep(ASLEEP_S)


def ended(process: subprocess.Popen[str], word: str, number: signal.Signals) -> tuple[int, str]:
    """Code and output of a process that gets a signal once it has said a word."""
    try:
        assert line_with(process, word)
        wait_until_asleep(process.pid)
        process.send_signal(number)
        output, _ = process.communicate(timeout=END_S)
    finally:
        process.kill()
    assert "Traceback" not in output or "did not end within" in output
    return process.returncode, output


JOB = '[model]\npath = "model"\n[data]\ntrain = "rows.csv"\n'


@pytest.mark.parametrize(
    ("arguments", "word", "number"),
    [
        (("train", "JOB", "--coordinator", "THERE", "--nodes", "3", "--out", "OUT"), "joining", signal.SIGINT),
        (("node", "--coordinator", "127.0.0.1:9", "--name", "a", "--state", "OUT"), "can't join yet", signal.SIGINT),
    ],
)
def test_signals_end_a_command_and_a_node_that_wait(
    tmp_path: Path, arguments: tuple[str, ...], word: str, number: signal.Signals
) -> None:
    """The exit code of the signal within seconds, and no traceback."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "rows.csv").write_text("text,label\na,x\n")
    with CoordinatorServer("127.0.0.1:0", lease_s=10.0) as server:
        places = {"JOB": str(tmp_path / "job.toml"), "OUT": str(tmp_path / "out"), "THERE": server.address}
        with start(_DEFLECTED + _CLI, *(places.get(word, word) for word in arguments)) as process:
            code, output = ended(process, word, number)
    assert code == 128 + number, output
    assert output.count("error: ") == (arguments[0] != "node")


@pytest.mark.promise("6 every wait ends")
def test_node_ends_though_a_file_can_not_be_read_to_its_end(tmp_path: Path) -> None:
    """Whichever thread gets the signal, a node that serves says what it waited for."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = _DEFLECTED + _STUCK + _DISK_HANGS.replace("sys.argv[-1]", repr(str(fifo))) + _CLI
    with CoordinatorServer("127.0.0.1:0", lease_s=30.0) as server:
        arguments = ("--coordinator", server.address, "--name", "a", "--state", str(tmp_path / "s"))
        with start(script, "node", *arguments) as process:
            code, output = ended(process, "joined", signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert f"did not end within {GRACE_S:g} s" in output and "stuck at" in output


@pytest.mark.promise("6 every wait ends")
def test_coordinator_ends_though_a_lock_is_never_free(tmp_path: Path) -> None:
    """It would save a run; the signal reaches another thread than the one that waits."""
    script = _DEFLECTED + _STUCK + _LOCK_IS_HELD + _CLI
    with start(script, "coordinator", "--bind", "127.0.0.1:0", "--state", str(tmp_path)) as process:
        code, output = ended(process, "listening", signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
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
    with start(_STUCK + script) as process:
        code, output = ended(process, "begun", signal.SIGINT)
    assert code == 130
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
    with start(_THREAD + script) as process:
        try:
            assert process.wait(END_S) == 4
        finally:
            process.kill()
