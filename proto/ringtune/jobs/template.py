"""The text of a job file to begin with: the common keys of a task, each with what it does."""

from __future__ import annotations

from collections.abc import Sequence

from ringtune.jobs.described import KeyFacts, SectionFacts, describe_job, toml_value
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION, IMAGE_CLASSIFICATION, QUESTION_ANSWERING

_COLUMNS = {
    CLASSIFICATION: ("data.text", "data.label"),
    QUESTION_ANSWERING: ("data.question", "data.context", "data.answer"),
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


def job_template(task: str, *, model: str, train: str, evaluate: str) -> str:
    """Write a job of a task: ``parse_job`` reads it, and every key in it may be changed.

    Args:
        task: one of ``TASKS``.
        model: folder of the base model.
        train: file of rows.
        evaluate: the same for evaluation; empty = none.
    """
    given: dict[str, object] = {"model.path": model, "model.task": task, "data.train": train, "data.eval": evaluate}
    given |= {"train.rounds": 5, "unfreeze.every_steps": 40}
    left_out = {"train.max_length"} if task == IMAGE_CLASSIFICATION else set()
    wanted = [name for name in (*_COMMON, *_COLUMNS[task]) if name not in left_out]
    lines = [f"# A job for {task}. A key that is left out has its default; docs/job.md has all keys."]
    for section in describe_job():
        keys = [key for key in section.keys if key.name in wanted]
        if keys:
            lines += ["", *_section_lines(section), *(line for key in keys for line in _key_lines(key, given))]
        others = [key for key in section.keys if key.name in _OF_ANOTHER_METHOD]
        if others:
            lines += ["", *_commented(section, others)]
    return "\n".join(lines) + "\n"


def _section_lines(section: SectionFacts) -> list[str]:
    return [f"[{section.name}]  # {section.meaning[:1].lower()}{section.meaning[1:].rstrip('.')}"]


def _commented(section: SectionFacts, keys: Sequence[KeyFacts]) -> list[str]:
    """The lines of a section that has to take the place of another one, as comments, with its method first."""
    method = (
        f'# With method = "{section.name}", which trains every parameter and no adapter, remove [unfreeze] and config:'
    )
    values = (f"#   {key.name.partition('.')[2]} = {key.default}  # {key.allowed}" for key in keys)
    return [method, f"#   [{section.name}]", *values]


def _key_lines(key: KeyFacts, given: dict[str, object]) -> list[str]:
    """The lines of comment above a key, then the key."""
    value = toml_value(given[key.name]) if key.name in given else key.default
    words = f"{key.meaning} ({key.allowed})".split() if key.allowed else key.meaning.split()
    lines, line = [], "#"
    for word in words:
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line, f"{key.name.partition('.')[2]} = {value}"]
