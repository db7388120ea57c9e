"""Export a run's adapter: an AdapterHub folder with a page about it, checked, and without anything local in it.

The folder is written under another name and gets its own when it is whole, so a full disk leaves nothing half.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from coordinator.export.checks import check_adapter, check_head, check_private, private_paths
from coordinator.export.model_card import model_card
from coordinator.run_folder.saved_run import SavedRun, read_json, read_run
from ringtune.errors import IntegrityError, StorageError, UsageError
from ringtune.files.durable import rename_durably, write_durably
from ringtune.models.adapter_config import FULL, trains_own_weights
from ringtune.models.result_files import BLOCKS_FILE, result_files

_CARD = "README.md"
_PART = ".part"
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def export_run(folder: Path, target: Path, *, base_model: str = "") -> dict[str, str]:
    """Write the adapter of a run with a model card to the folder ``target``.

    Args:
        folder: of the run.
        target: has to be absent or empty.
        base_model: id of the base model, ``name`` or ``owner/name``; by default as the adapter says.

    Returns:
        SHA-256 of every file, by name.

    Raises:
        UsageError: there is no adapter, or the blocks' own weights trained instead of one; the target is taken, or
            ``base_model`` is no id.
        IntegrityError: the adapter is damaged, or would tell a local path.
        StorageError: it can't be written.
    """
    run = read_run(folder)
    _check_is_adapter(run)
    _check_target(target)
    contents = _contents(run, base_model)
    part = target.with_name(target.name + _PART)
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name, content in contents.items():
            write_durably(part / name, content)
        digests = {name: _digest((part / name).read_bytes()) for name in contents}
        if digests != {name: _digest(content) for name, content in contents.items()}:
            raise IntegrityError(f"{part} does not hold what was written; check the disk")
        if target.exists():
            target.rmdir()
        rename_durably(part, target)
    except StorageError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise StorageError(f"can't write {target}: {error.strerror}; choose another --out or make room") from error
    return digests


def _check_is_adapter(run: SavedRun) -> None:
    if trains_own_weights(run.job.adapter.config):
        raise UsageError(
            f"{run.folder} has no adapter to export: with adapter.config = {FULL!r} the blocks' own weights trained; "
            f"they are in {run.adapter / BLOCKS_FILE}, load them with load_state_dict(..., strict=False)"
        )


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already; choose another --out or remove it")


def _contents(run: SavedRun, base_model: str) -> dict[str, bytes]:
    """Check the adapter, and return the content of every file of the export by name."""
    names = result_files(run.job.model.task, run.job.adapter.config)
    configs = {name: read_json(run.adapter / name) for name in names if name.endswith(".json")}
    adapter = configs["adapter_config.json"]
    check_adapter(run, adapter)
    if "head_config.json" in configs:
        check_head(run, configs["head_config.json"])
    base_model = base_model or str(adapter.get("model_name", ""))
    if not _MODEL_ID.fullmatch(base_model):
        raise UsageError(f"{base_model!r} is no model id; give one with --base-model NAME or OWNER/NAME")
    contents = {name: (run.adapter / name).read_bytes() for name in names}
    for name, config in configs.items():
        contents[name] = _json({**config, "model_name": base_model})
    digests = {name: _digest(content) for name, content in contents.items()}
    card = model_card(run, base_model=base_model, adapter=adapter, digests=digests)
    contents[_CARD] = card.encode()
    paths = private_paths(run)
    for name, content in contents.items():
        check_private(name, content.decode("utf-8", errors="replace"), paths)
    return contents


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
