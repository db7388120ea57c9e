"""The text of a job file to begin with: the common keys of a task, each with what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtune.jobs.described import KeyFacts, SectionFacts, describe_job, toml_value
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.texts import printable

_COLUMNS = {
    CLASSIFICATION: ("data.text", "data.label"),
    QUESTION_ANSWERING: ("data.question", "data.context", "data.answer"),
    REGRESSION: ("data.text", "data.label"),
    TAGGING: ("data.words", "data.tags"),
    CAUSAL_LM: ("data.text",),
    IMAGE_CLASSIFICATION: ("data.image", "data.label"),
}
_COMMON = (
    "model.path",
    "model.task",
    "data.train",
    "data.eval",
    "adapter.config",
    "train.method",
    "train.learning_rate",
    "train.batch_size",
    "train.microbatches",
    "train.max_length",
    "train.rounds",
    "train.checkpoint_every",
    "train.seed",
    "unfreeze.every_steps",
    "wire.dtype",
    "operations.policy",
)
_OF_ANOTHER_METHOD = ("hift.group_size", "hift.order", "hift.state")
"""Common keys of a method that the template has not: they stand in it as comments."""

_WIDTH = 112
_INSTEAD = {"train.max_steps": "train.rounds", "data.held_out": "data.eval"}
"""A chosen key -> the common key that it takes the place of."""


class Chosen(NamedTuple):
    """A value that was chosen for a key, and why; an empty reason is none that needs words."""

    value: object
    reason: str


def job_template(
    task: str,
    *,
    model: str,
    train: str,
    evaluate: str,
    chosen: Mapping[str, Chosen] | None = None,
    saw: Sequence[str] = (),
) -> str:
    """Write a job of a task: ``parse_job`` reads it, and every key in it may be changed.

    Args:
        task: one of ``TASKS``.
        model: folder of the base model.
        train: file of rows.
        evaluate: the same for evaluation; empty = none.
        chosen: further values by key, with their reasons.
        saw: lines about what the choices follow from.
    """
    chosen = chosen or {}
    given: dict[str, object] = {"model.path": model, "model.task": task, "data.train": train, "data.eval": evaluate}
    given |= {"train.rounds": 5, "unfreeze.every_steps": 40} | {name: found.value for name, found in chosen.items()}
    reasons = {name: found.reason for name, found in chosen.items() if found.reason}
    left_out = {"train.max_length"} if task == IMAGE_CLASSIFICATION else set()
    left_out |= {_INSTEAD[name] for name in chosen if name in _INSTEAD}
    wanted = [name for name in (*_COMMON, *_COLUMNS[task], *chosen) if name not in left_out]
    lines = [f"# A job for {task}. A key that is left out has its default; docs/job.md has all keys."]
    lines += [line for text in saw for line in _comment(text)]
    for section in describe_job():
        keys = [key for key in section.keys if key.name in wanted]
        if keys:
            lines += ["", *_section_lines(section)]
            lines += [line for key in keys for line in _key_lines(key, given, reasons.get(key.name, ""))]
        others = [key for key in section.keys if key.name in _OF_ANOTHER_METHOD]
        if others:
            lines += ["", *_commented(section, others)]
    return "\n".join(lines) + "\n"


def _section_lines(section: SectionFacts) -> list[str]:
    return [f"[{section.name}]  # {section.meaning[:1].lower()}{section.meaning[1:].rstrip('.')}"]


def _commented(section: SectionFacts, keys: Sequence[KeyFacts]) -> list[str]:
    """The lines of a section that has to take the place of another one, as comments, with its method first."""
    method = (
        f'# With method = "{section.name}", which trains all parameters and no adapter, '
        "remove [unfreeze], config and keep_best:"
    )
    values = (f"#   {key.name.partition('.')[2]} = {key.default}  # {key.allowed}" for key in keys)
    return [method, f"#   [{section.name}]", *values]


def _key_lines(key: KeyFacts, given: dict[str, object], reason: str) -> list[str]:
    """The lines of comment above a key, then the key; the reason of a value is a comment of its own."""
    value = toml_value(given[key.name]) if key.name in given else key.default
    about = _comment(f"{key.meaning} ({key.allowed})" if key.allowed else key.meaning)
    why = _comment(f"Chosen: {reason}.") if reason else []
    return [*about, *why, f"{key.name.partition('.')[2]} = {value}"]


def _comment(text: str) -> list[str]:
    """Break a text into lines of comment; what could end a line becomes a space."""
    lines, line = [], "#"
    for word in printable(text).split():
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line]
