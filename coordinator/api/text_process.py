"""Processes with torch that say what they do in lines of JSON, and the one that writes texts.

``TextProcess`` continues texts and answers conversations, for ``ringtune chat`` and ``ringtune serve``. It has the
model (``edge.runtime.text_process``, which describes its lines); this side has neither that nor torch. One request is
answered at a time. Whoever leaves an answer early ends it at its next token.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from coordinator.client.saved_run import SavedRun, adapter_of, evaluation_job, require_user
from ringtune.errors import DeadlineError, PeerLostError, RingTuneError, UsageError
from ringtune.job.job import Job
from ringtune.machine.process import exit_error
from ringtune.models.family import LANGUAGE_TASKS

Event = Mapping[str, Any]
_KILLED_S: Final = 10.0
_END_S: Final = 60.0
"""For a process that has closed its output; a busy board takes its time to unload libraries."""


def command_of(module: str, run: SavedRun, job: Job, folder: Path, *words: str) -> list[str]:
    """Return the command of a process with the model of a run's result; ``folder`` gets the file of the job.

    ``module`` is one of ``edge.runtime`` that writes lines.
    """
    job_file = folder / "job.toml"
    job_file.write_text(job.to_toml(), encoding="utf-8")
    return [sys.executable, "-P", "-m", "edge.runtime", module, str(job_file), str(run.saved.resolve()), *words]


class LineProcess:
    """A process that writes lines of JSON; it is killed at the end of its context.

    Args:
        what: it does, for its error.
        log: gets its standard error.
        has_input: whether it reads lines of JSON, too; then Ctrl-C is not passed to it.
    """

    def __init__(self, what: str, command: Sequence[str], log: Path, *, has_input: bool = False) -> None:
        self._what, self._log = what, log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=has_input,
            )
        self._lines = deque[bytes]()
        self._begun: list[bytes] = []  # the pieces of a line that has no end yet

    def __enter__(self) -> LineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(_KILLED_S)
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(OSError):  # it has not read all
                pipe.close()

    def send(self, line: Mapping[str, Any]) -> None:
        """Write a line to the process; raises ``OSError`` if it has ended."""
        if (pipe := self._process.stdin) is not None:
            pipe.write(json.dumps(line).encode() + b"\n")
            pipe.flush()

    def next(self, wait_s: float, late: str) -> dict[str, Any] | None:
        """Return the next line; None once the process has closed its output.

        Raises ``DeadlineError``: with the text ``late``, if no line came for ``wait_s`` seconds.
        """
        output, end_s = self._process.stdout, time.monotonic() + wait_s
        ready = select.poll()
        ready.register(output or -1, select.POLLIN)
        while not self._lines:
            if not ready.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise DeadlineError(late)
            piece = os.read(output.fileno(), 1 << 16) if output is not None else b""
            if not piece:
                return None
            end, *others = piece.split(b"\n")
            self._begun.append(end)
            for begun in others:
                self._lines.append(b"".join(self._begun))
                self._begun = [begun]
        event: dict[str, Any] = json.loads(self._lines.popleft())
        return event

    def lines(self, wait_s: float, late: str) -> Iterator[dict[str, Any]]:
        """Yield all lines, and raise the error of the process at their end; ``DeadlineError`` as ``next``."""
        while (line := self.next(wait_s, late)) is not None:
            yield line
        if error := self.error():
            raise error

    def error(self) -> RingTuneError | None:
        """Return the error of a process that has closed its output; None if it has ended well."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return DeadlineError(f"{self._what} gave all its output and does not end (waited {_END_S:g} s); try again")
        return exit_error(self._what, code, log=self._log) if code else None


class Ready(NamedTuple):
    """Facts of a loaded model.

    Attributes:
        has_template: whether it answers conversations, or only continues texts.
        longest: most tokens of a text with its answer.
        reads: what the model could read, if memory allowed it.
        cache_bytes: most bytes of the keys and values of a text; 0 = none are kept, each token costs a whole forward.
        temperature: that the model asks for; 0 = always the likeliest token.
        told: note on settings of the model that are not used; empty without.
    """

    has_template: bool
    longest: int
    reads: int
    cache_bytes: int
    temperature: float
    told: str

    def lines(self) -> list[str]:
        """Describe the model for a terminal."""
        size = f"keys and values of at most {self.cache_bytes / (1 << 20):,.1f} MiB"
        cost = (
            size if self.cache_bytes else "no keys and values are kept: its adapter computes a token by those beside it"
        )
        cut = f" (the model reads {self.reads:,}, memory allows no more)" if self.longest < self.reads else ""
        return [f"texts of at most {self.longest:,} tokens{cut}, {cost}", *([self.told] if self.told else [])]


class TextProcess:
    """A process with the model of a run, in the context.

    Args:
        run: of a language model.
        model: folder that replaces the run's model; None = that.
        user: of the adapters, if each has their own.

    Attributes:
        ready: facts of the loaded model.

    Raises:
        UsageError: the run's model writes no text, or ``user`` is unknown.
    """

    ready: Ready

    def __init__(self, run: SavedRun, *, model: Path | None = None, user: str = "") -> None:
        if run.job.model.task not in LANGUAGE_TASKS:
            raise UsageError(
                f"{run.folder} learned {run.job.model.task}, which writes no text; 'ringtune predict' is for its rows"
            )
        require_user(run, user)
        self._run, self._model, self._user = run, model, user
        self._wait_s = run.job.runtime.wait_s
        self._count = 0
        self._is_answering = threading.Lock()

    def __enter__(self) -> TextProcess:
        """Start the process, and load the model; raises ``RingTuneError`` or ``DeadlineError``."""
        with contextlib.ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="ringtune-")))
            with adapter_of(self._run, self._user) as chosen:
                job = evaluation_job(chosen, None, model=self._model)
                command = command_of("text_process", chosen, job, folder, str(os.getpid()))
                process = LineProcess("the process that writes texts", command, folder / "log", has_input=True)
                self._process = undo.enter_context(process)
                self.ready = Ready(**self._next()["ready"])
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def answer(self, request: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a request, the last of which has ``ended`` or ``refused``.

        Closing the iterator ends the answer, and waits until it has.

        Raises:
            PeerLostError: the process has ended.
            DeadlineError: no event for ``runtime.wait_s`` seconds.
        """
        with self._is_answering:
            self._count = number = self._count + 1
            self._send({"id": number, **request})
            event: Event = {}
            try:
                while not _is_last(event):
                    event = self._next_of(number)
                    yield event
            except (GeneratorExit, KeyboardInterrupt):
                if not _is_last(event):
                    self._send({"stop": number})
                    while not _is_last(self._next_of(number)):
                        pass
                raise

    def _send(self, line: Mapping[str, Any]) -> None:
        try:
            self._process.send(line)
        except OSError as error:
            raise self._lost() from error

    def _next_of(self, number: int) -> Event:
        """Return the next event of an answer; those of one before that a second Ctrl-C left at once are dropped."""
        while (event := self._next())["id"] != number:
            pass
        return event

    def _next(self) -> Event:
        event = self._process.next(
            self._wait_s,
            f"waited {self._wait_s:g} s for the process that writes the text; shorten the text, or raise "
            "runtime.wait_s in the run's job.toml",
        )
        if event is None:
            raise self._lost()
        return event

    def _lost(self) -> RingTuneError:
        ended = PeerLostError("the process that writes texts has ended; start the command again")
        return self._process.error() or ended


def _is_last(event: Event) -> bool:
    return "ended" in event or "refused" in event


def without_oldest(messages: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """Return a conversation without its ``count`` oldest messages behind the system message."""
    head = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return messages[:head] + messages[head + count :]
