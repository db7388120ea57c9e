"""Read labelled images: an npz file with two arrays, or a folder with a folder for each class.

Bytes become what the model takes as ``preprocessor_config.json`` says (``image_processor``); floating-point arrays are
taken as they are, and have to have the model's size.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from edge.data.examples import Classified
from edge.data.image_processor import Array, ImageProcessor
from edge.data.tokens import IGNORED, Batch
from ringtune.errors import DataError, ModelError
from ringtune.files.pictures import PICTURES, list_pictures
from ringtune.jobs.job import Job
from ringtune.jobs.rows import Rows
from ringtune.models.folder import read_config
from ringtune.models.image import image_tokens

FRAMES = "further frames of moving pictures and pages of documents, of which the first is taken"
_ARRAY = ".npy"
_CHANNELS_LAST = 3


class ImageSize(NamedTuple):
    """The number of channels and the side, in pixels, of the square images that the model takes."""

    channels: int
    side: int

    def order(self, shape: tuple[int, ...]) -> str:
        """Order of the axes of an array of this shape: ``hw``, ``hwc`` or ``chw``; empty if it does not fit.

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


class ImageFile(NamedTuple):
    """An image that is read when it is needed."""

    path: Path


class Images:
    """The ``Source`` of image classification.

    Args:
        job: names of the arrays.
        folder: of the model.

    Raises:
        ModelError: the model takes no images, or its preprocessor is not readable.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        config = read_config(folder)
        if "num_channels" not in config:
            raise ModelError(f"{folder}: model_type {config['model_type']!r} takes no images")
        self._image, self._label = job.data.image, job.data.label
        self._size = ImageSize(config["num_channels"], config["image_size"])
        self._num_tokens = image_tokens(config)
        self._processor = ImageProcessor.of_folder(folder, channels=self._size.channels, side=self._size.side)

    def read(self, path: Path) -> Rows:
        """Read images with their class names, and check every image's shape."""
        if path.is_dir():
            return self._read_folder(path)
        if not path.is_file():
            raise DataError(f"{path} is not there; set data.train, data.eval or --data")
        if path.suffix.lower() != ".npz":
            raise DataError(f"{path} ends in {path.suffix!r}; images are read from .npz or a folder per class")
        return self._read_npz(path)

    def examples(self, rows: Sequence[Array | ImageFile], labels: Sequence[str]) -> ImageExamples:
        """Make one example of each image; arrays are copied, so that the rest of the file can be dropped."""
        own = [row.copy() if isinstance(row, np.ndarray) else row for row in rows]
        return ImageExamples(own, labels, self)

    def pixels(self, row: Array | ImageFile) -> torch.Tensor:
        """Convert one image to what the model takes: (C, H, W), float32.

        Raises:
            DataError: its file changed since it was checked, or it has numbers that are not finite.
        """
        array, name = (row, "an image") if isinstance(row, np.ndarray) else (self._open(row.path), str(row.path))
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

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an image: its patches and the class token."""
        return self._num_tokens

    def files_in(self, folder: Path) -> list[ImageFile]:
        """List the images in a folder and below it, with or without a folder for each class; every shape is checked.

        Raises:
            DataError: there are none, or one has another shape than the model takes.
        """
        found = list_pictures(folder, has_classes=False)
        for file in found.files:
            self._check(file, *self._shape_of(file))
        if not found.files:
            raise DataError(f"{folder} has no images ({', '.join(PICTURES)})")
        return [ImageFile(file) for file in found.files]

    def images_of(self, path: Path) -> Array:
        """Read the images of an npz file, which may be without labels.

        Raises:
            DataError: it can't be used, or has no such array, or of another shape than the model takes.
        """
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
        found = list_pictures(path)
        more_frames = 0
        for file in found.files:
            self._check(file, *self._shape_of(file))
            more_frames += 0 if file.suffix.lower() == _ARRAY else self._processor.frames(file) - 1
        if not found.files:
            raise DataError(f"{path} has no images; put them into a folder for each class ({', '.join(PICTURES)})")
        left_out = {**found.passed_over, **({FRAMES: more_frames} if more_frames else {})}
        return Rows(rows=[ImageFile(file) for file in found.files], labels=found.labels, left_out=left_out)

    def _check(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if dtype != np.uint8 and dtype.kind != "f":
            raise DataError(f"{path} has pixels of type {dtype}; give uint8 (0 to 255) or normalised floats")
        fits = bool(self._size.order(shape)) or (dtype == np.uint8 and self._is_made_to_fit(shape))
        if not fits:
            raise DataError(f"{path} has images of shape {shape}, the model takes {self._size}; convert them")

    def _is_made_to_fit(self, shape: tuple[int, ...]) -> bool:
        """Whether bytes of this shape have the model's size after the steps of its processor."""
        plane = (*shape[1:], shape[0]) if self._is_channels_first(shape) else shape
        channels = plane[2:] or (1,)
        is_picture = len(plane) in (2, _CHANNELS_LAST) and channels == (self._size.channels,) and min(plane) > 0
        return is_picture and self._processor.shape_of(plane[0], plane[1]) == (self._size.side, self._size.side)

    def _is_channels_first(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == _CHANNELS_LAST and shape[-1] != self._size.channels and shape[0] == self._size.channels

    def _shape_of(self, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Read shape and type of an image file; of an array only the header is read."""
        if path.suffix.lower() != _ARRAY:
            array = self._processor.decode(path)
            return array.shape, array.dtype
        try:
            header = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} is no readable array ({error}); write it with numpy.save") from error
        return header.shape, header.dtype

    def _open(self, path: Path) -> Array:
        if path.suffix.lower() != _ARRAY:
            return self._processor.decode(path)
        try:
            return np.asarray(np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} is not readable ({error}); remove it") from error


class ImageExamples(Classified):
    """The ``Examples`` of image classification.

    Args:
        rows: arrays, or files to read.
        labels: class name of each.
        images: how one becomes pixels.
    """

    def __init__(self, rows: Sequence[Array | ImageFile], labels: Sequence[str], images: Images) -> None:
        self._rows = rows
        self._labels = labels
        self._images = images

    def __len__(self) -> int:
        """Number of images."""
        return len(self._rows)

    @property
    def cut_rows(self) -> int:
        """None: pictures have one size."""
        return 0

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of the chosen images and the indices of their classes; the mask is all ones."""
        pixels = torch.stack([self._images.pixels(self._rows[index]) for index in chosen])
        labels = [targets.get(self._labels[index], IGNORED) for index in chosen]
        nothing = torch.zeros(len(chosen), 0, dtype=torch.int64)
        return Batch(
            ids=nothing,
            mask=torch.ones(len(chosen), self._images.num_tokens, dtype=torch.int64),
            token_type_ids=nothing,
            labels=torch.tensor(labels, dtype=torch.int64),
            pixels=pixels,
        )

    def width(self, chosen: Sequence[int]) -> int:
        """Number of tokens of every image: its patches and the class token."""
        return self._images.num_tokens


def _arrays(path: Path, needed: Mapping[str, str]) -> dict[str, Array]:
    """Read arrays of an npz file.

    Args:
        path: of the file.
        needed: key of the job -> name of an array.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for key, name in needed.items():
                if name not in arrays:
                    raise DataError(f"{path} has no array {name!r}; it has {', '.join(arrays)}; set {key}")
            return {name: arrays[name] for name in needed.values()}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DataError(f"{path} is no readable npz file ({error}); write it with numpy.savez") from error
