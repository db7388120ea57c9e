"""Pictures in a folder with a folder for each class: which count, and which files are passed over.

Files and folders whose names begin with a dot are no data: ``.ipynb_checkpoints`` of Jupyter has copies of pictures,
``._cat.png`` of macOS has none in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PICTURES: Final = (".npy", ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
HIDDEN: Final = "hidden files, whose name or folder begins with a dot"
NO_PICTURE: Final = "files that are no pictures"
NO_CLASS: Final = "pictures that lie in no folder of a class, or deeper than it"


@dataclass(frozen=True, slots=True)
class PictureFolder:
    """The pictures below a folder.

    Attributes:
        files: in the order of their classes and names.
        passed_over: how many other files there are, by why.
        suffixes: how many files end in what, pictures or not.
    """

    files: tuple[Path, ...]
    passed_over: Mapping[str, int]
    suffixes: Mapping[str, int]

    @property
    def labels(self) -> tuple[str, ...]:
        """The class of each picture: the name of its folder."""
        return tuple(file.parent.name for file in self.files)


def list_pictures(folder: Path, *, has_classes: bool = True) -> PictureFolder:
    """List the pictures in a folder.

    Args:
        folder: with a folder for each class, or with pictures at any depth.
        has_classes: which of both.
    """
    files: list[Path] = []
    passed, suffixes = Counter[str](), Counter[str]()
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        if file.is_dir():
            continue
        if any(part.startswith(".") for part in parts):
            passed[HIDDEN] += 1
            continue
        suffixes[file.suffix.lower() or "no suffix"] += 1
        if file.suffix.lower() not in PICTURES:
            passed[NO_PICTURE] += 1
        elif has_classes and len(parts) != 2:
            passed[NO_CLASS] += 1
        else:
            files.append(file)
    return PictureFolder(tuple(files), dict(passed), dict(suffixes))
