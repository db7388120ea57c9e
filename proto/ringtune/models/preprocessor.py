"""Steps from a picture to pixels, read from ``preprocessor_config.json`` without torch.

The steps are those of transformers' slow image processors, in this order: convert to RGB, resize, crop the centre,
rescale, normalise. A key or processor class that is not supported is refused by name.

Source: transformers 4.57, ``image_transforms.py`` and ``models/{vit,deit,clip,bit}/image_processing_*.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringtune.errors import ModelError
from ringtune.storage.strict import read_json

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
_SQUARE: Final = ("ViT", "DeiT")
_SHORTEST: Final = ("CLIP", "Bit")
_KINDS: Final = (*_SQUARE, *_SHORTEST)
_ENDS: Final = ("ImageProcessorFast", "ImageProcessor", "FeatureExtractor")
_NAMES: Final = ("image_processor_type", "feature_extractor_type", "processor_class", "_processor_class", "data_format")
_BILINEAR: Final = 2
_FILTERS: Final = range(6)
_MAX_CHANNELS: Final = 4096
_MAX_SCALED: Final = 1 << 27
"""Most pixels of a picture between resizing and cropping; Pillow opens pictures of some 1.8e8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSteps:
    """Steps from an array of bytes (H, W, C) to the model's input (C, H, W), float32.

    Attributes:
        size: (height, width), or length of the shorter edge, to resize to; None = no resizing.
        resample: number of Pillow's filter.
        crop: (height, width) of the centre crop; None = no crop.
        factor: for the bytes.
        converts: for a picture of another mode: True = convert to RGB as Pillow does; False = refuse; None = convert as
            viewers show it.
    """

    channels: int
    size: tuple[int, int] | int | None
    resample: int
    crop: tuple[int, int] | None
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    converts: bool | None

    def shape_of(self, height: int, width: int) -> tuple[int, int] | None:
        """Height and width after all steps; None if the picture would be too large before it is cropped."""
        scaled = self.scaled(height, width) if self.size is not None else (height, width)
        return None if math.prod(scaled) > max(_MAX_SCALED, height * width) else self.crop or scaled

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing."""
        if not isinstance(self.size, int):
            return self.size or (height, width)
        short, long = min(height, width), max(height, width)
        scaled = int(self.size * long / short)
        return (scaled, self.size) if height > width else (self.size, scaled)


def read_image_steps(folder: Path, *, channels: int, side: int) -> ImageSteps:
    """Read the steps of a model; without a file bytes map to [-1, 1], and pictures must have the model's size."""
    if channels > _MAX_CHANNELS:
        raise ModelError(f"{folder}: pictures of {channels:,} channels are not read; the most are {_MAX_CHANNELS:,}")
    path = folder / PREPROCESSOR_FILE
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


def _of_values(values: Mapping[str, Any], channels: int, side: int) -> ImageSteps:
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
    steps = ImageSteps(
        channels=channels,
        size=size if does["resize"] else None,
        resample=int(resample),
        crop=crop if does["center_crop"] else None,
        factor=float(factor) if does["rescale"] else 1.0,
        mean=mean,
        std=std,
        converts=does["convert_rgb"],
    )
    shape = steps.crop or (steps.size if isinstance(steps.size, tuple) else None)
    if shape not in (None, (side, side)):
        raise ModelError(
            f"it makes pictures of {shape[0]} x {shape[1]} pixels, config.json has image_size {side}; make them equal"
        )
    return steps


_STEPS: Final[Mapping[str, bool | None]] = {
    "resize": True,
    "center_crop": False,
    "rescale": True,
    "normalize": True,
    "convert_rgb": None,
}
"""Step -> default."""


def _kind(values: Mapping[str, Any]) -> str:
    """Return the prefix of the processor's class name, such as ``ViT``; refuse an unsupported one."""
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
    """Parse a size in transformers' forms: a number, a pair, or a table with height and width, or shortest_edge."""
    size: Any = value
    if isinstance(value, Mapping):
        size = (value.get("height"), value.get("width")) if value.keys() == {"height", "width"} else None
        if value.keys() == {"shortest_edge"}:
            size, is_square = value["shortest_edge"], False
    elif _is_count(value) and is_square:
        size = (value, value)
    if isinstance(size, tuple | list) and len(size) == 2 and all(map(_is_count, size)):
        return int(size[0]), int(size[1])
    if _is_count(size):
        return int(size)
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
