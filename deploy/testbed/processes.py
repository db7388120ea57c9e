"""Processes of the testbed: each joins its control groups first, then enters its namespace, then is the command.

Short commands of the system (``call``, ``attempt``) run outside of both, with a deadline.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.testbed.network import Command, enter
from ringtune.errors import DeadlineError, RingTuneError, StorageError

TERM_S = 8.0
KILL_S = 5.0
_TAIL_BYTES = 4096
_CALL_S = 20.0
# Writes its own number into each group and becomes the command, so that all of it is counted from the beginning.
_JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 125; shift; done; shift; exec "$@"'


def inside(folders: Sequence[Path], namespace: str, command: Sequence[str]) -> Command:
    """The command line that runs ``command`` in control groups and a namespace."""
    return (
        "/bin/sh",
        "-c",
        _JOIN,
        "join",
        *(str(folder) for folder in folders),
        "--",
        *enter(namespace, tuple(command)),
    )


@dataclass(slots=True)
class Running:
    """A process that was started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, None if it still runs after ``timeout_s``."""
        return wait(self.process, timeout_s)

    def words(self) -> str:
        """The end of what it printed."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def last_words(self) -> str:
        """The last line that it printed."""
        return (self.words().strip().splitlines() or ["it printed nothing"])[-1]


def start(
    name: str,
    command: Sequence[str],
    *,
    folders: Sequence[Path],
    namespace: str,
    log: Path,
    environment: Mapping[str, str],
) -> Running:
    """Start a process in the background; what it prints goes to a file, which is written anew.

    Raises:
        StorageError: the file can't be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - our own command lines
                inside(folders, namespace, command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the command under test
            )
    except OSError as error:
        raise StorageError(f"can't write {log}: {error.strerror}") from error
    return Running(name, process, log)


def stop(running: Sequence[Running], *, term_s: float = TERM_S) -> None:
    """SIGTERM to all, then SIGKILL to those that do not listen."""
    alive = [child for child in running if child.process.poll() is None]
    for child in alive:
        child.process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + term_s
    try:
        for child in alive:
            child.wait(deadline_s - time.monotonic())
    finally:
        for child in alive:
            if child.process.poll() is None:
                child.process.kill()
            child.wait(KILL_S)


def wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code, None if it still runs after ``timeout_s``."""
    try:
        return process.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        return None


def call(command: Sequence[str]) -> str:
    """Run a command to its end; return what it printed; raises ``RingTuneError``."""
    done = attempt(command)
    if done.returncode:
        words = done.stderr.strip().splitlines()[:1] or [f"exit code {done.returncode}"]
        raise RingTuneError(f"'{shlex.join(command)}' failed: {words[0]}")
    return done.stdout


def attempt(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail; one that is not installed ends with 127, as in a shell; raises ``DeadlineError``."""
    try:
        return subprocess.run(  # noqa: S603 - our own command lines, no shell reads them
            list(command), capture_output=True, text=True, timeout=_CALL_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(list(command), 127, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"'{shlex.join(command)}' did not end within {_CALL_S:g} s; see what holds it up"
        ) from error
