"""The process that continues texts and answers conversations, for ``ringtune chat`` and ``ringtune serve``.

It has torch and the model (``edge.runtime.text_process``, which describes its lines); this side has neither. One
request is answered at a time. Whoever leaves an answer early ends it at its next token.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple

from coordinator.api.user_adapters import adapter_of, require_user
from coordinator.client.saved_run import SavedRun, evaluation_job
from ringtune.errors import DeadlineError, PeerLostError, UsageError
from ringtune.machine.process import exit_error
from ringtune.models.family import LANGUAGE_TASKS

Event = Mapping[str, Any]
_END_S: Final = 10.0


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
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._count = 0
        self._is_answering = threading.Lock()

    def __enter__(self) -> TextProcess:
        """Start the process, and load the model.

        Raises:
            RingTuneError: the error of the process.
            DeadlineError: the model was not loaded within ``runtime.wait_s`` seconds.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="ringtune-")
        job_file = Path(self._folder.name) / "job.toml"
        self._log = Path(self._folder.name) / "log"
        try:
            with adapter_of(self._run, self._user) as chosen:
                job_file.write_text(evaluation_job(chosen, None, model=self._model).to_toml(), encoding="utf-8")
                self._start(job_file, chosen.saved.resolve())
                self.ready = Ready(**self._next()["ready"])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self, job_file: Path, saved: Path) -> None:
        with self._log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command_of(job_file, saved),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C ends an answer, not the process
            )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="texts", daemon=True)
        self._reader.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        process = getattr(self, "_process", None)
        if process is not None:
            process.kill()
            process.wait(_END_S)
            self._reader.join(_END_S)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # it has not read all
                    pipe.close()
        self._folder.cleanup()

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
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(json.dumps(line) + "\n")
                pipe.flush()
        except OSError as error:
            raise self._lost() from error

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._lines.put(line)
        self._lines.put(None)

    def _next_of(self, number: int) -> Event:
        """Return the next event of an answer; those of one before that a second Ctrl-C left at once are dropped."""
        while (event := self._next())["id"] != number:
            pass
        return event

    def _next(self) -> Event:
        try:
            line = self._lines.get(timeout=self._wait_s)
        except queue.Empty as error:
            raise DeadlineError(
                f"waited {self._wait_s:g} s for the process that writes the text; shorten the text, or raise "
                "runtime.wait_s in the run's job.toml"
            ) from error
        if line is None:
            self._lines.put(None)  # for whoever asks next
            raise self._lost()
        found: Event = json.loads(line)
        return found

    def _lost(self) -> Exception:
        code = self._process.wait(_END_S)
        output = self._log.read_text(encoding="utf-8", errors="replace")[-4096:]
        return (
            exit_error("the process that writes texts", code, output, log=self._log)
            if code
            else PeerLostError("the process that writes texts has ended; start the command again")
        )


def command_of(job_file: Path, saved: Path) -> list[str]:
    """Return the command line of the process."""
    return [sys.executable, "-P", "-m", "edge.runtime.text_process", str(job_file), str(saved), str(os.getpid())]


def _is_last(event: Event) -> bool:
    return "ended" in event or "refused" in event


def without_oldest(messages: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """Return a conversation without its ``count`` oldest messages behind the system message."""
    head = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
    return messages[:head] + messages[head + count :]
