"""Reading ``job.toml`` strictly: whatever is misspelt, mistyped or not built yet is refused by name."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path

from ringtune.errors import JobError
from ringtune.job_values import Job
from ringtune.strict import read_dataclass

# Sections and keys of the design that no code carries out yet. Accepting them silently would be a lie.
_LATER_SECTIONS = ("memory", "hift", "operations", "offload")
_LATER_KEYS = {
    "data.question": "question answering",
    "data.context": "question answering",
    "data.answer": "question answering",
    "data.image": "image classification",
    "unfreeze.at": "unfreezing at given steps",
    "unfreeze.auto": "automatic unfreezing",
}
_LATER_VALUES = {
    "model.task": ("question-answering", "causal-lm", "image-classification"),
    "train.method": ("pipeadapter", "hift"),
}
_CLIP_KEYS = ("clip_norm", "max_grad_norm", "clip_grad_norm", "gradient_clipping")


def load_job(path: str | Path) -> Job:
    """Read a job file; its relative paths are relative to the file's folder and become absolute.

    Raises:
        JobError: the file is not there, not TOML, or breaks a rule; names file and key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(f"can't read the job file {path}: {reason}") from error
    return with_absolute_paths(parse_job(text, source=str(path)), path.parent)


def parse_job(text: str, *, source: str) -> Job:
    """Read the text of a job file.

    Args:
        text: TOML.
        source: where it came from, for messages.

    Raises:
        JobError: not TOML, an unknown key, a wrong type, out of range, or not supported yet.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{source}: not valid TOML: {error}") from error
    try:
        refuse_unsupported(tables)
        return read_dataclass(Job, tables, where="", error=JobError)
    except JobError as error:
        raise JobError(f"{source}: {error}") from error


def with_absolute_paths(job: Job, folder: Path) -> Job:
    """The job with ``model.path``, ``data.train`` and ``data.eval`` made absolute, relative to ``folder``."""
    model = dataclasses.replace(job.model, path=_absolute(job.model.path, folder))
    train, evaluate = _absolute(job.data.train, folder), _absolute(job.data.eval, folder)
    return dataclasses.replace(job, model=model, data=dataclasses.replace(job.data, train=train, eval=evaluate))


def refuse_unsupported(tables: Mapping[str, object]) -> None:
    """Refuse by name what the design has and this version does not carry out.

    Raises:
        JobError: names the key and what to do.
    """
    for name in _LATER_SECTIONS:
        if name in tables:
            raise JobError(f"section [{name}] is not supported yet; remove it")
    for section, keys in tables.items():
        if isinstance(keys, Mapping):
            for key, value in keys.items():
                _refuse_key(f"{section}.{key}", value)


def _refuse_key(name: str, value: object) -> None:
    section, _, key = name.partition(".")
    if section == "train" and key in _CLIP_KEYS:
        raise JobError(
            f"{name} is not supported: clipping by the global norm needs a sum over the ring before each update; "
            "remove it"
        )
    if name in _LATER_KEYS:
        raise JobError(f"{name} is not supported yet ({_LATER_KEYS[name]}); remove it")
    if value in _LATER_VALUES.get(name, ()):
        raise JobError(f"{name} = {value!r} is not supported yet; leave {name} out or choose another")


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve()) if path else path
