"""Files of a run's result: an adapter, the blocks' own weights, or a whole model.

An adapter is an AdapterHub folder. With ``adapter.config = "full"``, ``blocks.safetensors`` replaces the adapter's
files: every block's trained tensors, with their names in a checkpoint with a head. Auxiliary models have
``adapter.json``, and ``adapter.safetensors`` with their tensors and those of the library's adapters. The head's files
are the same in all three, and exist only if a head was trained.

Where users have adapters of their own, the folder ``users/NAME`` of each replaces ``adapter``. Nodes send tensors per
user; head and config, which all users share, are sent once, and the coordinator copies them into each folder. A user
with another kind of adapter has a config of their own.

Where all parameters train, the result is a whole model: a folder of transformers with config, weights and tokenizer.
Nodes send its weights as one file; in the folder large weights are several files with an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from ringtune.models.adapter_config import auxiliary_of, trains_own_weights
from ringtune.models.families import FAMILIES
from ringtune.models.family import FROZEN_HEAD_TASKS
from ringtune.models.folder import CONFIG_FILE, INDEX_FILE, MODEL_SIDE_FILES, WEIGHTS_FILE
from ringtune.schedule.run_shape import check_user_name

ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
ADAPTER_FILE: Final = "adapter.safetensors"
AUXILIARY_CONFIG_FILE: Final = "adapter.json"
BLOCKS_FILE: Final = "blocks.safetensors"
HEAD_CONFIG_FILE: Final = "head_config.json"
HEAD_FILE: Final = "model_head.safetensors"
INTERFACE_FILE: Final = "adapter_interface.json"
"""AdapterHub's interface file for a model without a model class (``Family.plugged``)."""

ADAPTER_FILES: Final = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Files of an AdapterHub folder."""

AUXILIARY_FILES: Final = (AUXILIARY_CONFIG_FILE, ADAPTER_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Files of a result with auxiliary models."""

BLOCKS_FILES: Final = (BLOCKS_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Files of a result with the blocks' own weights."""

RESULT_FILES: Final = (*ADAPTER_FILES, AUXILIARY_CONFIG_FILE, BLOCKS_FILE)

MODEL_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
"""Required files of a whole model, as nodes send it."""

PART_FILES: Final = (*RESULT_FILES, INTERFACE_FILE, *MODEL_FILES, *MODEL_SIDE_FILES)
"""Files that a node may send as its part of a result, besides those of single users."""

DESCRIPTIONS: Final = (ADAPTER_CONFIG_FILE, AUXILIARY_CONFIG_FILE)
"""Files that describe an adapter; a result has one of them."""

ADAPTER_FOLDER: Final = "adapter"
MODEL_FOLDER: Final = "model"
USERS_FOLDER: Final = "users"
RESULT_FOLDERS: Final[tuple[str, ...]] = (ADAPTER_FOLDER, MODEL_FOLDER, USERS_FOLDER)
"""Folders for the result of a run, which uses one of them."""

BEST_FOLDER: Final = "best"
"""Folder of a run with the results of its best evaluations, in a sub-folder for each step."""

_MAX_ADAPTER_BYTES: Final = 1 << 32
_MAX_MODEL_BYTES: Final = 1 << 40
_INDEX: Final = re.compile("0|[1-9][0-9]{0,5}")
_HEAD_FILES: Final = (HEAD_CONFIG_FILE, HEAD_FILE)


def has_trained_head(task: str) -> bool:
    """Whether the head of a task is new and trains; otherwise it is the pretrained model's, frozen."""
    return task not in FROZEN_HEAD_TASKS


def result_files(task: str, adapter: str) -> tuple[str, ...]:
    """Names of the files of a run's result.

    Example: ``adapter_config.json`` and ``adapter.safetensors`` for a causal language model, which has no trained head.
    """
    trained_files = BLOCKS_FILES if trains_own_weights(adapter) else AUXILIARY_FILES
    files = trained_files if trains_own_weights(adapter) or auxiliary_of(adapter) else ADAPTER_FILES
    return tuple(name for name in files if has_trained_head(task) or name not in _HEAD_FILES)


def of_user(user: str, name: str = "") -> str:
    """Return the path of a user's file in a run's folder and in a node's part; without ``name`` that of the folder.

    Example: ``users/anna/adapter.safetensors``. Raises ``PlanError`` for an invalid user name.
    """
    return "/".join((USERS_FOLDER, check_user_name(user), *([name] if name else [])))


def part_files(users: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of all files that a node may send: ``PART_FILES``, and tensors and descriptions of ``users``."""
    return (*PART_FILES, *(of_user(user, name) for user in users for name in (ADAPTER_FILE, *DESCRIPTIONS)))


class Result(NamedTuple):
    """Form of the result of a run.

    Attributes:
        loaded: files that nodes need to compute with it.
        max_bytes: most bytes that are accepted from another machine.
    """

    folder: str
    files: tuple[str, ...]
    more: tuple[str, ...]
    loaded: tuple[str, ...]
    max_bytes: int

    @property
    def is_model(self) -> bool:
        """Whether the result is a whole model."""
        return self.folder == MODEL_FOLDER

    def missing_in(self, folder: Path) -> str:
        """Return the name of a required file that ``folder`` lacks; empty if it has all.

        An index is accepted for the weights: their reader checks that the files of the index exist.
        """
        instead = {WEIGHTS_FILE: INDEX_FILE} if self.is_model else {}
        lacking = (name for name in self.files if not (folder / name).is_file())
        return next((name for name in lacking if not (folder / instead.get(name, name)).is_file()), "")


NO_RESULT: Final = Result("", files=(), more=(), loaded=(), max_bytes=0)
"""Result of a run before its job is read: no file is accepted."""


def adapter_result(task: str, adapter: str) -> Result:
    """Return the form of a result with an adapter or own weights; arguments as ``result_files``."""
    files = result_files(task, adapter)
    more = (INTERFACE_FILE,) if ADAPTER_CONFIG_FILE in files else ()
    return Result(ADAPTER_FOLDER, files, more=more, loaded=files, max_bytes=_MAX_ADAPTER_BYTES)


def model_result() -> Result:
    """Return the form of a result with all parameters."""
    return Result(MODEL_FOLDER, MODEL_FILES, MODEL_SIDE_FILES, loaded=(WEIGHTS_FILE,), max_bytes=_MAX_MODEL_BYTES)


def block_of(name: str) -> int | None:
    """Return the block of a tensor of a trained model; None for a tensor outside the blocks.

    Example: 3 for ``bert.encoder.layer.3.output.dense.weight``.
    """
    for family in FAMILIES.values():
        start = family.prefix + family.block_prefix
        number, dot, _ = name.removeprefix(start).partition(".")
        if dot and name.startswith(start) and _INDEX.fullmatch(number):
            return int(number)
    return None
