"""A case of wrong input: what is prepared, what is typed, and what the answer has to be."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

BASE_JOB = """\
[model]
path = "model"
[data]
train = "train.csv"
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

    def job(self, *changes: tuple[str, str]) -> Path:
        """Write ``job.toml``: the base with some texts replaced by others."""
        text = BASE_JOB
        for old, new in changes:
            if old not in text:
                raise ValueError(f"{old!r} is not in the base job")
            text = text.replace(old, new)
        return self.write("job.toml", text)

    def own_model(self) -> Path:
        """Make the model a folder of links to files, so that one of them can be replaced."""
        shared = (self.folder / "model").resolve()
        (self.folder / "model").unlink()
        (self.folder / "model").mkdir()
        for path in shared.iterdir():
            (self.folder / "model" / path.name).symlink_to(path)
        return self.folder / "model"


def nothing(place: Place) -> None:
    """Prepare nothing more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Wrong input and its answer.

    Attributes:
        name: unique.
        arguments: what is typed after ``ringtune``; ``{run}`` is the finished run, ``{coordinator}`` and ``{node}`` are
            addresses.
        code: exit code.
        says: texts that the error line has, whatever the case of their letters.
        prepare: writes what is wrong.
        leaves: names that may be new in the folder afterwards.
        without: packages that are not installed where the command runs.
        is_process: whether the command needs an interpreter of its own.
    """

    name: str
    arguments: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    prepare: Callable[[Place], object] = field(default=nothing)
    leaves: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    is_process: bool = False


PLAN = ("plan", "job.toml", "--assume", "2")
TRAIN = ("train", "job.toml", "--local", "1", "--out", "out")


def text_case(name: str, text: str | bytes, *says: str) -> Case:
    """A job file with this text, planned."""
    return Case(name=name, arguments=PLAN, code=5, says=says, prepare=lambda place: place.write("job.toml", text))


def job_case(name: str, old: str, new: str, *says: str, code: int = 5) -> Case:
    """The base job in which a text is replaced."""
    return Case(name=name, arguments=PLAN, code=code, says=says, prepare=lambda place: place.job((old, new)))


def set_case(key: str, value: str, *says: str) -> Case:
    """A right job and ``--set KEY=VALUE``."""
    return Case(name=f"set {key}={value}"[:90], arguments=(*PLAN, "--set", f"{key}={value}"), code=5, says=(key, *says))


def command_case(line: str, code: int, *says: str) -> Case:
    """A command line, as it is typed after ``ringtune``; it is the case's name too."""
    return Case(name=line, arguments=tuple(shlex.split(line)), code=code, says=says)
