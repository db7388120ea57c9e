"""Labelled images for image classification, and their conversion to the model's input arrays.

Rows are an npz file with two arrays, a folder with a folder for each class, or Parquet or Arrow files with a column of
encoded pictures, which stay encoded in memory. Bytes are converted by the steps of
``preprocessor_config.json``; floating-point arrays are not converted, and must have the model's size. Files are decoded
as viewers show them: turned by the EXIF orientation, colours as RGB, transparency on white.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from edge.data.examples import NONE_LEFT_OUT, ClassCounts, SummedScores, class_labels
from edge.data.tokens import Batch
from ringtune.errors import DataError, ModelError
from ringtune.job.job import Job
from ringtune.job.rows import ARRAY, Rows, account_of, list_pictures, opened_picture, read_rows, task_rows
from ringtune.models.families import image_tokens
from ringtune.models.family import IMAGE_CLASSIFICATION
from ringtune.models.folder import read_config
from ringtune.models.preprocessor import ImageSteps, read_image_steps
from ringtune.storage.arrow_files import PICTURES, is_arrow
from ringtune.storage.tables import row_place
from ringtune.storage.text_files import NPZ_REMEDY, check_archive

_CHANNELS_LAST = 3


class ImageSize(NamedTuple):
    """Channels, and side in pixels, of the model's square images."""

    channels: int
    side: int

    def order(self, shape: tuple[int, ...]) -> str:
        """Return the order of the axes of an array: ``hw``, ``hwc`` or ``chw``; empty if it does not fit.

        Example: for 3 channels of side 32 an array (32, 32, 3) is ``hwc``.
        """
        plane = (self.side, self.side)
        if shape == plane and self.channels == 1:
            return "hw"
        if shape == (*plane, self.channels):
            return "hwc"
        return "chw" if shape == (self.channels, *plane) else ""

    def __str__(self) -> str:
        """Write the shape for messages: ``3 x 32 x 32 (channels, height, width)``."""
        return f"{self.channels} x {self.side} x {self.side} (channels, height, width)"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture or array that is decoded at its use: a file, or the ``content`` of a row (from 1) of a table."""

    path: Path
    row: int = 0
    content: bytes = b""

    def __str__(self) -> str:
        """Return the place of the image."""
        return row_place(self.path, self.row) if self.row else str(self.path)


class Images:
    """The ``Source`` of image classification; raises ``ModelError``.

    Attributes:
        num_tokens: of an image: its patches and the class token.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        config = read_config(folder)
        if "num_channels" not in config:
            raise ModelError(f"{folder}: model_type {config['model_type']!r} takes no images")
        self._data, self._image, self._label = job.data, job.data.image, job.data.label
        self._size = ImageSize(config["num_channels"], config["image_size"])
        self.num_tokens = image_tokens(config)
        self._processor = ImageProcessor(read_image_steps(folder, channels=self._size.channels, side=self._size.side))

    def read(self, path: Path) -> Rows:
        """Read images with their class names; every image's shape is checked."""
        if is_arrow(path):
            rows = read_rows(path, IMAGE_CLASSIFICATION, self._data)
            return replace(
                rows,
                rows=[
                    self._checked(ImageFile(path, number, row))
                    for row, number in zip(rows.rows, rows.lines, strict=True)
                ],
            )
        if path.is_dir():
            return self._read_folder(path)
        if not path.is_file():
            raise DataError(f"{path} is not there; set data.train, data.eval or --data")
        if path.suffix.lower() != ".npz":
            raise DataError(f"{path} ends in {path.suffix!r}; images are read from .npz or a folder per class")
        return self._read_npz(path)

    def examples(self, rows: Sequence[Array | ImageFile], labels: Sequence[str]) -> ImageExamples:
        """Make one example of each image; arrays are copied, so that the rest of the file can be freed."""
        copies = [row.copy() if isinstance(row, np.ndarray) else row for row in rows]
        return ImageExamples(copies, labels, self)

    def pixels(self, row: Array | ImageFile) -> torch.Tensor:
        """Convert one image to the model's input: (C, H, W), float32; raises ``DataError``."""
        array, name = (row, "an image") if isinstance(row, np.ndarray) else (self._open(row), str(row))
        if array.dtype == np.uint8:
            array = array.transpose(1, 2, 0) if self._is_channels_first(array.shape) else array
            pixels = torch.from_numpy(self._processor.pixels(array))
        else:
            order = self._size.order(array.shape)
            array = array[None] if order == "hw" else array.transpose(2, 0, 1) if order == "hwc" else array
            pixels = torch.from_numpy(np.array(array, dtype=np.float32))
        if tuple(pixels.shape) != (self._size.channels, self._size.side, self._size.side):
            raise DataError(f"{name} has shape {array.shape}, the model takes {self._size}; convert it")
        if not bool(torch.isfinite(pixels).all()):
            raise DataError(f"{name} has numbers that are not finite; remove it")
        return pixels

    def files_in(self, folder: Path) -> list[ImageFile]:
        """List the images in a folder and below it, with or without a folder for each class; every shape is checked.

        Raises ``DataError``: there are no images, or one does not fit the model.
        """
        pictures = list_pictures(folder, has_classes=False)
        if not pictures.files:
            raise DataError(f"{folder} has no images ({', '.join(PICTURES)})")
        return [self._checked(ImageFile(file)) for file in pictures.files]

    def rows_of(self, path: Path) -> Iterator[tuple[int, ImageFile]]:
        """Yield number and image of the rows of Parquet or Arrow files, with or without classes.

        Raises ``DataError``: bad rows, at the end; or an image does not fit the model.
        """
        account = account_of(path, self._data, is_own=True)
        for row in task_rows(path, IMAGE_CLASSIFICATION, self._data, account, with_targets=False):
            yield row.record[0], self._checked(ImageFile(path, row.record[0], row.value))
        account.check()

    def images_of(self, path: Path) -> Array:
        """Read the images of an npz file, with or without labels; raises ``DataError``."""
        images = _arrays(path, {"data.image": self._image})[self._image]
        if images.ndim == 0 or not len(images):
            raise DataError(f"{path} has images of shape {images.shape}; give it images")
        self._check(path, images.shape[1:], images.dtype)
        return images

    def _read_npz(self, path: Path) -> Rows:
        arrays = _arrays(path, {"data.image": self._image, "data.label": self._label})
        images, labels = arrays[self._image], arrays[self._label]
        if images.ndim == 0 or labels.shape != images.shape[:1] or not len(images):
            raise DataError(f"{path} has images of shape {images.shape} and labels of shape {labels.shape}")
        if labels.dtype.kind not in "iuU":
            raise DataError(f"{path}: labels are {labels.dtype}; give whole numbers or names")
        self._check(path, images.shape[1:], images.dtype)
        return Rows(rows=list(images), labels=tuple(str(label) for label in labels.tolist()))

    def _read_folder(self, path: Path) -> Rows:
        pictures = list_pictures(path)
        if not pictures.files:
            raise DataError(f"{path} has no images; put them into a folder for each class ({', '.join(PICTURES)})")
        rows = [self._checked(ImageFile(file)) for file in pictures.files]
        return Rows(rows=rows, labels=pictures.labels, left_out=pictures.left_out)

    def _checked(self, image: ImageFile) -> ImageFile:
        self._check(image, *self._shape_of(image))
        return image

    def _check(self, path: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if dtype != np.uint8 and dtype.kind != "f":
            raise DataError(f"{path} has pixels of type {dtype}; give uint8 (0 to 255) or normalised floats")
        fits = self._is_made_to_fit(shape) if dtype == np.uint8 else self._size.order(shape)
        if not fits:
            raise DataError(f"{path} has images of shape {shape}, the model takes {self._size}; convert them")

    def _is_made_to_fit(self, shape: tuple[int, ...]) -> bool:
        """Whether the processor's steps turn bytes of this shape into the model's size."""
        plane = (*shape[1:], shape[0]) if self._is_channels_first(shape) else shape
        channels = plane[2:] or (1,)
        is_picture = len(plane) in (2, _CHANNELS_LAST) and channels == (self._size.channels,) and min(plane) > 0
        return is_picture and self._processor.steps.shape_of(plane[0], plane[1]) == (self._size.side, self._size.side)

    def _is_channels_first(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == _CHANNELS_LAST and shape[-1] != self._size.channels and shape[0] == self._size.channels

    def _shape_of(self, image: ImageFile) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Read shape and type of an image; of an ``.npy`` file only the header is read."""
        if image.path.suffix.lower() != ARRAY:
            array = self._processor.decode(image)
            return array.shape, array.dtype
        header = _array(image.path, mmap_mode="r")
        return header.shape, header.dtype

    def _open(self, image: ImageFile) -> Array:
        if image.path.suffix.lower() != ARRAY:
            return self._processor.decode(image)
        return np.asarray(_array(image.path))


class ImageExamples:
    """The ``Examples`` of image classification."""

    def __init__(self, rows: Sequence[Array | ImageFile], labels: Sequence[str], images: Images) -> None:
        self._rows, self._labels, self._images = rows, class_labels(labels), images
        self.scores = SummedScores(len(rows), ClassCounts)
        self.cut_rows, self.left_out = 0, NONE_LEFT_OUT

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def of_rows(self) -> Sequence[int]:
        """One for each image."""
        return [1] * len(self)

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of the chosen images and their class indices; the mask is all ones."""
        pixels = torch.stack([self._images.pixels(self._rows[index]) for index in chosen])
        nothing = torch.zeros(len(chosen), 0, dtype=torch.int64)
        mask = torch.ones(len(chosen), self._images.num_tokens, dtype=torch.int64)
        labels = self._labels(chosen, targets, nothing, mask)
        return Batch(ids=nothing, mask=mask, token_type_ids=nothing, labels=labels, pixels=pixels)

    def width(self, chosen: Sequence[int]) -> int:
        """Number of tokens of every image: its patches and the class token."""
        return self._images.num_tokens


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _array(path: Path, mmap_mode: Literal["r"] | None = None) -> Array:
    """Read an ``.npy`` file, or map it; raises ``DataError``."""
    try:
        loaded: object = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except Exception as error:  # numpy has errors of many kinds for a damaged header, which is a text of Python
        raise DataError(f"{path} is no readable array ({_reason(error)}); write it with numpy.save") from error
    if not isinstance(loaded, np.ndarray):
        raise DataError(f"{path} is an archive of arrays; write a single one with numpy.save")
    return loaded


def _arrays(path: Path, needed: Mapping[str, str]) -> dict[str, Array]:
    """Read arrays of an npz file by name; ``needed`` maps keys of the job to names of arrays."""
    try:
        check_archive(path, NPZ_REMEDY)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for key, name in needed.items():
                if name not in arrays:
                    raise DataError(f"{path} has no array {name!r}; it has {', '.join(arrays)}; set {key}")
            found = {name: arrays[name] for name in needed.values()}
    except DataError:
        raise
    except Exception as error:  # as of one array, and of a damaged archive
        raise DataError(f"{path} is no readable npz file ({_reason(error)}); write it with numpy.savez") from error
    if odd := next((name for name, value in found.items() if not isinstance(value, np.ndarray)), ""):
        raise DataError(f"{path}: {odd!r} is no array; write it with numpy.savez")
    return found


Array = np.ndarray[Any, np.dtype[Any]]

_GREY, _COLOUR = "L", "RGB"
_GREY_MODES: Final = ("1", "L", "LA", "La")


class ImageProcessor:
    """Applies the steps of a model's preprocessor."""

    def __init__(self, steps: ImageSteps) -> None:
        self.steps = steps

    def decode(self, image: ImageFile) -> Array:
        """Decode a picture to bytes, (H, W) or (H, W, 3); raises ``DataError``."""
        with opened_picture(image.path, image.content) as opened:
            library: Any = importlib.import_module("PIL.Image")
            operations: Any = importlib.import_module("PIL.ImageOps")
            return self._bytes(str(image), operations.exif_transpose(opened), library)

    def pixels(self, image: Array) -> Array:
        """Apply all steps to bytes (H, W) or (H, W, C); return (C, H, W), float32."""
        steps, plane = self.steps, image if image.ndim == 3 else image[:, :, None]
        if steps.size is not None:
            plane = _resized(plane, steps.scaled(plane.shape[0], plane.shape[1]), steps.resample)
        if steps.crop is not None:
            plane = _centre(plane, *steps.crop)
        scaled = (plane.astype(np.float64) * steps.factor).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32) for values in (steps.mean, steps.std))
        return np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1))

    def _bytes(self, path: str, picture: Any, library: Any) -> Array:
        mode_needed = _GREY if self.steps.channels == 1 else _COLOUR
        mode, converts = picture.mode, self.steps.converts
        if mode.startswith("I;16"):
            grey = (np.asarray(picture) >> 8).astype(np.uint8)
            return grey if self.steps.channels == 1 else np.stack([grey] * self.steps.channels, axis=-1)
        if mode == mode_needed:
            return np.asarray(picture)
        is_grey = mode in _GREY_MODES
        if converts is False or mode in ("I", "F") or (mode_needed == _GREY and not is_grey):
            raise DataError(
                f"{path} is a picture of mode {mode!r}, and the model takes {self.steps.channels} channel"
                f"{'s' if self.steps.channels > 1 else ''} of bytes ({mode_needed}); convert it, or give arrays as .npy"
            )
        if converts is None and (mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info):
            picture = picture.convert("RGBA")
            white = library.new("RGBA", picture.size, "white")
            picture = library.alpha_composite(white, picture)
        return np.asarray(picture.convert(mode_needed))


def _resized(plane: Array, size: tuple[int, int], resample: int) -> Array:
    """Scale bytes (H, W, C) as Pillow does."""
    library: Any = importlib.import_module("PIL.Image")
    picture = library.fromarray(plane[:, :, 0] if plane.shape[2] == 1 else plane)
    scaled = np.asarray(picture.resize((size[1], size[0]), resample=resample))
    return scaled if scaled.ndim == 3 else scaled[:, :, None]


def _centre(plane: Array, height: int, width: int) -> Array:
    """Cut the centre out of (H, W, C); a smaller picture is padded with 0."""
    has_height, has_width = plane.shape[:2]
    top, left = (has_height - height) // 2, (has_width - width) // 2
    if top >= 0 and left >= 0:
        return plane[top : top + height, left : left + width]
    larger = np.zeros((max(height, has_height), max(width, has_width), plane.shape[2]), plane.dtype)
    first_row, first_column = math.ceil((len(larger) - has_height) / 2), math.ceil((larger.shape[1] - has_width) / 2)
    larger[first_row : first_row + has_height, first_column : first_column + has_width] = plane
    top, left = top + first_row, left + first_column
    return larger[max(0, top) : top + height, max(0, left) : left + width]
