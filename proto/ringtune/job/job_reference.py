"""Reference of job keys: type, default, range and meaning; and the template of a job file.

The meaning of a key is read from the docstring of its section, its range from the type of its field.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import tomli_w

from ringtune.job.job import Job, section_class
from ringtune.models.family import (
    CAUSAL_LM,
    CHAT,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    LANGUAGE_TASKS,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.storage.strict import field_rules, key_of
from ringtune.texts import printable

_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyFacts:
    """One key of a job.

    Attributes:
        name: dotted, such as ``train.seed``.
        default: as TOML; empty = required, or computed.
        meaning: sentences from the docstring of the section.
    """

    name: str
    kind: str
    default: str
    allowed: str
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionFacts:
    """One section of a job, with its sentence and its keys."""

    name: str
    meaning: str
    keys: tuple[KeyFacts, ...]


@functools.cache
def describe_job() -> tuple[SectionFacts, ...]:
    """Describe all sections in the order of ``Job``."""
    hints = typing.get_type_hints(Job)
    return tuple(_section(field.name, hints[field.name]) for field in dataclasses.fields(Job))


def _section(name: str, hint: Any) -> SectionFacts:
    cls = section_class(hint)
    text = inspect.getdoc(cls) or ""
    lines = text.partition("Attributes:\n")[2].split("\n\n")[0]
    attributes = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", lines, re.MULTILINE)
    meanings = {name: _sentence(" ".join(said.split())) for name, said in attributes}
    hints, rules = typing.get_type_hints(cls), field_rules(cls)
    keys = tuple(
        KeyFacts(
            name=f"{name}.{key_of(field.name)}",
            kind=_kind(hints[field.name]),
            default="" if field.default in (dataclasses.MISSING, None) else toml_value(field.default),
            allowed=rules[field.name][-1].text if field.name in rules else "",
            meaning=meanings[field.name],
        )
        for field in dataclasses.fields(cls)
    )
    return SectionFacts(name=name, meaning=_sentence(text.split("\n\n")[0].partition(":")[2]), keys=keys)


def toml_value(value: Any) -> str:
    """Write a value as TOML; a tuple becomes a list."""
    return tomli_w.dumps({"key": list(value) if isinstance(value, tuple) else value}).partition(" = ")[2].strip()


def _sentence(text: str) -> str:
    text = text.strip().replace("``", "`")
    return text[:1].upper() + text[1:]


def _kind(hint: Any) -> str:
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_kind(arg) for arg in args)
    if typing.get_origin(hint) is dict:
        return f"table of {_PLURALS[args[1]]}"
    return f"list of {_PLURALS[args[0]]}" if typing.get_origin(hint) is tuple else _KINDS[hint]


_COLUMNS = {
    CLASSIFICATION: ("data.text", "data.label"),
    QUESTION_ANSWERING: ("data.question", "data.context", "data.answer"),
    REGRESSION: ("data.text", "data.label"),
    TAGGING: ("data.words", "data.tags"),
    CAUSAL_LM: ("data.text",),
    CHAT: (),
    IMAGE_CLASSIFICATION: ("data.image", "data.label"),
}
_COMMON = (
    *("model.path", "model.task", "data.train", "data.eval", "adapter.config", "train.method", "train.learning_rate"),
    *("train.batch_size", "train.microbatches", "train.max_length", "train.rounds", "train.checkpoint_every"),
    *("train.seed", "unfreeze.every_steps", "wire.dtype", "operations.policy"),
)
_OF_ANOTHER_METHOD = ("hift.group_size", "hift.order", "hift.state")
"""Keys of method hift, which the template lists as comments."""

_WRAPPER: Final = textwrap.TextWrapper(
    width=112, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
)
_INSTEAD = {"train.max_steps": "train.rounds", "data.held_out": "data.eval"}
"""Chosen key -> common key that is left out for it."""


class ChosenValue(NamedTuple):
    """A value chosen for a key, and the reason; an empty reason is not written."""

    value: object
    reason: str


LANGUAGE_ADAPTER: Final = {"adapter.config": ChosenValue("lora", "usual for language models; PEFT has it")}
"""The adapter of a new job for one of ``LANGUAGE_TASKS``."""


def job_template(
    task: str,
    *,
    model: str,
    train: str,
    evaluate: str,
    chosen: Mapping[str, ChosenValue] | None = None,
    saw: Sequence[str] = (),
) -> str:
    """Write a job file with comments for a task; ``parse_job`` reads it.

    ``chosen`` are further values by key, with their reasons; ``saw`` are the facts behind them, written at the top.
    """
    chosen = {**(LANGUAGE_ADAPTER if task in LANGUAGE_TASKS else {}), **(chosen or {})}
    given: dict[str, object] = {"model.path": model, "model.task": task, "data.train": train, "data.eval": evaluate}
    given |= {"train.rounds": 5, "unfreeze.every_steps": 40} | {name: choice.value for name, choice in chosen.items()}
    reasons = {name: choice.reason for name, choice in chosen.items() if choice.reason}
    left_out = {"train.max_length"} if task == IMAGE_CLASSIFICATION else set()
    left_out |= {_INSTEAD[name] for name in chosen if name in _INSTEAD}
    names = [name for name in (*_COMMON, *_COLUMNS[task], *chosen) if name not in left_out]
    lines = [f"# A job for {task}. A key that is left out has its default; docs/job.md has all keys."]
    lines += [line for text in saw for line in _comment(text)]
    for section in describe_job():
        keys = [key for key in section.keys if key.name in names]
        if keys:
            lines += ["", f"[{section.name}]  # {section.meaning[:1].lower()}{section.meaning[1:].rstrip('.')}"]
            lines += [line for key in keys for line in _key_lines(key, given, reasons.get(key.name, ""))]
        others = [key for key in section.keys if key.name in _OF_ANOTHER_METHOD]
        if others:
            method = (
                f'# With method = "{section.name}", which trains all parameters and no adapter, '
                "remove [unfreeze], config and keep_best:"
            )
            values = (f"#   {key.name.partition('.')[2]} = {key.default}  # {key.allowed}" for key in others)
            lines += ["", method, f"#   [{section.name}]", *values]
    return "\n".join(lines) + "\n"


def _key_lines(key: KeyFacts, given: dict[str, object], reason: str) -> list[str]:
    """Write a key below comments with its meaning and the reason of its value."""
    value = toml_value(given[key.name]) if key.name in given else key.default
    about = _comment(f"{key.meaning} ({key.allowed})" if key.allowed else key.meaning)
    why = _comment(f"Chosen: {reason}.") if reason else []
    return [*about, *why, f"{key.name.partition('.')[2]} = {value}"]


def _comment(text: str) -> list[str]:
    """Wrap a text into comment lines; line ends and other white space become spaces."""
    return _WRAPPER.wrap(" ".join(printable(text).split()))
