"""Which files the result of a run consists of.

An adapter makes an AdapterHub folder. Where the blocks' own weights trained, ``blocks.safetensors`` takes the place of
the adapter: every block's trained tensors, by the names that a model with a head gives them in its own checkpoint. The
head's files are the same in both, and only there where a head was trained.
"""

from __future__ import annotations

from typing import Final

from ringtune.models.adapter_config import trains_own_weights
from ringtune.models.family import FROZEN_HEAD_TASKS

ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
ADAPTER_FILE: Final = "adapter.safetensors"
BLOCKS_FILE: Final = "blocks.safetensors"
HEAD_CONFIG_FILE: Final = "head_config.json"
HEAD_FILE: Final = "model_head.safetensors"

ADAPTER_FILES: Final = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Every file that the AdapterHub folder of a run may have."""

BLOCKS_FILES: Final = (BLOCKS_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Every file that the result of a run may have in which the blocks' own weights trained."""

RESULT_FILES: Final = (*ADAPTER_FILES, BLOCKS_FILE)
"""Every file that the result of any run may have."""

_HEAD_FILES: Final = (HEAD_CONFIG_FILE, HEAD_FILE)


def has_trained_head(task: str) -> bool:
    """Whether the head of a task is new and trains; otherwise it is the pretrained model's own, frozen."""
    return task not in FROZEN_HEAD_TASKS


def result_files(task: str, adapter: str) -> tuple[str, ...]:
    """Names of the files of a run's result.

    Example: ``adapter_config.json`` and ``adapter.safetensors`` of a causal language model, whose decoder every copy of
    the pretrained model has.

    Args:
        task: of the job.
        adapter: the job's ``adapter.config``.
    """
    files = BLOCKS_FILES if trains_own_weights(adapter) else ADAPTER_FILES
    return tuple(name for name in files if has_trained_head(task) or name not in _HEAD_FILES)
