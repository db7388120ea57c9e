"""Which files the result of a run consists of: an AdapterHub folder, with a head only where one was trained."""

from __future__ import annotations

from typing import Final

from ringtune.models.family import FROZEN_HEAD_TASKS

ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
ADAPTER_FILE: Final = "adapter.safetensors"
HEAD_CONFIG_FILE: Final = "head_config.json"
HEAD_FILE: Final = "model_head.safetensors"

ADAPTER_FILES: Final = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Every file that the AdapterHub folder of a run may have."""

_HEAD_FILES: Final = (HEAD_CONFIG_FILE, HEAD_FILE)


def has_trained_head(task: str) -> bool:
    """Whether the head of a task is new and trains; otherwise it is the pretrained model's own, frozen."""
    return task not in FROZEN_HEAD_TASKS


def result_files(task: str) -> tuple[str, ...]:
    """Names of the files of a run's result.

    Example: ``adapter_config.json`` and ``adapter.safetensors`` of a causal language model, whose decoder every copy of
    the pretrained model has.
    """
    return tuple(name for name in ADAPTER_FILES if has_trained_head(task) or name not in _HEAD_FILES)
