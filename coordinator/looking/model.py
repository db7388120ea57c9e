"""Look at a model folder: its family, what it was made for, how long a row it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringtune.errors import ModelError
from ringtune.files.given_files import read_json
from ringtune.models.consistency import check_files
from ringtune.models.families import FAMILIES
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    TAGGING,
    Dimensions,
)
from ringtune.models.folder import base_tensors, model_dimensions, read_config
from ringtune.models.tensors import CONFIG_FILE

_MADE_FOR: Final = {
    "ForCausalLM": CAUSAL_LM,
    "LMHeadModel": CAUSAL_LM,
    "ForQuestionAnswering": QUESTION_ANSWERING,
    "ForSequenceClassification": CLASSIFICATION,
    "ForTokenClassification": TAGGING,
    "ForImageClassification": IMAGE_CLASSIFICATION,
}
"""How the class in ``architectures`` ends -> the task that it is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model that was looked at.

    Attributes:
        path: as the job names it.
        model_type: its family.
        tasks: that the family has a head for.
        made_for: task of the class that saved it; empty where that says none.
        dimensions: blocks, width, longest row.
        config: its allowed keys.
    """

    path: str
    model_type: str
    tasks: tuple[str, ...]
    made_for: str
    dimensions: Dimensions
    config: dict[str, Any]

    def in_words(self) -> str:
        """Describe the model."""
        found = self.dimensions
        made = f", made for {self.made_for}" if self.made_for else ""
        return f"{self.path}: {self.model_type}, {found.num_blocks} blocks of width {found.hidden}{made}"


def look_at_model(folder: Path, path: str) -> Model:
    """Look at a model folder: its config, and that there are weights.

    Args:
        folder: where the files are.
        path: as the job names it.

    Raises:
        ModelError: it can't be used; says why.
        IntegrityError: a file of weights is damaged.
    """
    config = read_config(folder)
    base_tensors(folder, config)
    check_files(folder, config)
    values = read_json(folder / CONFIG_FILE)
    named = values.get("architectures") if isinstance(values, dict) else None
    classes = [str(name) for name in named] if isinstance(named, list) else []
    family = FAMILIES[config["model_type"]]
    made_for = (task for name in classes for end, task in _MADE_FOR.items() if name.endswith(end))
    return Model(
        path=path,
        model_type=family.model_type,
        tasks=family.tasks,
        made_for=next(made_for, ""),
        dimensions=model_dimensions(config),
        config=config,
    )


def choose_task(model: Model, possible: tuple[str, ...], saw: str) -> str:
    """Choose what is learned: what the rows have columns for, and the model a head.

    Example: rows with texts and classes are classified, also by a decoder; rows with texts alone are learned by a
    language model.

    Args:
        model: that was looked at.
        possible: tasks of the rows, the likeliest first.
        saw: the rows in words.

    Raises:
        ModelError: the model has a head for none of them.
    """
    fitting = [task for task in possible if task in model.tasks]
    if not fitting:
        fits = ", ".join(possible) or "no task"
        raise ModelError(
            f"{saw}; that fits {fits}, and a model of type {model.model_type!r} has heads for "
            f"{', '.join(model.tasks)}; give another --model, other rows, or --task"
        )
    return fitting[0]
