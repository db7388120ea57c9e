"""Find the rows and the model that lie in a folder, and say what else lies there if there are none, or too many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ringtune.errors import DataError, InvalidInputError, ModelError
from ringtune.files.pictures import PICTURES
from ringtune.files.tables import TABLE_SUFFIXES
from ringtune.files.tagged import CONLL_SUFFIXES
from ringtune.files.text_files import form_suffix
from ringtune.models.tensors import CONFIG_FILE

ROWS: Final = (*TABLE_SUFFIXES, ".npz", ".txt", *CONLL_SUFFIXES)
TRAIN_NAMES: Final = ("train", "training", "data")
EVAL_NAMES: Final = ("eval", "test", "valid", "validation", "dev", "held_out", "heldout")
_NO_ROWS = ("requirements.txt", "readme.txt", "license.txt", "vocab.txt", "merges.txt")
_SHOWN = 12


def find_rows(folder: Path) -> tuple[Path, Path | None]:
    """Find the rows to train on, and those to evaluate on if a file is called so.

    Example: of ``train.csv`` and ``test.csv`` the first and the second; of ``reviews.csv`` alone that and none.

    Raises:
        DataError: nothing looks like rows, or several files do and none is called ``train``.
    """
    found = [path for path in _entries(folder) if _has_rows(path)]
    held_out = [path for path in found if _name(path) in EVAL_NAMES]
    others = [path for path in found if path not in held_out]
    named = [path for name in TRAIN_NAMES for path in others if _name(path) == name]
    chosen = named[:1] or others
    if len(chosen) == 1:
        beside = [path for path in held_out if form_suffix(path) == form_suffix(chosen[0])]
        return chosen[0], next(iter(beside), None)
    raise _none_or_many(DataError, folder, others, "rows", f"--data FILE ({', '.join(ROWS)} or a folder of images)")


def find_model(folder: Path) -> Path:
    """Find the model folder in a folder, in folders in it, or in its ``models``.

    Raises:
        ModelError: there is none, or there are several.
    """
    places = [folder, *_entries(folder), *_entries(folder / "models")]
    found = [path for path in places if (path / CONFIG_FILE).is_file()]
    if len(found) == 1:
        return found[0]
    how = "--model DIR, a folder with config.json, model.safetensors and the tokenizer, or --model OWNER/NAME of a hub"
    raise _none_or_many(ModelError, folder, found, "a model", how)


def _none_or_many(
    error: type[InvalidInputError], folder: Path, found: Sequence[Path], what: str, how: str
) -> InvalidInputError:
    if found:
        names = ", ".join(path.name for path in found[:_SHOWN])
        return error(f"{folder} has several that could be {what} ({names}); give one: {how}")
    names = ", ".join(path.name for path in _entries(folder)[:_SHOWN]) or "nothing"
    return error(f"nothing in {folder} looks like {what} (it has {names}); give {how}")


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _name(path: Path) -> str:
    """The name of a file without its suffixes, in small letters."""
    return path.name.lower().partition(".")[0]


def _has_rows(path: Path) -> bool:
    if path.is_dir():
        return any(file.suffix.lower() in PICTURES for file in path.glob("*/*"))
    return form_suffix(path) in ROWS and path.name.lower() not in _NO_ROWS
