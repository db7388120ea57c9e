"""Signals that the kernel hands to another thread than the main one: the process ends all the same."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator.server.server import CoordinatorServer
from tests.support.cluster import START_S
from tests.support.processes import source_environment

END_S = 60.0

# The main thread blocks the signals, so that the kernel picks the other thread, as it may do at any time.
_DEFLECTED = """
import signal, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
from ringtune import cli
cli.app(sys.argv[1:], prog_name="ringtune")
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command with a main thread that gets no signal itself."""
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-c", _DEFLECTED, *arguments],
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_signals_end_a_coordinator_whichever_thread_gets_them(number: signal.Signals, code: int) -> None:
    """The coordinator ends within seconds, without an error; after Ctrl-C with the code that every command has."""
    with start("coordinator", "--bind", "127.0.0.1:0") as process:
        assert line_with(process, "listening")
        process.send_signal(number)
        try:
            assert process.wait(END_S) == code
        finally:
            process.kill()


def test_signals_end_a_node_whichever_thread_gets_them(tmp_path: Path) -> None:
    """The node leaves and exits with the code of the signal."""
    with (
        CoordinatorServer("127.0.0.1:0", lease_s=30.0) as server,
        start("node", "--coordinator", server.address, "--name", "a", "--state", str(tmp_path)) as process,
    ):
        assert line_with(process, "joined")
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(END_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


JOB = '[model]\npath = "model"\n[data]\ntrain = "rows.csv"\n'


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("train", "JOB", "--coordinator", "THERE", "--nodes", "3", "--out", "OUT"), "joining"),
        (("measure", "JOB", "--coordinator", "THERE", "--nodes", "3", "--save", "OUT"), "joining"),
        (("node", "--coordinator", "127.0.0.1:9", "--name", "a", "--state", "OUT"), "can't join yet"),
    ],
)
def test_ctrl_c_ends_a_command_that_waits_with_one_code(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    """Exit code 130 within seconds, and no traceback."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "rows.csv").write_text("text,label\na,x\n")
    with CoordinatorServer("127.0.0.1:0", lease_s=10.0) as server:
        places = {"JOB": str(tmp_path / "job.toml"), "OUT": str(tmp_path / "out"), "THERE": server.address}
        with start(*(places.get(word, word) for word in arguments)) as process:
            assert line_with(process, word)
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=END_S)
            finally:
                process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert output.count("error: ") == (arguments[0] != "node")
