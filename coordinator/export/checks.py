"""Check that the folder of a result is whole, and tells nothing of where it was made, before it is given away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coordinator.run_folder.saved_run import SavedRun
from ringtune.errors import IntegrityError, UsageError
from ringtune.files.safetensors_header import TensorInfo, read_safetensors_header
from ringtune.models.adapters.auxiliary_file import Described, described, is_of_library, own_tensors
from ringtune.models.family import NAMED_TASKS
from ringtune.models.result_files import AUXILIARY_CONFIG_FILE

_BLOCK = re.compile(r"\.(\d+)\.")
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_adapter(run: SavedRun, config: Mapping[str, Any], *, where: str) -> None:
    """Refuse an adapter whose tensors are not what config and plan say.

    Args:
        run: whose adapter.
        config: content of the file that describes it.
        where: name of that file: ``adapter_config.json``, or ``adapter.json`` of auxiliary models.

    Raises:
        IntegrityError: a file is damaged, or blocks lack tensors.
    """
    tensors = read_safetensors_header(run.saved / "adapter.safetensors")
    facts = described(config, where=where) if where == AUXILIARY_CONFIG_FILE else None
    if facts is None and not (isinstance(config.get("config"), dict) and config.get("model_type")):
        raise IntegrityError("adapter_config.json does not describe an adapter; copy the run's folder again")
    blocks: dict[int, set[str]] = {}
    for name in tensors:
        found = _BLOCK.search(name)
        if found is None:
            raise IntegrityError(f"adapter.safetensors has {name}, which belongs to no block; train again")
        blocks.setdefault(int(found[1]), set()).add(name[found.end() :])
    num_blocks = run.plan.course.num_blocks
    if facts is None:
        _check_alike(blocks, num_blocks, leaves_out=_leaves_blocks_out(config))
    else:
        library = {
            block: {name for name in names if is_of_library(name, facts.name)} for block, names in blocks.items()
        }
        _check_own({block: names - library[block] for block, names in blocks.items()}, num_blocks, facts)
        if facts.library is not None:
            some = {block: names for block, names in library.items() if names}
            _check_alike(some, num_blocks, leaves_out=_leaves_blocks_out(facts.library))
    if not blocks or max(blocks) >= num_blocks:
        raise IntegrityError(
            f"adapter.safetensors has blocks {sorted(blocks)}, the model has {num_blocks}; it mixes runs"
        )


def _check_alike(blocks: Mapping[int, set[str]], num_blocks: int, *, leaves_out: bool) -> None:
    """Refuse adapters of the library of which a block lacks tensors that others have."""
    expected = set().union(*blocks.values())
    for block in range(num_blocks):
        missing = sorted(expected - blocks.get(block, set()))
        if missing and not (block not in blocks and leaves_out):
            raise IntegrityError(
                f"adapter.safetensors lacks {missing[0]} of block {block}; copy the run's folder again"
            )
    if not expected:
        raise IntegrityError("adapter.safetensors lacks all tensors of the library's adapters; copy the folder again")


def _check_own(blocks: Mapping[int, set[str]], num_blocks: int, facts: Described) -> None:
    """Refuse auxiliary models of which a block has not as many tensors as their description says."""
    for block in range(num_blocks):
        count, wanted = len(blocks.get(block, ())), own_tensors(facts.parts, block)
        if count != wanted:
            raise IntegrityError(
                f"adapter.safetensors has {count} tensors of the auxiliary models of block {block}, {wanted} are "
                f"described in {AUXILIARY_CONFIG_FILE}; copy the run's folder again"
            )


def _leaves_blocks_out(value: Any) -> bool:
    """Whether a configuration, or a part of it, is for some blocks only."""
    if isinstance(value, dict):
        named = any(isinstance(value.get(key), list) and value[key] for key in ("leave_out", "layers"))
        return named or any(_leaves_blocks_out(part) for part in value.values())
    return isinstance(value, list) and any(_leaves_blocks_out(part) for part in value)


def check_head(run: SavedRun, config: Mapping[str, Any]) -> None:
    """Refuse a head that is damaged or has other classes than the plan.

    Args:
        run: whose head.
        config: content of ``head_config.json``.

    Raises:
        IntegrityError: a file is damaged, or the classes differ.
    """
    tensors = read_safetensors_header(run.saved / "model_head.safetensors")
    if run.job.model.task not in NAMED_TASKS:
        return
    described = config.get("config")
    ids = (described if isinstance(described, dict) else config).get("label2id")
    labels = run.plan.course.labels
    if ids != {label: index for index, label in enumerate(labels)}:
        raise IntegrityError(f"head_config.json has the classes {ids}, the run had {labels}; it mixes runs")
    if len(labels) not in _outputs(tensors):
        raise IntegrityError(
            f"model_head.safetensors has no output of {len(labels)} classes; copy the run's folder again"
        )


def _outputs(tensors: Mapping[str, TensorInfo]) -> set[int]:
    return {info.shape[0] for info in tensors.values() if info.shape}


def checked_id(base_model: str) -> str:
    """Return the id of a base model, ``name`` or ``owner/name``.

    Raises:
        UsageError: it is none.
    """
    if not _MODEL_ID.fullmatch(base_model):
        raise UsageError(f"{base_model!r} is no model id; give one with --base-model NAME or OWNER/NAME")
    return base_model


def private_paths(run: SavedRun) -> tuple[str, ...]:
    """List the paths of this machine that an export must not name: of model, data, run and home."""
    data = run.job.data
    named = [run.job.model.path, data.train, data.eval]
    parents = [str(Path(path).parent) for path in named if path]
    folders = [str(run.folder.resolve()), str(Path.home())]
    found = {path for path in (*named, *parents, *folders) if len(Path(path).parts) > 2 or path in named}
    return tuple(sorted(path for path in found if path.startswith("/")))


def check_private(name: str, text: str, paths: Iterable[str]) -> None:
    """Refuse a text that names one of these paths.

    Raises:
        IntegrityError: the text names one; says which.
    """
    for path in paths:
        if path in text:
            raise IntegrityError(f"{name} names the local path {path}; remove it there and export again")
