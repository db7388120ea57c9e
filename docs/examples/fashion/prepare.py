"""Prepare the image example: Fashion-MNIST from Debian, and a small vision transformer that is trained here.

No weights of a vision transformer were found in the registries, so one is trained first, on half of the classes; the
job then fine-tunes it on the other half. ``python -m docs.examples.fashion.prepare`` leaves in its folder::

    model/        config.json, preprocessor_config.json, model.safetensors, recipe.json
    train.npz     1,200 images of each odd class
    held_out.npz  all test images of the odd classes
"""

from __future__ import annotations

import gzip
import io
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from docs.examples.fashion.pretrain import pretrain
from docs.examples.prepare_parts import Package, get, main, say
from ringtune.errors import DataError
from ringtune.storage.durable import write_durably

Array = np.ndarray[Any, np.dtype[Any]]

CLASS_NAMES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle-boot"),
)
FIRST_CLASSES = (0, 2, 4, 6, 8)
"""The model is trained on these; fine-tuned on the others."""

OTHER_CLASSES = (1, 3, 5, 7, 9)
PER_CLASS = 1200

IMAGES = Package(
    tool="apt-get",
    name="dataset-fashion-mnist",
    archive="dataset-fashion-mnist_*.deb",
    members=("usr/share/datasets/fashion-mnist/*.gz",),
    sha256="80e24defb4a50a047745e308b2814972914ad88b81cdc20b6bb2370f513ec782",
)
"""60,000 + 10,000 grey images of 28 x 28, ten classes; MIT."""

_IDX_BYTES = 8  # the only type that these files have: unsigned, 8 bits
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


class Labelled(NamedTuple):
    """Images and the numbers of their classes."""

    images: Array  # (N, 28, 28) uint8
    labels: Array  # (N,) uint8


def prepare(to: Path, source: Path | None = None) -> Mapping[str, Path]:
    """Make everything in ``to``; see ``prepare_parts.Prepare``."""
    files = {path.name: path for path in get(IMAGES, to / "pieces", source)}
    train, test = (
        Labelled(*(read_idx(files[f"{part}-{kind}-ubyte.gz"]) for kind in ("images-idx3", "labels-idx1")))
        for part in ("train", "t10k")
    )
    made = {"model.path": to / "model", "data.train": to / "train.npz", "data.eval": to / "held_out.npz"}
    first = of_classes(train, FIRST_CLASSES)
    pretrain(first.images, np.searchsorted(FIRST_CLASSES, first.labels), to / "model", say=say)
    for key, part, most in (("data.train", train, PER_CLASS), ("data.eval", test, None)):
        chosen = of_classes(part, OTHER_CLASSES, most=most)
        write_npz(made[key], image=chosen.images, label=np.array(CLASS_NAMES)[chosen.labels])
        say(f"{made[key].name}: {len(chosen.labels):,} images of {len(OTHER_CLASSES)} classes that the model never saw")
    return made


def read_idx(path: Path) -> Array:
    """An array of bytes in a gzipped idx file: two zeros, the type, the number of axes, their lengths, the numbers.

    Raises:
        DataError: it has another form.

    Source: LeCun, "The MNIST database of handwritten digits", file formats.
    """
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is no gzip file ({error}); fetch it again") from error
    axes = data[3] if len(data) > 3 else 0
    begin = 4 + 4 * axes
    if data[:2] != b"\0\0" or data[2:3] != bytes([_IDX_BYTES]) or not axes or len(data) < begin:
        raise DataError(f"{path} is no idx file of bytes: it begins with {data[:4]!r}; fetch it again")
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, begin, 4))
    if len(data) - begin != int(np.prod(shape)):
        raise DataError(f"{path} says shape {shape} but has {len(data) - begin} numbers; fetch it again")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)


def of_classes(rows: Labelled, classes: Sequence[int], *, most: int | None = None) -> Labelled:
    """The rows of these classes in their order, of each class the first ``most``."""
    places = [np.flatnonzero(rows.labels == label)[:most] for label in classes]
    chosen = np.sort(np.concatenate(places))
    return Labelled(rows.images[chosen], rows.labels[chosen])


def write_npz(path: Path, **arrays: Array) -> None:
    """What ``numpy.savez`` writes, but without the time of writing in it: the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _LONG_AGO), content.getvalue())
    write_durably(path, buffer.getvalue())


if __name__ == "__main__":
    sys.exit(main("fashion", prepare))
