"""Pictures as arrays, and arrays as a model takes them: what ``preprocessor_config.json`` says, step by step.

A file is decoded as viewers show it: turned by its EXIF orientation, its colours as RGB, what is transparent on white.
The steps are those of the slow image processors of transformers, in their order: convert to RGB, resize, cut the
centre out, rescale, normalise. A key or a class of processor that is not carried out is refused by name.

Source: transformers 4.57, ``image_transforms.py`` and ``models/{vit,deit,clip,bit}/image_processing_*.py``.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ringtune.errors import DataError, ModelError
from ringtune.files.given_files import read_json

Array = np.ndarray[Any, np.dtype[Any]]

FILE: Final = "preprocessor_config.json"
_SQUARE: Final = ("ViT", "DeiT")
_SHORTEST: Final = ("CLIP", "Bit")
_KINDS: Final = (*_SQUARE, *_SHORTEST)
_ENDS: Final = ("ImageProcessorFast", "ImageProcessor", "FeatureExtractor")
_NAMES: Final = ("image_processor_type", "feature_extractor_type", "processor_class", "_processor_class", "data_format")
_BILINEAR: Final = 2
_FILTERS: Final = range(6)
_MOVING: Final = ("GIF", "PNG", "TIFF", "WEBP")
_GREY, _COLOUR = "L", "RGB"
_GREY_MODES: Final = ("1", "L", "LA", "La")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessor:
    """The steps from an array of bytes (H, W, C) to what the model takes (C, H, W), float32.

    Attributes:
        channels: of the model.
        size: (height, width), or the shorter edge, to which a picture is scaled; None = it is not.
        resample: number of Pillow's filter.
        crop: (height, width) of the centre that is left; None = all.
        factor: by which bytes are multiplied.
        mean: subtracted from each channel.
        std: by which each channel is divided.
        converts: whether a picture of another mode becomes RGB as Pillow converts it (True), or is refused (False);
            None = as viewers show it.
    """

    channels: int
    size: tuple[int, int] | int | None
    resample: int
    crop: tuple[int, int] | None
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    converts: bool | None

    @staticmethod
    def of_folder(folder: Path, *, channels: int, side: int) -> ImageProcessor:
        """Read the steps of a model; without a file bytes become [-1, 1], and pictures have to have the model's size.

        Args:
            folder: of the model.
            channels: that it takes.
            side: of the square pictures that it takes, in pixels.

        Raises:
            ModelError: the file is not readable, or says something that is not carried out.
        """
        path = folder / FILE
        if not path.is_file():
            half = (0.5,) * channels
            values: Mapping[str, Any] = {"do_resize": False, "image_mean": half, "image_std": half}
        else:
            try:
                values = dict(read_json(path))
            except (OSError, ValueError, TypeError) as error:
                raise ModelError(f"{path} is not readable ({error}); remove it or fetch the model again") from error
        try:
            return _of_values(values, channels, side)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    def decode(self, path: Path) -> Array:
        """Read a picture's bytes, (H, W) or (H, W, 3).

        Raises:
            DataError: it is no picture, too large, or of a mode that is not shown by all viewers alike.
        """
        try:
            library: Any = importlib.import_module("PIL.Image")
            operations: Any = importlib.import_module("PIL.ImageOps")
        except ImportError as error:
            raise DataError(
                f"{path} needs the package 'pillow' to be read; install it, or give .npy or .npz"
            ) from error
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", library.DecompressionBombWarning)
                with library.open(path) as opened:
                    return self._bytes(path, operations.exif_transpose(opened), library)
        except library.DecompressionBombError as error:
            raise DataError(f"{path} is too large a picture ({error}); scale it down or remove it") from error
        except (OSError, ValueError, SyntaxError, TypeError, EOFError) as error:
            raise DataError(f"{path} is no readable picture ({error}); remove it") from error

    def frames(self, path: Path) -> int:
        """Count the frames or pages of a picture that was decoded; only the first is taken.

        Further pictures in a photo of a phone (MPO), such as its preview, are no frames.
        """
        library: Any = importlib.import_module("PIL.Image")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", library.DecompressionBombWarning)
            with library.open(path) as opened:
                return int(getattr(opened, "n_frames", 1)) if opened.format in _MOVING else 1

    def pixels(self, image: Array) -> Array:
        """Carry the steps out.

        Args:
            image: (H, W) or (H, W, C) of bytes.

        Returns:
            (C, H, W), float32.
        """
        plane = image if image.ndim == 3 else image[:, :, None]
        if self.size is not None:
            plane = _resized(plane, self._target(plane.shape[0], plane.shape[1]), self.resample)
        if self.crop is not None:
            plane = _centre(plane, *self.crop)
        scaled = (plane.astype(np.float64) * self.factor).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32) for values in (self.mean, self.std))
        return np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1))

    def shape_of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture of this size after the steps."""
        return self.crop or (self._target(height, width) if self.size is not None else (height, width))

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size or (height, width)
        short, long = min(height, width), max(height, width)
        scaled = int(self.size * long / short)
        return (scaled, self.size) if height > width else (self.size, scaled)

    def _bytes(self, path: Path, picture: Any, library: Any) -> Array:
        wanted = _GREY if self.channels == 1 else _COLOUR
        mode = picture.mode
        if mode.startswith("I;16"):
            grey = (np.asarray(picture) >> 8).astype(np.uint8)
            return grey if self.channels == 1 else np.stack([grey] * self.channels, axis=-1)
        if mode == wanted:
            return np.asarray(picture)
        is_grey = mode in _GREY_MODES
        if self.converts is False or mode in ("I", "F") or (wanted == _GREY and not is_grey):
            raise DataError(
                f"{path} is a picture of mode {mode!r}, and the model takes {self.channels} channel"
                f"{'s' if self.channels > 1 else ''} of bytes ({wanted}); convert it, or give arrays as .npy"
            )
        if self.converts is None and (mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info):
            picture = picture.convert("RGBA")
            white = library.new("RGBA", picture.size, "white")
            picture = library.alpha_composite(white, picture)
        return np.asarray(picture.convert(wanted))


def _of_values(values: Mapping[str, Any], channels: int, side: int) -> ImageProcessor:
    kind = _kind(values)
    known = dict(values)
    for name in (*_NAMES, "default_to_square"):
        known.pop(name, None)
    is_square = values.get("default_to_square", kind not in _SHORTEST)
    does = {name: _flag(known, f"do_{name}", default=default) for name, default in _STEPS.items()}
    size = _size(known.pop("size", None) or side, "size", is_square=bool(is_square))
    crop = _size(known.pop("crop_size", None) or side, "crop_size", is_square=True)
    if isinstance(crop, int):
        raise ModelError(f"crop_size = {values['crop_size']} has to have a height and a width")
    resample = known.pop("resample", _BILINEAR)
    if resample not in _FILTERS or isinstance(resample, bool):
        raise ModelError(f"resample = {resample!r} is none of Pillow's filters, 0 to 5")
    factor = known.pop("rescale_factor", 1 / 255)
    if not _is_number(factor):
        raise ModelError(f"rescale_factor = {factor!r} has to be a number")
    mean = _of_channels(known, "image_mean", channels, does["normalize"], 0.0)
    std = _of_channels(known, "image_std", channels, does["normalize"], 1.0)
    if min(std) <= 0:
        raise ModelError("image_std has to be above 0")
    if unknown := sorted(name for name, value in known.items() if value is not None and value is not False):
        raise ModelError(
            f"{', '.join(f'{name} = {known[name]!r}' for name in unknown)} is not carried out; prepare the pictures "
            "yourself and remove the key, or use another model"
        )
    found = ImageProcessor(
        channels=channels,
        size=size if does["resize"] else None,
        resample=int(resample),
        crop=crop if does["center_crop"] else None,
        factor=float(factor) if does["rescale"] else 1.0,
        mean=mean,
        std=std,
        converts=does["convert_rgb"],
    )
    shape = found.crop or (found.size if isinstance(found.size, tuple) else None)
    if shape not in (None, (side, side)):
        raise ModelError(f"it makes pictures of {shape[0]} x {shape[1]}, and image_size in config.json is {side}")
    return found


_STEPS: Final[Mapping[str, bool | None]] = {
    "resize": True,
    "center_crop": False,
    "rescale": True,
    "normalize": True,
    "convert_rgb": None,
}
"""Step -> whether it is done where the file does not say."""


def _kind(values: Mapping[str, Any]) -> str:
    """The model that the class of the processor is called after; refused where its steps are not known."""
    name = str(values.get("image_processor_type") or values.get("feature_extractor_type") or "ViTImageProcessor")
    kind = next((name.removesuffix(end) for end in _ENDS if name.endswith(end)), name)
    if kind not in _KINDS:
        raise ModelError(f"image_processor_type = {name!r} is not built; built are those of {', '.join(_KINDS)}")
    return kind


def _flag(values: dict[str, Any], name: str, *, default: bool | None) -> bool | None:
    value = values.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{name} = {value!r} has to be true or false")
    return default if value is None else value


def _size(value: Any, name: str, *, is_square: bool) -> tuple[int, int] | int:
    """A size as transformers writes it: a number, two, or a table with height and width, or the shortest edge."""
    found: Any = value
    if isinstance(value, Mapping):
        found = (value.get("height"), value.get("width")) if value.keys() == {"height", "width"} else None
        if value.keys() == {"shortest_edge"}:
            found, is_square = value["shortest_edge"], False
    elif _is_count(value) and is_square:
        found = (value, value)
    if isinstance(found, tuple | list) and len(found) == 2 and all(map(_is_count, found)):
        return int(found[0]), int(found[1])
    if _is_count(found):
        return int(found)
    raise ModelError(f"{name} = {value!r} is not carried out; give a height and a width, or a shortest_edge")


def _of_channels(
    values: dict[str, Any], name: str, channels: int, is_done: bool | None, plain: float
) -> tuple[float, ...]:
    value = values.pop(name, None)
    if not is_done:
        return (plain,) * channels
    if value is None:
        value = (0.5,) * channels
    if _is_number(value):
        value = (value,) * channels
    if not isinstance(value, list | tuple) or len(value) != channels or not all(map(_is_number, value)):
        raise ModelError(f"{name} has to be {channels} numbers, but is {value}")
    return tuple(map(float, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _resized(plane: Array, size: tuple[int, int], resample: int) -> Array:
    """Scale bytes (H, W, C) as Pillow does."""
    library: Any = importlib.import_module("PIL.Image")
    picture = library.fromarray(plane[:, :, 0] if plane.shape[2] == 1 else plane)
    scaled = np.asarray(picture.resize((size[1], size[0]), resample=resample))
    return scaled if scaled.ndim == 3 else scaled[:, :, None]


def _centre(plane: Array, height: int, width: int) -> Array:
    """Cut the centre out of (H, W, C); what a smaller picture lacks is 0."""
    has_height, has_width = plane.shape[:2]
    top, left = (has_height - height) // 2, (has_width - width) // 2
    if top >= 0 and left >= 0:
        return plane[top : top + height, left : left + width]
    larger = np.zeros((max(height, has_height), max(width, has_width), plane.shape[2]), plane.dtype)
    first_row, first_column = math.ceil((len(larger) - has_height) / 2), math.ceil((larger.shape[1] - has_width) / 2)
    larger[first_row : first_row + has_height, first_column : first_column + has_width] = plane
    top, left = top + first_row, left + first_column
    return larger[max(0, top) : top + height, max(0, left) : left + width]
