"""Wrong input and its answer: cases run in this process, one after the other, and their answers judged.

Commands run as the command line does but without a new interpreter, unless a case has to be a process. A node that
would begin to serve is a failure. Local nodes are forked from one template.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

import psutil
import pytest

from coordinator.client import connection
from coordinator.client.local_nodes import AgentTemplate
from coordinator.server.server import CoordinatorServer
from edge.agent import process
from ringtune import cli
from tests.support import leaks, tiny
from tests.support.processes import source_environment
from tests.support.typed import exit_code, lent, typing

BASE_JOB = """\
[model]
path = "model"
[data]
train = "train.csv"
[runtime]
lease_s = 30.0
[train]
batch_size = 8
microbatches = 2
max_length = 16
local_iterations = 2
rounds = 1
"""
"""A job that is right: what a case writes is this, changed."""


@dataclass(frozen=True, slots=True)
class Place:
    """The folder in which one case happens."""

    folder: Path
    run: Path

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file of this place."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def own_model(self) -> Path:
        """Make the model a folder of links to files, so that one of them can be replaced."""
        shared = (self.folder / "model").resolve()
        (self.folder / "model").unlink()
        (self.folder / "model").mkdir()
        for path in shared.iterdir():
            (self.folder / "model" / path.name).symlink_to(path)
        return self.folder / "model"


@dataclass(frozen=True, slots=True)
class Case:
    """Wrong input and its answer.

    Attributes:
        line: what is typed after ``ringtune``; ``{run}`` is the finished run, ``{coordinator}`` and ``{node}`` are
            addresses.
        code: exit code.
        says: texts that the error line has, whatever the case of their letters.
        prepare: writes what is wrong.
        leaves: a name that may be new in the folder afterwards.
        without: a package that is not installed where the command runs.
        is_process: whether the command needs an interpreter of its own.
    """

    line: str
    code: int
    says: tuple[str, ...]
    prepare: Callable[[Place], object] = lambda place: None
    leaves: str = ""
    without: str = ""
    is_process: bool = False


ANSWER_S: Final = 200.0
"""How long an answer may take; a case that hangs is a failure, not a wait."""

CONNECT_S: Final = 0.5
"""How long a command here waits for a coordinator that is not there."""

ENDING_S: Final = 30.0
"""How long a thread may take to end after its command."""


PARSER_SAYS: Final = (
    "no such option",
    "no such command",
    "is called",
    "unexpected extra argument",
    "missing argument",
    "missing option",
    "requires an argument",
)
"""What the parser says of a command line that it can't read: a case of something else never got to what it is about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back."""

    code: int
    output: str
    errors: str
    left: tuple[str, ...] = ()


def _refuse_to_serve(options: object, *, on_joined: object) -> int:
    """Stand in for a node of this process, which no wrong input may start."""
    raise RuntimeError("the node was not refused")


class Workshop:
    """A model, rows, a finished run, a coordinator and a node, shared by all cases."""

    def __init__(self, folder: Path, template: AgentTemplate | None = None) -> None:
        self._folder = folder
        self._template = template
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Workshop:
        """Make what the cases share."""
        with contextlib.ExitStack() as undo:
            shared = self._folder / "shared"
            tiny.write_model(shared / "model")
            tiny.write_rows(shared / "train.csv", 24, seed=1)
            tiny.write_rows(shared / "eval.csv", 8, seed=2)
            template = self._template
            if template is None:
                environment = source_environment(OMP_NUM_THREADS="1")
                template = undo.enter_context(AgentTemplate(self._folder / "template.log", environment))
            undo.enter_context(lent(template))
            patch = undo.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(connection, "CONNECT_S", CONNECT_S)
            patch.setattr(process, "run_agent", _refuse_to_serve)
            targets = cli.command_targets()  # read once, and not anew by each of hundreds of commands
            patch.setattr(cli, "command_targets", targets.copy)
            patch.setenv("XDG_STATE_HOME", str(self._folder / "state"))
            patch.setenv("XDG_CACHE_HOME", str(self._folder / "cache"))
            server = undo.enter_context(CoordinatorServer("127.0.0.1:0", lease_s=10.0))
            self._coordinator = server.address
            self._run = self._folder / "run"
            self._node = self._start_node(undo, template)
            made = self._answer_here(("train", "job.toml", "--local", "2", "--out", str(self._run)), self._place())
            if made.code:
                raise RuntimeError(f"the run that all cases share ended with {made.code}: {made.errors}")
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what was started."""
        self._undo.close()

    def answer(self, case: Case) -> Answer:
        """Prepare a case in a folder of its own, type its command, and see what is left."""
        place = self._place()
        try:
            case.prepare(place)
            before = _files(place.folder)
            processes = _processes()
            names = {"run": str(self._run), "coordinator": self._coordinator, "node": self._node}
            typed = tuple(word.format(**names) if word.startswith("{") else word for word in shlex.split(case.line))
            run = _answer_of_process if case.is_process else self._answer_here
            with pytest.MonkeyPatch.context() as patch:
                if case.without:
                    for name in [name for name in sys.modules if name.partition(".")[0] == case.without]:
                        patch.delitem(sys.modules, name)
                    patch.setitem(sys.modules, case.without, None)
                found = run(typed, place)
            # gRPC ends its threads a moment after a server has stopped
            for thread in threading.enumerate():
                if not thread.daemon and f"thread {thread.name}" not in processes:
                    thread.join(ENDING_S)
            new = sorted(name for name in _files(place.folder) - before if name.split("/")[0] != case.leaves)
            left = [f"file {name}" for name in new]
            left += [f"process {name}" for name in sorted(_processes() - processes)]
            left += [f"part {path.name}" for path in place.folder.rglob("*.part")]
            return Answer(code=found.code, output=found.output, errors=found.errors, left=tuple(left))
        finally:
            shutil.rmtree(place.folder)

    def _place(self) -> Place:
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=self._folder))
        shared = self._folder / "shared"
        (folder / "model").symlink_to(shared / "model")
        for file in ("train.csv", "eval.csv"):
            shutil.copy(shared / file, folder / file)
        (folder / "job.toml").write_text(BASE_JOB, encoding="utf-8")
        return Place(folder, self._run)

    def _start_node(self, undo: contextlib.ExitStack, template: AgentTemplate) -> str:
        """Start a node of another coordinator; returns its address, which is no coordinator's."""
        other = undo.enter_context(CoordinatorServer("127.0.0.1:0", lease_s=60.0))
        arguments = ["--coordinator", other.address, "--name", "other", "--watch-parent", "--memory", "1GiB"]
        agent = template.start(arguments, log=self._folder / "node.log")
        undo.callback(agent.wait, ANSWER_S)
        undo.callback(agent.close_input)
        until_s = time.monotonic() + ANSWER_S
        while not other.coordinator.living():
            if time.monotonic() > until_s:
                raise RuntimeError(f"the node did not join: {(self._folder / 'node.log').read_text()}")
            time.sleep(0.05)
        return other.coordinator.living()[0].address

    def _answer_here(self, typed: tuple[str, ...], place: Place) -> Answer:
        output, errors = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(place.folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
            typing(typed),
            _deadline(),
        ):
            code = exit_code()
        return Answer(code=code, output=output.getvalue(), errors=errors.getvalue())


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """Raise in the main thread after ``ANSWER_S``."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer within {ANSWER_S:g} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, ANSWER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _answer_of_process(typed: tuple[str, ...], place: Place) -> Answer:
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "ringtune.cli", *typed],
        cwd=place.folder,
        env=source_environment(),
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Answer(code=done.returncode, output=done.stdout, errors=done.stderr)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _processes() -> set[str]:
    """Children of this process and of its template, and threads that keep it alive."""
    found = set()
    for pid in leaks.processes_below():
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(pid)
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(f"{child.pid} {' '.join(child.cmdline()[-6:])}")
    return found | {f"thread {thread.name}" for thread in threading.enumerate() if not thread.daemon}


def problems(case: Case, answer: Answer) -> list[str]:
    """What is wrong with an answer, in words; none if it is as stated."""
    lines = answer.errors.splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    found = []
    if answer.code != case.code:
        found.append(f"exit code {answer.code} in place of {case.code}")
    if len(errors) != 1 or lines[-1:] != errors:
        found.append(f"{len(errors)} error lines, the last line is {lines[-1:]}")
    if "Traceback" in answer.errors + answer.output:
        found.append("a traceback")
    said = errors[-1].lower() if errors else ""
    found += [f"{word!r} is not said" for word in case.says if word.lower() not in said]
    found += [f"the parser refuses it: {said}" for words in PARSER_SAYS if words in said and words not in case.says]
    found += [f"left: {name}" for name in answer.left]
    return found
