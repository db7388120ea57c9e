"""Refuse keys of a job that stand in another section than theirs, or that only other frameworks have."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from ringtune.errors import JobError

_CLIP_KEYS = ("clip_norm", "max_grad_norm", "clip_grad_norm", "gradient_clipping")


def refuse_unsupported(tables: Mapping[str, object]) -> None:
    """Refuse by name what users of other frameworks look for and RingTune does not carry out.

    Raises:
        JobError: names the key and what to do.
    """
    train = tables.get("train")
    for key in train if isinstance(train, Mapping) else ():
        if key in _CLIP_KEYS:
            raise JobError(
                f"train.{key} is not supported: clipping by the global norm needs a sum over the ring before each "
                "update; remove it"
            )


@functools.cache
def sections_of(job: type[Any]) -> Mapping[str, frozenset[str]]:
    """The keys of each section of a job's dataclass."""
    hints = typing.get_type_hints(job)
    return {
        field.name: frozenset(key.name for key in dataclasses.fields(section_class(hints[field.name])))
        for field in dataclasses.fields(job)
    }


def section_class(hint: Any) -> Any:
    """The dataclass of a section, of the type of a job's field: the type itself, or what it has beside None."""
    return next(kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind))


def refuse_misplaced(job: type[Any], tables: Mapping[str, object]) -> None:
    """Refuse a key that another section has, or that stands before all sections.

    Args:
        job: the dataclass whose fields are the sections.
        tables: as a TOML reader gives them.

    Raises:
        JobError: names the key and its section. Keys that no section has are left to the reader.
    """
    sections = sections_of(typing.cast(Any, job))
    for name, value in tables.items():
        if name in sections and isinstance(value, Mapping):
            for key in value:
                if key not in sections[name]:
                    _refuse(f"{name}.{key}", str(key), sections)
        elif name not in sections:
            _refuse(name, name, sections)


def _refuse(name: str, key: str, sections: Mapping[str, frozenset[str]]) -> None:
    homes = [section for section, keys in sections.items() if key in keys]
    if homes:
        where = " or ".join(f"[{home}]" for home in homes)
        raise JobError(f"unknown key {name!r}; {key} is a key of {where}, write it there")
