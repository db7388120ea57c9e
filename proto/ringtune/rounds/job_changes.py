"""What of a job its result depends on, and in what two jobs differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from ringtune.files.digests import json_digest
from ringtune.files.text_files import AUTO
from ringtune.jobs.job import CacheSettings, Job, OffloadSettings, OperationsSettings
from ringtune.jobs.sections import ERROR
from ringtune.schedule.owner_turns import EQUAL
from ringtune.schedule.slice_policy import NONE

_OF_NO_RESULT: Final = ("runtime", "placement", "recovery")
_KEYS_OF_NO_RESULT: Final = ("train.sample_prompt",)
_MOST_TOLD = 5
_MOST_CHARACTERS = 200
_LATER: Final = {
    "train.turns": EQUAL,
    "data.user": "",
    "data.held_out": 0.0,
    "data.text_pair": "",
    "data.words": "words",
    "data.tags": "tags",
    "data.missing": ERROR,
    "data.encoding": AUTO,
    "train.patience_evals": 0,
    "train.keep_best": False,
    **{f"operations.{name}": value for name, value in dataclasses.asdict(OperationsSettings()).items()},
    "memory.activations": NONE,
    **{f"offload.{name}": value for name, value in dataclasses.asdict(OffloadSettings()).items()},
    **{f"cache.{name}": value for name, value in dataclasses.asdict(CacheSettings()).items()},
}
"""Keys that came later, each with the value that stands for what a run did before."""


def job_digest(job: Job) -> str:
    """SHA-256 of everything in a job that can change its result: all but how it is carried out.

    A key that versions before did not have is left out where it says what these did, so that digests last.
    """
    keys = _result_keys(job)
    return json_digest({name: value for name, value in keys.items() if name not in _LATER or value != _LATER[name]})


def changed_keys(before: Job, now: Job) -> tuple[str, ...]:
    """The dotted keys in which two jobs differ, sorted; ``[runtime]`` and ``[placement]`` do not count."""
    old, new = _result_keys(before), _result_keys(now)
    names = sorted(old.keys() | new.keys())
    return tuple(name for name in names if old.get(name) != new.get(name))


def describe_changes(before: Job, now: Job, *, but: Collection[str] = ()) -> str:
    """Describe in which keys two jobs differ, five at most, with both values; those of ``but`` may differ.

    Example: ``train.rounds was 2, now 3; train.seed was 0, now 1``.
    """
    old, new = _result_keys(before), _result_keys(now)
    names = [name for name in changed_keys(before, now) if name not in but]
    told = [f"{name} was {_value(old, name)}, now {_value(new, name)}" for name in names[:_MOST_TOLD]]
    return "; ".join(told) + (f"; and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else "")


def _value(keys: Mapping[str, object], name: str) -> str:
    said = repr(keys[name]) if name in keys else "not set"
    return said if len(said) <= _MOST_CHARACTERS else f"{said[:_MOST_CHARACTERS]}…"


def _result_keys(job: Job) -> dict[str, object]:
    tables = job.to_tables()
    return {
        f"{section}.{key}": value
        for section, keys in tables.items()
        for key, value in keys.items()
        if section not in _OF_NO_RESULT and f"{section}.{key}" not in _KEYS_OF_NO_RESULT
    }
