"""Export a run's adapter or model: its folder with a page about it, checked, and without anything local in it.

The folder is written under another name and gets its own when it is whole, so a full disk leaves nothing half.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.export.checks import check_adapter, check_head, check_private, checked_id, private_paths
from coordinator.export.merged import check_can_merge, merge_into
from coordinator.export.model_card import adapter_card
from coordinator.export.users import adapter_of, as_of, require_user
from coordinator.export.whole_model import model_contents
from coordinator.run_folder.saved_run import SavedRun, read_json, read_run
from ringtune.errors import IntegrityError, StorageError, UsageError
from ringtune.files.durable import make_folder, rename_durably, write_pieces_durably
from ringtune.files.pieces import FilePieces, Pieces
from ringtune.models.adapters.adapter_config import FULL, trains_own_weights
from ringtune.models.result_files import BLOCKS_FILE, INTERFACE_FILE

_CARD = "README.md"


def export_run(
    folder: Path,
    target: Path,
    *,
    base_model: str = "",
    merge: bool = False,
    model: Path | None = None,
    user: str = "",
) -> dict[str, str]:
    """Write the adapter or model of a run with a model card to the folder ``target``.

    Args:
        folder: of the run.
        target: has to be absent or empty.
        base_model: id of the base model, ``name`` or ``owner/name``; by default the name of its folder.
        merge: write a whole model, with the adapter merged into its weights, instead of the adapter.
        model: folder of the base model, to merge into; None = the run's own.
        user: whose adapters, where each user has their own; empty = see ``require_user``.

    Returns:
        SHA-256 of every file, by name.

    Raises:
        UsageError: there is no result, or the blocks' own weights trained instead of one; the target is taken, or
            ``base_model`` is no id; or the adapter can't be merged; or a user is missing or unknown.
        IntegrityError: the result is damaged, or would tell a local path.
        StorageError: it can't be written.
    """
    run = read_run(folder)
    _check_can_be_given(run)
    require_user(run, user)
    _check_target(target)
    if not merge:
        with adapter_of(run, user) as chosen:
            return _write(_contents(chosen, base_model), target)
    check_can_merge(run)
    return _export_merged(as_of(run, user), target, base_model, model, user)


def _export_merged(run: SavedRun, target: Path, base_model: str, model: Path | None, user: str) -> dict[str, str]:
    """Let a process write the merged model beside the target, and export that."""
    try:
        merged = _beside(target)
    except OSError as error:
        raise StorageError(f"can't write {target}: {error.strerror}; choose another --out or make room") from error
    try:
        merge_into(run, merged, model=model, user=user)
        what = f"adapter configuration `{run.job.adapter.config}`, merged into the weights"
        contents, card = model_contents(run, base_model, saved=merged, what=what)
        return _write(_checked(run, contents, card, is_model=True), target)
    except OSError as error:
        raise StorageError(f"can't write {merged}: {error.strerror}; choose another --out or make room") from error
    finally:
        shutil.rmtree(merged, ignore_errors=True)


def _write(contents: Mapping[str, Pieces], target: Path) -> dict[str, str]:
    """Write the files beside the target, look at them, and give the folder its name; return their digests."""
    try:
        part = _beside(target)
    except OSError as error:
        raise StorageError(f"can't write {target}: {error.strerror}; choose another --out or make room") from error
    try:
        for name, content in contents.items():
            write_pieces_durably(part / name, content)
        digests = {name: FilePieces(part / name).sha256() for name in contents}
        if digests != {name: content.sha256() for name, content in contents.items()}:
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


def _beside(target: Path) -> Path:
    """Make a folder of a name that nobody has, beside the target."""
    make_folder(target.parent)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    return part


def _check_can_be_given(run: SavedRun) -> None:
    if trains_own_weights(run.job.adapter.config) and not run.result.is_model:
        raise UsageError(
            f"{run.folder} has no adapter to export: with adapter.config = {FULL!r} the blocks' own weights trained; "
            f"they are in {run.saved / BLOCKS_FILE}, load them with load_state_dict(..., strict=False)"
        )


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already; choose another --out or remove it")


def _contents(run: SavedRun, base_model: str) -> dict[str, Pieces]:
    """Check the result, and return the content of every file of the export by name."""
    make = model_contents if run.result.is_model else _adapter_contents
    contents, card = make(run, base_model)
    return _checked(run, contents, card, is_model=run.result.is_model)


def _checked(run: SavedRun, contents: Mapping[str, Pieces], card: str, *, is_model: bool) -> dict[str, Pieces]:
    """Add the card, and refuse files that name a path of this machine."""
    contents = {**contents, _CARD: Pieces.of(card.encode())}
    paths = private_paths(run)
    for name, content in contents.items():
        if not (is_model and name.endswith(".safetensors")):  # their headers are checked, their numbers not
            check_private(name, bytes(content).decode("utf-8", errors="replace"), paths)
    return contents


def _adapter_contents(run: SavedRun, base_model: str) -> tuple[dict[str, Pieces], str]:
    """Check the adapter, and return the content of its files by name, and of its card."""
    names = (*run.result.files, *(name for name in run.result.more if (run.saved / name).is_file()))
    configs = {name: read_json(run.saved / name) for name in names if name.endswith(".json")}
    adapter = configs[names[0]]
    check_adapter(run, adapter, where=names[0])
    if "head_config.json" in configs:
        check_head(run, configs["head_config.json"])
    base_model = checked_id(base_model or str(adapter.get("model_name", "")))
    contents: dict[str, Pieces] = {name: FilePieces(run.saved / name) for name in names}
    for name, config in configs.items():
        if name == INTERFACE_FILE:
            continue
        contents[name] = _json({**config, "model_name": base_model})
    digests = {name: content.sha256() for name, content in contents.items()}
    return contents, adapter_card(run, base_model=base_model, adapter=adapter, digests=digests)


def _json(value: dict[str, Any]) -> Pieces:
    return Pieces.of((json.dumps(value, indent=2) + "\n").encode())
