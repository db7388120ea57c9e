"""Start a run that goes on without the command that submits it: at a coordinator, or in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.run_folder.folder import LOG
from coordinator.run_folder.place import RunPlace, read_place
from coordinator.submit.connection import Connection
from ringtune.errors import DeadlineError, RingTuneError, UsageError
from ringtune.hints import hint
from ringtune.machine.exit_errors import exit_error

DETACH = "--detach"
BEGIN_S = 300.0
_POLL_S = 0.2
_LATER_PHASES = ("training", "collecting")
_TAIL_BYTES = 4096


def start_in_background(out: Path, arguments: Sequence[str]) -> tuple[RunPlace, subprocess.Popen[bytes]]:
    """Start the command in a session of its own, and wait until its run trains.

    What it prints goes to the log in the run's folder. Closing the terminal does not reach it.

    Args:
        out: folder of the run.
        arguments: of ``ringtune``, ``--detach`` among them.

    Returns:
        Where its run is driven, and the process.

    Raises:
        DeadlineError: it has not begun in time.
        RingTuneError: it ended before; its own error.
    """
    log = out / LOG
    process = _start(log, [argument for argument in arguments if argument != DETACH])
    deadline_s = time.monotonic() + BEGIN_S
    try:
        while time.monotonic() < deadline_s:
            code = process.poll()
            place = read_place(out)
            if place is not None and place.pid == process.pid and (code == 0 or _trains(place)):
                return place, process
            if code is not None:
                raise ended_error(code, log)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        raise
    raise DeadlineError(f"the detached run does not train after {BEGIN_S:g} s; see {log}, or end process {process.pid}")


def _start(log: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "ringtune.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
    except OSError as error:
        raise UsageError(f"can't use {log.parent} for the run's files: {error.strerror}; choose another") from error


def ended_error(code: int, log: Path) -> RingTuneError:
    """Make the error of a detached run whose command has ended.

    Args:
        code: its exit code, negative for a signal.
        log: what it printed.
    """
    return exit_error("the detached run", code, _tail(log), log=log)


def _trains(place: RunPlace) -> bool:
    try:
        with Connection(place.coordinator) as client:
            status = client.status().run
    except RingTuneError:  # it has ended meanwhile
        return False
    return status.run_id == place.run_id and status.phase in _LATER_PHASES


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def lines_of_detached(place: RunPlace, out: Path | None) -> list[str]:
    """Write the commands for a run that was detached, a line each."""
    coordinator = "" if place.is_local else place.coordinator
    name = str(out) if place.is_local and out is not None else place.run_id
    lines = [
        f"run {place.run_id} goes on without this command",
        f"follow it:        {hint('logs', name, '--follow', coordinator=coordinator)}",
        f"stop and save it: {hint('stop', name, coordinator=coordinator)}",
    ]
    if place.is_local:
        return [*lines, f"its files are in {out}"]
    return [*lines, f"get its files:    {hint('fetch', name, '--out', str(out or 'DIR'), coordinator=coordinator)}"]
