"""Commands typed in this process: all that the command line does, without a new interpreter.

Local nodes are processes as ever, forked from a template that outlives the command: importing torch and the model
libraries takes most of the time of a short command, and proves nothing the second time. ``calling`` does the
same for modules that the product starts as processes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import pytest

from coordinator.client import local_nodes
from coordinator.client.local_nodes import AgentTemplate, ForkedAgent
from ringtune import cli


def run_here(
    template: Callable[[], AgentTemplate], *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``ringtune`` to its end in this process."""
    with lent(template(), variables):
        return run_alone(*arguments)


def run_alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``ringtune`` to its end in this process, without local nodes."""
    output, errors = io.StringIO(), io.StringIO()
    typed = tuple(map(str, arguments))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), typing(typed):
        code = exit_code()
    return subprocess.CompletedProcess(typed, code, output.getvalue(), errors.getvalue())


class Lent:
    """Stands in for a command's template, and passes everything on to one that stays."""

    def __init__(self, template: AgentTemplate, variables: Mapping[str, str]) -> None:
        self._template, self._variables = template, variables

    def __enter__(self) -> Lent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def start(self, arguments: Sequence[str], *, log: Path) -> ForkedAgent:
        """Fork an agent with the variables."""
        return self._template.start(arguments, log=log, environment=self._variables)

    def __getattr__(self, name: str) -> object:
        return getattr(self._template, name)


@contextlib.contextmanager
def lent(template: AgentTemplate, variables: Mapping[str, str] = types.MappingProxyType({})) -> Iterator[None]:
    """Let commands of this process fork their local nodes from this template, with these variables."""

    def made(log: Path, environment: Mapping[str, str]) -> Lent:
        return Lent(template, variables)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_nodes, "AgentTemplate", made)
        yield


def exit_code() -> int:
    """Call the command line in this process; returns its exit code."""
    try:
        cli.run_typed()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


@contextlib.contextmanager
def typing(arguments: tuple[str, ...]) -> Iterator[None]:
    """Let the command line see these arguments, and put signals and logging back afterwards."""
    root = logging.getLogger()
    handlers, words = list(root.handlers), sys.argv
    edge_level = logging.getLogger("edge").level
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    sys.argv = ["ringtune", *arguments]
    try:
        yield
    finally:
        sys.argv = words
        root.handlers = handlers
        logging.getLogger("edge").setLevel(edge_level)
        for number, handler in signals.items():
            signal.signal(number, handler)


def calling(module: ModuleType) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what stands in for ``subprocess.run`` where ``python -P -m MODULE ARGUMENTS`` is started."""

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[3] == module.__name__
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = module.main(command[4:])
        return subprocess.CompletedProcess(command, code, "", errors.getvalue())

    return run
