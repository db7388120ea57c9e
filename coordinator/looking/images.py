"""Look at labelled images, an npz file or a folder for each class, without reading a pixel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.estimates.npy_headers import Archive
from ringtune.errors import DataError
from ringtune.files.pictures import PICTURES, list_pictures
from ringtune.jobs.job import Data

_SHOWN = 6
_LEAST_AXES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images that were looked at.

    Attributes:
        path: of the file or folder.
        classes: how many images each class has.
        columns: key of ``[data]`` -> name of an array; none of a folder.
        passed_over: how many other files a folder has, by why.
    """

    path: Path
    classes: Mapping[str, int]
    columns: Mapping[str, str]
    passed_over: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of images."""
        return sum(self.classes.values())

    def in_words(self) -> str:
        """Describe the images."""
        names = sorted(self.classes)
        more = ", ..." if len(names) > _SHOWN else ""
        return f"{self.path} has {self.rows:,} images of {len(names)} classes ({', '.join(names[:_SHOWN])}{more})"


def look_at_images(path: Path) -> Images:
    """Count the images of each class.

    Raises:
        DataError: there are none, or of one class only; says what was seen.
    """
    found = _look_at_folder(path) if path.is_dir() else _look_at_archive(path)
    if len(found.classes) < 2:
        raise DataError(f"{found.in_words()}; give it two classes or more")
    return found


def _look_at_folder(path: Path) -> Images:
    found = list_pictures(path)
    if not found.files:
        most = sorted(found.suffixes.items(), key=lambda item: -item[1])[:_SHOWN]
        ends = ", ".join(f"{count} of {name}" for name, count in most) or "none"
        raise DataError(
            f"{path} is a folder without images in folders below it (files there: {ends}); give a folder for each "
            f"class with {', '.join(PICTURES)}, or a .csv or .jsonl file"
        )
    return Images(path=path, classes=Counter(found.labels), columns={}, passed_over=found.passed_over)


def _look_at_archive(path: Path) -> Images:
    """Find the array of images and that of labels: by their usual names, else by their shapes."""
    with Archive(path) as arrays:
        headers = {name: arrays.header(name) for name in arrays.names}
        images = [name for name, header in headers.items() if len(header.shape) >= _LEAST_AXES]
        labels = [name for name, header in headers.items() if len(header.shape) == 1 and header.kind in "iuU"]
        usual = Data()
        image = usual.image if usual.image in images else next(iter(images), "")
        label = usual.label if usual.label in labels else next(iter(labels), "")
        if not image or not label or headers[image].shape[:1] != headers[label].shape:
            shapes = ", ".join(f"{name!r} {list(header.shape)}" for name, header in headers.items())
            raise DataError(
                f"{path} has the arrays {shapes or 'none'}; images are an array with three axes or more, and labels "
                "one of as many whole numbers or names; write it with numpy.savez(FILE, image=..., label=...)"
            )
        return Images(path=path, classes=Counter(arrays.labels(label)), columns={"image": image, "label": label})
