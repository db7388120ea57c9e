"""``Run.predict``: predictions of a run's result for rows, and the text sample after a training.

A process with torch computes on this machine, as for ``ringtune predict``. The sample continues the user's prompt
(``train.sample_prompt``) with the trained language model. It never fails a run: without the base model on this machine
a line says why there is no sample.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeAlias

from coordinator.api.arguments import RunLike, folder_of, for_python, reworded
from coordinator.api.output import Table
from coordinator.api.text_process import LineProcess, command_of
from coordinator.client.saved_run import (
    SavedRun,
    adapter_of,
    evaluation_job,
    read_run,
    read_run_file,
    require_user,
    with_data,
)
from coordinator.screen.progress import Progress, WaitNotice
from ringtune.errors import DataError, IntegrityError, RingTuneError, UsageError
from ringtune.job.job import Job
from ringtune.job.rows import account_of, answers_of, input_columns, is_plain_text, list_pictures, task_rows
from ringtune.models.family import (
    CAUSAL_LM,
    CHAT,
    CLASS_TASKS,
    IMAGE_CLASSIFICATION,
    LANGUAGE_TASKS,
    REGRESSION,
    TAGGING,
)
from ringtune.run_control.evaluation import rouge_l
from ringtune.storage.arrow_files import is_arrow
from ringtune.storage.durable import check_writable, put_other_aside, replacing, storage_errors, write_durably
from ringtune.storage.text_files import read_text, resolved
from ringtune.techniques.generation import MAX_ROWS, GenerationSettings
from ringtune.texts import counted, inert, visible


class RowPrediction(NamedTuple):
    """A row and its prediction.

    Attributes:
        row: its columns.
        said: ``predicted`` and further fields of the task.
        columns: of all rows of the file together; empty = those of ``row``.
    """

    row: Mapping[str, Any]
    said: Mapping[str, Any]
    columns: Sequence[str] = ()


class Ring(NamedTuple):
    """Nodes that compute in place of this machine: those of a coordinator, with the time in which a node here joins."""

    coordinator: str
    join_s: float = 60.0
    insecure: bool = False


class Sampling(NamedTuple):
    """How a language model chooses tokens: most new ones, temperature (0 = the likeliest token), and seed."""

    max_new_tokens: int = 50
    temperature: float = 0.0
    seed: int = 0


MAX_NEW_TOKENS: Final = 4096
MAX_TEMPERATURE: Final = 100.0


class CheckedRows(NamedTuple):
    """What was found in a file of rows.

    Attributes:
        notes: sentences on how it was read, and on rows left out.
        columns: of all rows together, in the order in which the file has them; empty where it has none.
        num_texts: rows that a language model continues.
    """

    notes: Sequence[str]
    columns: Sequence[str] = ()
    num_texts: int = 0


def check_request(run: SavedRun, data: Path, how: Sampling, user: str, ring: Ring | None = None) -> CheckedRows:
    """Refuse invalid arguments and rows before anything is started.

    Raises:
        UsageError: the run has no such user, or a number is out of range.
        DataError: there are no rows, or invalid ones: all of them at once.
    """
    require_user(run, user)
    if ring is not None and run.job.model.task not in LANGUAGE_TASKS:
        raise UsageError(
            f"--coordinator writes texts of a language model, this run has model.task = {run.job.model.task!r}; leave "
            "it out, and this machine predicts"
        )
    if not (data.exists() or is_arrow(data)):
        raise DataError(f"{data} is not there; give --data a file with the columns of the run's data.train")
    if not 1 <= how.max_new_tokens <= MAX_NEW_TOKENS:
        raise UsageError(f"max_new_tokens is {how.max_new_tokens}, it has to be in [1, {MAX_NEW_TOKENS}]")
    if not 0 <= how.temperature <= MAX_TEMPERATURE:
        raise UsageError(f"temperature is {how.temperature:g}, it has to be in [0, {MAX_TEMPERATURE:g}]")
    if not 0 <= how.seed < 1 << 31:
        raise UsageError(f"seed is {how.seed}, it has to be at least 0 and below {1 << 31}")
    checked = _check_rows(data, run.job)
    if ring is not None and checked.num_texts > MAX_ROWS:
        raise DataError(
            f"{data} has {checked.num_texts:,} rows, and nodes write at most {MAX_ROWS:,} texts; divide the file"
        )
    return checked


def _check_rows(path: Path, job: Job) -> CheckedRows:
    """Read a file once as the predicting process will, so that all of its problems are reported first."""
    if job.model.task == IMAGE_CLASSIFICATION and not is_arrow(path):
        return CheckedRows(list_pictures(path, has_classes=False).lines_left_out() if path.is_dir() else ())
    if job.model.task == CAUSAL_LM and is_plain_text(path):
        text, note = read_text(path, job.data.encoding)
        lines = text.splitlines()
        blank = sum(not line.strip() for line in lines)
        notes = [note] * bool(note) + [f"{blank:,} blank lines of {path} are left out"] * bool(blank)
        return CheckedRows(notes, num_texts=len(lines) - blank)
    account = account_of(path, job.data, is_own=True)
    usable = sum(1 for _ in task_rows(path, job.model.task, job.data, account, with_targets=False))
    account.check()
    if not usable:
        raise DataError(f"{path} has no rows; give it rows to predict for")
    return CheckedRows([*account.notes, *account.lines_left_out()], account.columns, usable)


def predict_rows(
    run: SavedRun,
    data: Path,
    how: Sampling,
    *,
    model: Path | None = None,
    user: str = "",
    ring: Ring | None = None,
    tell: Callable[[str], object] = str,
) -> Iterator[RowPrediction]:
    """Yield every row of a file with the prediction of a run's result.

    ``tell`` gets sentences on rows that were cut, and on unused settings of the model. Targets may be missing in
    ``data``; ``model`` replaces the job's; ``user`` selects the adapters if each user has their own. With a ``ring`` a
    language model writes there.

    Raises:
        RingTuneError: the error of the predicting process.
        DeadlineError: no prediction for ``runtime.wait_s`` seconds.
    """
    with adapter_of(run, user) as chosen, tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        if ring is not None:
            yield from _texts_of(chosen, data, how, ring, model=model, tell=tell)
            return
        job = evaluation_job(chosen, data, model=model)
        words = [str(resolved(data)), "--max-new-tokens", str(how.max_new_tokens)]
        words += ["--temperature", str(how.temperature), "--seed", str(how.seed)]
        command = command_of("inference", chosen, job, Path(name), *words)
        with LineProcess("predicting", command, Path(name) / "log") as process:
            yield from _read(process, wait_s=job.runtime.wait_s, tell=tell)


def _read(process: LineProcess, *, wait_s: float, tell: Callable[[str], object] = str) -> Iterator[RowPrediction]:
    late = (
        f"waited {wait_s:g} s for the next row of the process that predicts; shorten the rows, or raise "
        "runtime.wait_s in the run's job.toml"
    )
    for line in process.lines(wait_s, late):
        if "told" in line:
            tell(str(line["told"]))
        else:
            yield RowPrediction(row=line["row"], said=line["predicted"])


def _texts_of(
    run: SavedRun, data: Path, how: Sampling, ring: Ring, *, model: Path | None, tell: Callable[[str], object]
) -> Iterator[RowPrediction]:
    """Yield the rows of a file with the texts that the nodes of a coordinator have written."""
    from coordinator.api.evaluation import texts_on_ring

    settings = GenerationSettings(
        rows=MAX_ROWS, max_new_tokens=how.max_new_tokens, temperature=how.temperature, seed=how.seed
    )
    lines = texts_on_ring(
        run, data, settings, ring.coordinator, join_s=ring.join_s, model=model, insecure=ring.insecure
    )
    num_lines = num_cut = 0
    for line in lines:
        num_lines, num_cut = num_lines + 1, num_cut + line["is_cut"]
        yield RowPrediction(row=line["row"], said=line["predicted"])
    if num_cut:
        tell(
            f"{num_cut:,} of {num_lines:,} prompts are longer than the model reads with an answer, or the nodes have "
            "memory for, and were cut at their beginning"
        )


HOW: Final = Sampling(max_new_tokens=40)
"""Settings of the sample: always the likeliest token, so that samples can be compared."""


def show_sample(job: Job, folder: Path, progress: Progress) -> None:
    """Show how the trained language model continues the job's prompt, if it has one, and add that to the report."""
    if not job.train.sample_prompt:
        return
    try:
        sample = _sample(job.train.sample_prompt, folder)
        report = folder / "report.json"
        write_durably(report, (json.dumps({**read_run_file(report), "sample": sample}, indent=1) + "\n").encode())
    except RingTuneError as error:
        progress.note(f"no sample of text: {error}; 'ringtune predict' makes one where the base model is")
        return
    progress.note(f"sample of text, {sample['tokens']} tokens after train.sample_prompt:")
    for line in (sample["prompt"] + sample["text"]).splitlines():
        progress.note(f"  {line}")


def _row_of(text: str, job: Job) -> dict[str, Any]:
    """Make the row of a text: for chat it is the user's message."""
    if job.model.task == CHAT:
        return {"messages": [{"role": "user", "content": text}]}
    return {job.data.text: text}


def _sample(prompt: str, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        run, rows = read_run(folder), Path(name) / "prompt.jsonl"
        rows.write_text(json.dumps(_row_of(prompt, run.job)) + "\n", encoding="utf-8")
        (row,) = predict_rows(run, rows, HOW)
    return {"prompt": prompt, "text": str(row.said["predicted"]), "tokens": int(row.said["tokens"])}


_OF_CLASS = "of_class"
_TITLES: Final = {"rouge_l": "ROUGE-L"}
_MAX_COUNTED = 1000


class JsonWriter:
    """Writes one JSON object a line: the row's columns, then the predicted ones; ``event`` is added if not empty."""

    def __init__(self, file: IO[str], event: str = "") -> None:
        self._file, self._head = file, {"event": event} if event else {}

    def add(self, prediction: RowPrediction) -> None:
        """Write a row; probabilities are an object; raises ``DataError``."""
        # an event may be shown by a terminal
        self._file.write(json.dumps({**self._head, **joined(prediction)}, ensure_ascii=bool(self._head)) + "\n")
        self._file.flush()


class CsvWriter:
    """Writes comma-separated lines after a header; ``file`` is opened with ``newline=""``.

    On a terminal nothing in them is obeyed: other machines may have written them.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file, self._csv = file, csv.writer(file)
        self._safe: Callable[[str], str] = inert if file.isatty() else str
        self._header: list[str] = []

    def add(self, prediction: RowPrediction) -> None:
        """Write a row; it is empty in columns that other rows alone have. Each class has a column with its probability.

        Raises ``DataError``: it already has a column of that name, or its columns are not those of the first row.
        """
        shares = {f"probability_{label}": share for label, share in prediction.said.get(_OF_CLASS, {}).items()}
        line = _joined(
            {**dict.fromkeys(prediction.columns), **prediction.row},
            {**{name: value for name, value in prediction.said.items() if name != _OF_CLASS}, **shares},
        )
        if not self._header:
            self._header = list(line)
            self._csv.writerow(map(self._safe, self._header))
        if line.keys() != set(self._header):
            other = next(iter(line.keys() ^ set(self._header)))
            raise DataError(
                f"rows differ in column {other!r}, which csv can't say; write .jsonl with --save FILE.jsonl"
            )
        self._csv.writerow([self._safe(_cell(line[name])) for name in self._header])
        self._file.flush()


@contextmanager
def writer_to(path: Path, data: Path, tell: Callable[[str], object]) -> Iterator[CsvWriter | JsonWriter]:
    """Yield the writer of a file, which appears at ``path`` only when the context ends without an error.

    An existing file with other content is renamed, because predictions may have been corrected by hand.

    ``data`` is the file of the rows; ``tell`` gets a line about a renamed file.

    Raises:
        UsageError: the name ends in neither .csv nor .jsonl, or the file is that of the rows.
        StorageError: it can't be written.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise UsageError(f"--save {path} ends in {path.suffix!r}; predictions are written as .csv or .jsonl")
    if path.exists() and path.resolve() == data.resolve():
        raise UsageError(f"--save {path} would replace the rows; give it another name")
    check_writable(path)
    with storage_errors(path), replacing(path) as content:
        # a name of a file may have bytes that are no text
        file = io.TextIOWrapper(content, encoding="utf-8", errors="backslashreplace", newline="")
        try:
            yield CsvWriter(file) if suffix == ".csv" else JsonWriter(file)
        finally:
            file.detach()  # flushes; ``replacing`` closes the file
        if aside := put_other_aside(path, content):
            tell(f"the earlier content of {path} is in {aside}")


class Summary:
    """Counts predictions by class or tag, and compares them with the targets of the rows if there are any.

    Words are counted for tagged texts, rows otherwise; for regression the errors are averaged, and for a language model
    ROUGE-L with the texts in the column ``data.answer``.
    """

    def __init__(self, job: Job) -> None:
        has_tags = job.model.task == TAGGING
        self._column = job.data.tags if has_tags else job.data.label if job.model.task in CLASS_TASKS else ""
        self._counted = "words" if has_tags else "rows"
        self._names: Counter[str] = Counter()
        self._rows = self._judged = self._right = 0
        self._number = job.data.label if job.model.task == REGRESSION else ""
        self._reference = job.data.answer if job.model.task == CAUSAL_LM else ""
        self._squares = self._sizes = self._overlaps = 0.0
        self._ended_at_once = 0

    def add(self, prediction: RowPrediction) -> None:
        """Count a row."""
        self._rows += 1
        self._ended_at_once += prediction.said.get("tokens") == 0
        if self._number:
            self._judge(float(prediction.said["predicted"]), prediction.row.get(self._number))
        if self._reference and (references := answers_of(prediction.row.get(self._reference))):
            self._judged += 1
            self._overlaps += rouge_l(str(prediction.said["predicted"]), references)
        if not self._column:
            return
        said, truth = prediction.said["predicted"], prediction.row.get(self._column)
        if not isinstance(said, list):
            self._count(str(said), truth)
            return
        known = truth if isinstance(truth, list) and len(truth) == len(said) else [None] * len(said)
        for name, true in zip(said, known, strict=True):
            if name is not None:
                self._count(name, true)

    def _judge(self, said: float, truth: object) -> None:
        try:
            error = said - float(truth if isinstance(truth, str | int | float) else math.nan)
        except (ValueError, OverflowError):
            return
        if math.isfinite(squares := self._squares + error * error):
            self._judged += 1
            self._squares, self._sizes = squares, self._sizes + abs(error)

    def _count(self, named: str, truth: object) -> None:
        if named in self._names or len(self._names) < _MAX_COUNTED:
            self._names[named] += 1
        if isinstance(truth, str | int) and not isinstance(truth, bool) and str(truth).strip():
            self._judged += 1
            self._right += str(truth) == named

    def to_json(self) -> dict[str, Any]:
        """Return the counts; with targets also ``accuracy``, or ``mse`` and ``mae``, or ``rouge_l``."""
        counts: dict[str, Any] = {"rows": self._rows}
        counts |= {"ended_at_once": self._ended_at_once} if self._ended_at_once else {}
        if self._column:
            counts["tags" if self._counted == "words" else "classes"] = dict(sorted(self._names.items()))
        if self._judged:
            counts |= {"judged": self._judged, **{name: round(mean, 6) for name, mean in self._means().items()}}
        return counts

    def _means(self) -> dict[str, float]:
        """Return the figures of the judged rows or words, by name."""
        sums: dict[str, float] = {"accuracy": self._right}
        if self._number:
            sums = {"mse": self._squares, "mae": self._sizes}
        elif self._reference:
            sums = {"rouge_l": self._overlaps}
        return {name: total / self._judged for name, total in sums.items()}

    def lines(self) -> Iterable[str]:
        """Yield the counts in words."""
        names = ", ".join(f"{count:,} {visible(name)}" for name, count in sorted(self._names.items()))
        yield counted(self._rows, "row") + (f": {names}" if self._column else "")
        if self._ended_at_once:
            yield f"{self._ended_at_once:,} of them got an empty text: the model's first token was that of the end"
        if self._judged:
            means = ", ".join(f"{_TITLES.get(name, name)} {mean:.4f}" for name, mean in self._means().items())
            column = self._number or self._reference or self._column
            yield f"{means} on the {self._judged:,} {self._counted} that have a {column!r} of their own"


def joined(prediction: RowPrediction) -> dict[str, Any]:
    """Return a row's own columns and the predicted ones; probabilities are an object; raises ``DataError``."""
    said = {("probabilities" if name == _OF_CLASS else name): value for name, value in prediction.said.items()}
    return _joined(prediction.row, said)


def _joined(row: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    twice = next((name for name in said if name in row), "")
    if twice:
        raise DataError(f"the rows have a column {twice!r}, which a prediction is called; rename it")
    return {**row, **said}


def _cell(value: Any) -> str:
    """Return text unchanged, nothing for null, lists and objects as JSON."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


_LOG = logging.getLogger(__name__)
Rows: TypeAlias = str | PathLike[str] | Sequence[Mapping[str, Any]] | Sequence[str]
"""A file of rows, the rows themselves, or texts."""


@for_python
def predict(
    run: RunLike,
    data: Rows,
    *,
    save: str | PathLike[str] | None = None,
    model: str | PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    missing: str = "",
    user: str = "",
    max_new_tokens: int = 50,
    temperature: float = 0.0,
    seed: int = 0,
    coordinator: str = "",
    join_s: float = 60.0,
    insecure: bool = False,
    tell: Callable[[str], object] = _LOG.warning,
    take: Callable[[RowPrediction], object] | None = None,
) -> Table:
    """Predict for rows with the adapter or model of a run, as ``ringtune predict`` does; see ``Run.predict``.

    With ``coordinator`` (``host:port``) a language model writes on its nodes, which hold its blocks; the rows and the
    texts stay here, with a node that has ``join_s`` seconds to join. ``insecure``: not encrypted, on other machines.

    ``tell`` gets sentences on rows left out or cut; ``take`` gets each row in place of the returned table.

    Raises ``RingTuneError``: the error of the prediction.
    """
    folder = folder_of(run)
    saved = with_data(read_run(folder), columns or {}, missing, has_references=True)
    how = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    ring = Ring(coordinator, join_s, insecure) if coordinator else None
    base = Path(model) if model is not None else None
    table: list[Mapping[str, Any]] = []
    with _file_of(data, saved.job) as rows:
        checked = check_request(saved, rows, how, user, ring)
        for note in checked.notes:
            tell(note)
        with writer_to(Path(save), rows, tell) if save is not None else nullcontext() as writer:
            every = predict_rows(saved, rows, how, model=base, user=user, ring=ring, tell=tell)
            with WaitNotice(f"loading the model of {folder}"):
                first = list(itertools.islice(every, 1))
            num_found = 0
            for prediction in (each._replace(columns=checked.columns) for each in itertools.chain(first, every)):
                num_found += 1
                if writer is not None:
                    writer.add(prediction)
                if take is not None:
                    take(prediction)
                else:
                    table.append(joined(prediction))
            if ring is not None and num_found != checked.num_texts:
                raise IntegrityError(
                    f"the nodes of {coordinator} have written texts of {num_found:,} of {checked.num_texts:,} rows; "
                    "call it again, with one version on all machines"
                )
    return Table(table)


@contextmanager
def _file_of(data: Rows, job: Job) -> Iterator[Path]:
    """Yield the file of rows; given rows are written to a temporary one, which errors do not name."""
    if isinstance(data, str | PathLike):
        yield Path(data)
        return
    if job.model.task == IMAGE_CLASSIFICATION:
        raise UsageError("rows are a folder of pictures, or an .npz, .parquet or .arrow file; give its path")
    columns = input_columns(job.model.task, job.data)
    takes_texts = list(columns) in (["data.text"], [])
    rows: list[Any] = [_row_of(row, job) if takes_texts and isinstance(row, str) else row for row in data]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        named = ", ".join(f"{name!r}: ..." for name in columns.values() or ["messages"])
        texts = ", texts" if takes_texts else ""
        raise UsageError(f"rows are a file{texts} or mappings, e.g. [{{{named}}}]; give one at least")
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        path = Path(name) / "rows.jsonl"
        try:
            path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
        except (TypeError, ValueError) as error:
            raise UsageError("a row has a value that JSON has no form for; give texts and numbers") from error
        with reworded(lambda text: text.replace(str(path), "the list")):
            yield path
