"""What is given away of a whole model: config, weights, tokenizer, after a look at their headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.export.checks import checked_id
from coordinator.export.model_card import whole_model_card
from coordinator.run_folder.saved_run import SavedRun, read_json
from ringtune.errors import IntegrityError
from ringtune.files.pieces import FilePieces, Pieces
from ringtune.models.family import NAMED_TASKS
from ringtune.models.folder import base_tensors, model_dimensions, read_config
from ringtune.models.hub import id_of_folder
from ringtune.models.result_files import model_result
from ringtune.models.tensors import CONFIG_FILE, INDEX_FILE, read_headers


def model_contents(
    run: SavedRun, base_model: str, *, saved: Path | None = None, what: str = "all parameters"
) -> tuple[dict[str, Pieces], str]:
    """Check the model, and return the content of its files by name, and of its card.

    Args:
        run: whose model.
        base_model: id of the model that it was trained from; empty = the name of its folder.
        saved: folder of the model; None = the run's own result.
        what: trained, in words.

    Raises:
        UsageError: ``base_model`` is no id.
        ModelError: a tensor is missing, or has another shape than the config says.
        IntegrityError: a file is damaged, or the model is not of this run.
    """
    saved = saved or run.saved
    config = read_json(saved / CONFIG_FILE)
    _check(run, saved, config)
    base_model = checked_id(base_model or id_of_folder(Path(run.job.model.path)))
    names = [
        CONFIG_FILE,
        *_weight_files(saved),
        *(name for name in model_result().more if (saved / name).is_file()),
    ]
    contents: dict[str, Pieces] = {name: FilePieces(saved / name) for name in names}
    digests = {name: content.sha256() for name, content in contents.items()}
    return contents, whole_model_card(run, base_model=base_model, config=config, digests=digests, what=what)


def _check(run: SavedRun, saved: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model that lacks a tensor, or has another size or other classes than the plan."""
    known = read_config(saved)
    base_tensors(saved, known)
    size, course = model_dimensions(known), run.plan.course
    if (size.num_blocks, size.hidden) != (course.num_blocks, course.hidden_size):
        raise IntegrityError(
            f"{CONFIG_FILE} has {size.num_blocks} blocks of width {size.hidden}, the run had {course.num_blocks} of "
            f"{course.hidden_size}; it mixes runs"
        )
    classes = {label: index for index, label in enumerate(course.labels)}
    if run.job.model.task in NAMED_TASKS and config.get("label2id") != classes and _head_classes(config) != classes:
        raise IntegrityError(f"{CONFIG_FILE} has the classes {config.get('label2id')}, the run had {course.labels}")


def _head_classes(config: Mapping[str, Any]) -> object:
    """Return the classes of AdapterHub's head, if the model has one."""
    heads = config.get("prediction_heads")
    found = [head.get("label2id") for head in heads.values()] if isinstance(heads, dict) else []
    return found[0] if found else None


def _weight_files(folder: Path) -> list[str]:
    """List the files that have the weights, with their index if there is one."""
    files = {stored.path.name for stored in read_headers(folder).values()}
    return sorted(files) + ([INDEX_FILE] if len(files) > 1 or (folder / INDEX_FILE).is_file() else [])
