"""Arguments of commands and functions: jobs with changes, runs by folder, errors that name Python arguments.

Pickled files of ``adapter.from`` are read by ``edge.model.pickled`` in a process of its own: torch is not loaded here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeAlias, TypeVar, cast

from ringtune.errors import InvalidInputError, JobError, RingTuneError, UsageError
from ringtune.job.job import Job, load_job, sections_of, with_absolute_paths, with_told_changes
from ringtune.models.family import CAUSAL_LM
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.techniques.initial_adapter import INITIAL_FILE, initial_values, with_digest
from ringtune.transport.credentials import process_credentials, using_credentials

P = ParamSpec("P")
R = TypeVar("R")


def parse_changes(changes: Iterable[str]) -> dict[str, object]:
    """Split each ``KEY=VALUE`` into a dotted key and its value; raises ``UsageError``."""
    values: dict[str, object] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key.count(".") != 1:
            raise UsageError(f"--set {change!r} is not SECTION.KEY=VALUE, e.g. train.seed=1")
        values[key.strip()] = _value(text.strip())
    return values


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (RecursionError, ValueError) as error:
        raise UsageError(f"--set has a value of {len(text):,} characters that is no text and no number") from error


JobLike: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Job | None
"""A job file, its sections as a mapping, a ``Job``, or None if all keys are given as keywords."""


def job_here(job: JobLike, keys: Mapping[str, object], run: Path | None = None) -> Job:
    """Read a job that will run, with arguments as for ``read_job``.

    A model id of a hub becomes a local folder; ``adapter.from`` is read, and its digest filled in, and
    ``data.append_eos``: where a run is resumed, with its folder ``run``, as that run has them.

    Raises:
        JobError, UsageError: ``generation.loss`` is false; as ``read_job`` and ``with_initial_digest``.
        ConnectionFailedError: the model is not in the cache and can't be fetched.
    """
    from coordinator.client.hub import with_local_model

    read = read_job(job, keys)
    if read.generation is not None and not read.generation.loss:
        raise JobError(
            "generation.loss = false is what 'ringtune predict' sets: all rows are prompts then, and none is left to "
            "train on; remove it"
        )
    return with_initial_digest(with_local_model(_with_ends(read, run)), run)


def _with_ends(job: Job, run: Path | None) -> Job:
    """Fill in ``data.append_eos``: true, or as the run in the folder has it; one of before the key stays without."""
    if job.model.task != CAUSAL_LM or job.data.append_eos is not None:
        return job
    began = load_job(run / "job.toml") if run is not None and (run / "job.toml").is_file() else None
    ends = began.data.append_eos if began is not None else True
    return dataclasses.replace(job, data=dataclasses.replace(job.data, append_eos=ends))


def read_job(job: JobLike, keys: Mapping[str, object]) -> Job:
    """Make a job from a file or sections, and keywords, which take precedence.

    Args:
        job: a file (its paths are relative to its folder), or sections as a mapping.
        keys: ``train__rounds``, or ``train.rounds`` as in ``--set``; relative paths are relative to the current folder.

    Raises:
        JobError: the job is invalid; names the key.
        UsageError: a keyword is neither an option nor a key of a job, or there is no job.
    """
    overrides = {_dotted(name): _plain(value) for name, value in keys.items()}
    if job is None and not overrides:
        raise UsageError("give a job: a file, a mapping of its sections, or keywords such as model__path='DIR'")
    if job is None:
        job = {}
    if isinstance(job, Mapping):
        return with_absolute_paths(Job.from_tables(with_told_changes(_tables(job), overrides)), Path.cwd())
    if isinstance(job, Job):
        return with_absolute_paths(job.with_overrides(overrides), Path.cwd())
    return load_job(Path(job), overrides)


def _dotted(keyword: str) -> str:
    """Return the job key of a keyword: ``train.rounds`` for ``train__rounds`` and for ``train.rounds``."""
    if "." in keyword:
        return keyword
    section, underscores, key = keyword.partition("__")
    if underscores and section and key:
        return f"{section}.{key}"
    near = difflib.get_close_matches(keyword, [name.partition("__")[2] for name in _keywords()], n=1)
    named = next((name for name in _keywords() if near and name.endswith(f"__{near[0]}")), "train__rounds")
    raise UsageError(f"there is no option {keyword!r}; a key of the job is written SECTION__KEY, e.g. {named}")


def _keywords() -> list[str]:
    return [f"{section}__{key}" for section, keys in sections_of(Job).items() for key in sorted(keys)]


def _tables(job: Mapping[str, Any]) -> dict[str, object]:
    """Return the sections of a mapping with plain values."""
    sections: dict[str, object] = {}
    for section, keys in job.items():
        if not isinstance(keys, Mapping):
            raise JobError(f"{section} has to be a section, e.g. {{'train': {{'rounds': 5}}}}")
        sections[str(section)] = {str(key): _plain(value) for key, value in keys.items()}
    return sections


def _plain(value: object) -> object:
    """Return the value in the types of a TOML reader: a path as text, a tuple as a list."""
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value


_OPTION: Final = re.compile(r"(?<![\w-])--([a-z][a-z-]*)(?: (?=[A-Z0-9'])|=)?")
_COMMAND: Final = "ringtune "


class HasFolder(Protocol):
    """An object with the folder of a run, as ``Run``."""

    @property
    def folder(self) -> Path:
        """The folder."""


RunLike: TypeAlias = HasFolder | str | PathLike[str]


def folder_of(run: RunLike) -> Path:
    """Return the folder of a run, or the given path."""
    return Path(run) if isinstance(run, str | PathLike) else run.folder


@contextmanager
def reworded(words: Callable[[str], str]) -> Iterator[None]:
    """Apply ``words`` to the messages of errors raised in the block."""
    try:
        yield
    except RingTuneError as error:
        error.args = tuple(words(part) if isinstance(part, str) else part for part in error.args)
        raise


def in_python(text: str) -> str:
    """Reword a message for Python: ``--data FILE`` is ``data=FILE``, ``--column`` an entry of ``columns``.

    A command line in it stays unchanged.
    """
    before, command, rest = text.partition(_COMMAND)
    before = before.replace("--detach", "wait=False")
    before = re.sub(r"--column (\w+)=([\w.]+)", r"columns={'\1': '\2'}", before)
    return _OPTION.sub(lambda option: option[1].replace("-", "_") + "=", before) + command + rest


def for_python(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function of the Python API: its errors name arguments, and it speaks with the user's identity."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with reworded(in_python), using_credentials(process_credentials()):
            return function(*args, **kwargs)

    return called


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function without the wrapper of ``for_python``, for commands: errors name options."""
    return cast(Callable[P, R], inspect.unwrap(function))


_READ_S: Final = 300.0


def with_initial_digest(job: Job, run: Path | None = None) -> Job:
    """Fill in ``adapter.sha256`` of a job with ``adapter.from``; one that is given is checked when the run begins.

    ``run`` is the folder of a run to resume: if that began from the same folder, its values count, as they were then.

    Raises ``RingTuneError``: as ``initial_values``.
    """
    if not job.adapter.from_ or job.adapter.sha256:
        return job
    began = load_job(run / "job.toml").adapter if run is not None and (run / "job.toml").is_file() else job.adapter
    is_same = began.from_ == job.adapter.from_
    changed: Job = with_digest(job, (is_same and began.sha256) or initial_values(job, unpickled).sha256())
    return changed


def initial_file(job: Job, run: Path | None) -> Pieces | None:
    """Return the file of initial values of a job with a digest: of a resumed run's folder, or of ``adapter.from``.

    None without ``adapter.from``.

    Raises:
        JobError: the folder has other values than ``adapter.sha256`` says.
        RingTuneError: as ``initial_values``.
    """
    if not job.adapter.from_:
        return None
    kept = run / INITIAL_FILE if run is not None else None
    if kept is not None and kept.is_file() and FilePieces(kept).sha256() == job.adapter.sha256:
        return FilePieces(kept)
    content = initial_values(job, unpickled)
    with_digest(job, content.sha256())
    return content


def unpickled(paths: Sequence[Path]) -> Sequence[Pieces]:
    """Convert pickled files of tensors to safetensors, each held in memory.

    Raises ``InvalidInputError``: one has anything but tensors, or torch is not installed.
    """
    return _unpickled(tuple((path, path.stat().st_mtime_ns) for path in paths))


@functools.lru_cache(maxsize=2)
def _unpickled(changed_ns: tuple[tuple[Path, int], ...]) -> Sequence[Pieces]:
    named = " and ".join(str(path) for path, _ in changed_ns)
    with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
        targets = [(path, Path(folder) / f"{number}.safetensors") for number, (path, _) in enumerate(changed_ns)]
        command = [sys.executable, "-P", "-m", "edge.model.pickled", *(str(path) for pair in targets for path in pair)]
        try:
            reader = subprocess.run(command, capture_output=True, text=True, timeout=_READ_S, check=False)  # noqa: S603 - our own module
        except subprocess.TimeoutExpired as error:
            raise InvalidInputError(
                f"{named}: not read within {_READ_S:g} s; save the adapter with use_safetensors=True"
            ) from error
        if reader.returncode:
            reason = (reader.stderr.strip().splitlines() or ["its reader ended without a word"])[-1]
            raise InvalidInputError(
                f"{named} can't be read: {reason.removeprefix('error: ')}; save the adapter with use_safetensors=True"
            )
        return [Pieces.of(target.read_bytes()) for _, target in targets]
