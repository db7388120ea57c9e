"""Running one short command of the system, with a deadline and an error that quotes it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from ringtune.errors import DeadlineError, RingTuneError

_LIMIT_S = 20.0


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
            list(command), capture_output=True, text=True, timeout=_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(list(command), 127, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"'{shlex.join(command)}' did not end within {_LIMIT_S:g} s; see what holds it up"
        ) from error
