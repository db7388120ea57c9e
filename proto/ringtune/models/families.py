"""Families of models that can be sliced, by ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping

from ringtune.errors import ModelError
from ringtune.models.decoder import GPT2, LLAMA, MISTRAL
from ringtune.models.family import Family, head_task
from ringtune.models.image import VIT
from ringtune.models.plugged import GEMMA, GEMMA2, GEMMA3, QWEN2, QWEN3, SMOLLM3
from ringtune.models.text import BERT, DISTILBERT, ELECTRA, ROBERTA, XLM_ROBERTA

_ALL = (
    *(BERT, ROBERTA, XLM_ROBERTA, ELECTRA, DISTILBERT, GPT2, LLAMA, MISTRAL, VIT),
    *(QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, SMOLLM3),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}


def family_named(model_type: object, *, where: str = "config.json") -> Family:
    """Return the family of a ``model_type``; else raise ``ModelError`` with the supported ones."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(f"{where}: model_type {model_type!r} is not supported yet; supported: {', '.join(FAMILIES)}")
    return family


def check_task(family: Family, task: str, *, where: str = "config.json") -> None:
    """Refuse a task for which the family has no head; raises ``ModelError``."""
    if head_task(task) not in family.tasks:
        others = ", ".join(name for name, other in FAMILIES.items() if head_task(task) in other.tasks)
        raise ModelError(
            f"{where}: model_type {family.model_type!r} has no head for model.task = {task!r}; supported for it: "
            f"{', '.join(family.tasks)}; models for that task: {others}"
        )
