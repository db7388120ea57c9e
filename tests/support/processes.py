"""Processes of this tree that tests start: where its packages are, and its commands as a user types them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

REPOSITORY: Final = Path(__file__).parents[2]
RUN_S: Final = 200.0
"""How long a command may take."""


def source_environment(**more: str) -> dict[str, str]:
    """This process's variables, with the packages of this tree."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "proto"), str(REPOSITORY))), **more}


def start_ringtune(*arguments: object, module: str = "ringtune.cli", **more: str) -> subprocess.Popen[str]:
    """Start ``ringtune``, or the module that stands for it, with piped outputs; ``more`` are variables."""
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", module, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=source_environment(**more),
    )


def run_ringtune(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``ringtune`` to its end, whatever that is."""
    with start_ringtune(*arguments, **more) as process:
        try:
            output, errors = process.communicate(timeout=RUN_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@contextlib.contextmanager
def running_python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs code and has said a line; it is killed at the end.

    Not a fork of this one: a child of a process with gRPC's threads runs its handlers of forks, and may end of them.
    """
    with subprocess.Popen(  # noqa: S603 - our own lines
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=source_environment()
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline(), "it has ended"
            yield process
        finally:
            process.kill()


def agents_below(pid: int) -> dict[str, psutil.Process]:
    """The agents that a launcher has started, by name; empty if the launcher is gone."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            words = child.cmdline()
            if "--name" in words:
                found[words[words.index("--name") + 1]] = child
    return found
