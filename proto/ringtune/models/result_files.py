"""The files of a run's result: an adapter, the blocks' own weights, or a whole model.

An adapter makes an AdapterHub folder. Where the blocks' own weights trained, ``blocks.safetensors`` takes the place of
the adapter: every block's trained tensors, by the names that a model with a head gives them in its own checkpoint.
Auxiliary models have no AdapterHub form either: ``adapter.json`` describes them, and ``adapter.safetensors`` has their
tensors, and those of the library's adapters beside them. The head's files are the same in all three, and only there
where a head was trained.

Where each user has adapters of their own (``techniques.offload``), each has a folder ``users/NAME`` in place of
``adapter``. Between machines only the tensors have a user's name; head and config, which all users share, travel once,
and the coordinator puts them into each folder. The config of an adapter of another kind (``offload.adapters``) has a
user's name too, and takes the place of the common one.

Where all parameters trained, the result is a whole model: a normal folder of transformers with config, weights and the
tokenizer's files. Between machines its weights are always one file; in the folder large ones are several with an index.
"""

from __future__ import annotations

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
"""AdapterHub's file to plug adapters into a model for which it has no class; of other models there is none."""

ADAPTER_FILES: Final = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Every file that the AdapterHub folder of a run may have."""

AUXILIARY_FILES: Final = (AUXILIARY_CONFIG_FILE, ADAPTER_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Every file that the result of a run with auxiliary models may have."""

BLOCKS_FILES: Final = (BLOCKS_FILE, HEAD_CONFIG_FILE, HEAD_FILE)
"""Every file that the result of a run may have in which the blocks' own weights trained."""

RESULT_FILES: Final = (*ADAPTER_FILES, AUXILIARY_CONFIG_FILE, BLOCKS_FILE)
"""Every file that the result of any run may have."""

MODEL_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
"""Every file that a trained model has, as it travels."""

PART_FILES: Final = (*RESULT_FILES, INTERFACE_FILE, *MODEL_FILES, *MODEL_SIDE_FILES)
"""Every file that a node may hand in as its part of a result that all users share."""

DESCRIPTIONS: Final = (ADAPTER_CONFIG_FILE, AUXILIARY_CONFIG_FILE)
"""The files of which a result has the one that describes its adapter."""

ADAPTER_FOLDER: Final = "adapter"
MODEL_FOLDER: Final = "model"
USERS_FOLDER: Final = "users"
RESULT_FOLDERS: Final = (ADAPTER_FOLDER, MODEL_FOLDER, USERS_FOLDER)
"""The folders of a run of which one has its result."""

BEST_FOLDER: Final = "best"
"""The folder of a run with the results of its best evaluations, each in a folder of its step."""

_MAX_ADAPTER_BYTES: Final = 1 << 32
_MAX_MODEL_BYTES: Final = 1 << 40
_MAX_DIGITS: Final = 6
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
    own = BLOCKS_FILES if trains_own_weights(adapter) else AUXILIARY_FILES
    files = own if trains_own_weights(adapter) or auxiliary_of(adapter) else ADAPTER_FILES
    return tuple(name for name in files if has_trained_head(task) or name not in _HEAD_FILES)


def of_user(user: str, name: str = "") -> str:
    """Return where a user's file is in a run's folder and in a node's part; without ``name`` their folder.

    Example: ``users/anna/adapter.safetensors``.

    Raises:
        PlanError: no user may be called so.
    """
    return "/".join((USERS_FOLDER, check_user_name(user), *([name] if name else [])))


def part_files(users: Iterable[str] = ()) -> tuple[str, ...]:
    """List every file that a node may hand in as its part of a result; of ``users`` tensors, and a description."""
    return (*PART_FILES, *(of_user(user, name) for user in users for name in (ADAPTER_FILE, *DESCRIPTIONS)))


class Result(NamedTuple):
    """The form of the result of a run.

    Attributes:
        folder: its name in the run's folder.
        files: that it has to have.
        more: that it may have.
        loaded: those that nodes need to compute with it.
        max_bytes: most that is taken of it from another machine.
    """

    folder: str
    files: tuple[str, ...]
    more: tuple[str, ...]
    loaded: tuple[str, ...]
    max_bytes: int

    @property
    def is_model(self) -> bool:
        """Whether it is a whole model."""
        return self.folder == MODEL_FOLDER

    def missing_in(self, folder: Path) -> str:
        """Name a file that ``folder`` lacks of this result; empty if it is all there.

        An index stands for the weights that it names: their reader checks that they exist.
        """
        instead = {WEIGHTS_FILE: INDEX_FILE} if self.is_model else {}
        lacking = (name for name in self.files if not (folder / name).is_file())
        return next((name for name in lacking if not (folder / instead.get(name, name)).is_file()), "")


NO_RESULT: Final = Result("", files=(), more=(), loaded=(), max_bytes=0)
"""The result of a run with a job that is not read yet: no file is taken."""


def adapter_result(task: str, adapter: str) -> Result:
    """Return what a run leaves that trained an adapter, or the blocks' own weights; arguments as ``result_files``."""
    files = result_files(task, adapter)
    more = (INTERFACE_FILE,) if ADAPTER_CONFIG_FILE in files else ()
    return Result(ADAPTER_FOLDER, files, more=more, loaded=files, max_bytes=_MAX_ADAPTER_BYTES)


def model_result() -> Result:
    """Return what a run leaves that trained all parameters."""
    return Result(MODEL_FOLDER, MODEL_FILES, MODEL_SIDE_FILES, loaded=(WEIGHTS_FILE,), max_bytes=_MAX_MODEL_BYTES)


def block_of(name: str) -> int | None:
    """Return the block that a tensor of a trained model belongs to; None for embedding, head, and what else there is.

    Example: 3 for ``bert.encoder.layer.3.output.dense.weight``.
    """
    for family in FAMILIES.values():
        start = family.prefix + family.block_prefix
        number = name.removeprefix(start).partition(".")[0]
        if name.startswith(start) and number.isdecimal() and len(number) <= _MAX_DIGITS:
            return int(number)
    return None
