"""Inputs of every family for the task that is its own: a tiny model and rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ringtune.models.families import FAMILIES
from tests.support.torch_ring import write_family_inputs

TASKS: Final[Mapping[str, str]] = {
    **{name: family.tasks[-1] for name, family in FAMILIES.items()},
    "bert": "sequence-classification",
}
"""``model_type`` -> a task that the family has, by which it is tested."""


def family_writer(folder: Path) -> Callable[[str], Path]:
    """Make a function that writes the inputs of a family once, and returns their folder."""

    @functools.cache
    def write(model_type: str) -> Path:
        return write_family_inputs(folder / model_type, model_type, TASKS[model_type])

    return write
