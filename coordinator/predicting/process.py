"""The process that predicts: started, read line by line, and ended, whatever happens here."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from coordinator.run_folder.saved_run import SavedRun, evaluation_job
from ringtune.errors import DeadlineError, IntegrityError
from ringtune.machine.exit_errors import exit_error

_LINES_AHEAD = 256
_END_S = 10.0
_LOOK_S = 0.2


class Predicted(NamedTuple):
    """A row and what is predicted for it.

    Attributes:
        row: as its file has it.
        said: ``predicted`` and what else the task says.
    """

    row: Mapping[str, Any]
    said: Mapping[str, Any]


class Sampling(NamedTuple):
    """How a language model chooses tokens: most new ones, 0 or the temperature of draws, and their seed."""

    max_new_tokens: int = 50
    temperature: float = 0.0
    seed: int = 0


def predict(
    run: SavedRun, data: Path, how: Sampling, *, model: Path | None, tell: Callable[[str], object]
) -> Iterator[Predicted]:
    """Yield every row of a file with what the result of a run predicts for it.

    Args:
        run: whose adapter or model.
        data: rows, with the columns that the job names, but for those of targets.
        how: for a language model.
        model: folder that replaces the job's.
        tell: gets a sentence on rows that were cut, and on settings of the model that are not used.

    Raises:
        RingTuneError: what went wrong in the process.
        DeadlineError: nothing came for ``runtime.wait_s`` seconds.
    """
    job = evaluation_job(run, data, model=model)
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        (Path(name) / "job.toml").write_text(job.to_toml(), encoding="utf-8")
        options = ["--max-new-tokens", str(how.max_new_tokens), "--temperature", str(how.temperature)]
        words = [str(Path(name) / "job.toml"), str(run.saved.resolve()), str(data.resolve()), *options]
        with _started([*words, "--seed", str(how.seed)], Path(name) / "log") as process:
            yield from _read(process, Path(name) / "log", wait_s=job.runtime.wait_s, tell=tell)


@contextmanager
def _started(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the process; it is gone when the context is left."""
    command = [sys.executable, "-P", "-m", "edge.predicting", *words]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own module
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True, encoding="utf-8"
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(_END_S)
        if process.stdout is not None:
            process.stdout.close()


def _read(
    process: subprocess.Popen[str], log: Path, *, wait_s: float, tell: Callable[[str], object] = str
) -> Iterator[Predicted]:
    """Yield the lines of the process; a thread reads them, a bounded number ahead, so that waiting has an end."""
    lines: queue.Queue[str | None] = queue.Queue(_LINES_AHEAD)
    left = threading.Event()
    if process.stdout is None:
        raise IntegrityError("the process that predicts has no output; please report it")
    reader = threading.Thread(target=_pass_on, args=(process.stdout, lines, left), daemon=True)
    reader.start()
    try:
        while (line := _next(lines, wait_s)) is not None:
            found = json.loads(line)
            if "told" in found:
                tell(str(found["told"]))
            else:
                yield Predicted(row=found["row"], said=found["predicted"])
        if code := process.wait(_END_S):
            raise exit_error("predicting", code, log.read_text(encoding="utf-8")[-4096:], log=log)
    finally:
        left.set()
        process.kill()
        reader.join(_END_S)


def _pass_on(output: IO[str], lines: queue.Queue[str | None], left: threading.Event) -> None:
    """Put every line into the queue, and None at the end; stop where nobody reads any more."""
    with contextlib.suppress(ValueError):  # the output was closed meanwhile
        for line in output:
            if not _put(line, lines, left):
                return
    _put(None, lines, left)


def _put(line: str | None, lines: queue.Queue[str | None], left: threading.Event) -> bool:
    while not left.is_set():
        with contextlib.suppress(queue.Full):
            lines.put(line, timeout=_LOOK_S)
            return True
    return False


def _next(lines: queue.Queue[str | None], wait_s: float) -> str | None:
    try:
        return lines.get(timeout=wait_s)
    except queue.Empty as error:
        raise DeadlineError(
            f"waited {wait_s:g} s for the next row of the process that predicts; shorten the rows, or raise "
            "runtime.wait_s in the run's job.toml"
        ) from error
