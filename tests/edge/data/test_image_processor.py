"""Pictures as viewers show them, and the steps of transformers' slow image processors, to 1e-6."""

from __future__ import annotations

import importlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.data.image_processor import FILE, ImageProcessor
from edge.data.images import Images
from ringtune.errors import DataError, ModelError
from tests.support import hand_ring as ring
from tests.support.tiny_families import write_family

pillow = pytest.importorskip("PIL.Image")
SIDE = 12
RED, GREEN = (255, 0, 0), (10, 240, 30)


def processor(folder: Path, values: dict[str, Any] | None = None, *, channels: int = 3) -> ImageProcessor:
    """The steps of a preprocessor's file; None = there is none."""
    if values is not None:
        (folder / FILE).write_text(json.dumps(values))
    return ImageProcessor.of_folder(folder, channels=channels, side=SIDE)


def picture(width: int, height: int, *, seed: int = 0) -> Any:
    """Random colours."""
    return pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


SQUARE = {"height": SIDE, "width": SIDE}
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("ViTImageProcessor", {}),
    ("ViTImageProcessor", {"resample": 3, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}),
    ("ViTImageProcessor", {"resample": 0, "do_normalize": False, "rescale_factor": 1 / 127.5}),
    ("ViTImageProcessor", {"do_rescale": False, "do_normalize": False, "do_convert_rgb": True}),
    ("ViTImageProcessor", {"do_rescale": False}),
    ("DeiTImageProcessor", {"size": {"height": 17, "width": 16}, "do_center_crop": True, "crop_size": SQUARE}),
    ("DeiTImageProcessor", {"do_resize": False, "do_center_crop": True, "crop_size": SQUARE}),
    ("CLIPImageProcessor", {"size": {"shortest_edge": 14}, "do_center_crop": True, "crop_size": SQUARE, "resample": 3}),
    ("CLIPImageProcessor", {"size": 13, "do_center_crop": True, "crop_size": SIDE, "resample": 2}),
]


@pytest.mark.parametrize(("kind", "values"), STEPS)
@pytest.mark.parametrize("size", [(SIDE, SIDE), (31, 18), (9, 23), (5, 5)])
def test_steps_are_those_of_transformers(
    tmp_path: Path, kind: str, values: dict[str, Any], size: tuple[int, int]
) -> None:
    """Every key that is carried out, of large and small pictures, upright and lying; 1e-6."""
    family = kind.removesuffix("ImageProcessor").lower()
    library = importlib.import_module(f"transformers.models.{family}.image_processing_{family}")
    needed = {"size": SQUARE, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **values}
    wanted = getattr(library, kind)(**needed)
    image = picture(*size)
    expected = wanted(images=image, return_tensors="np", input_data_format="channels_last")["pixel_values"][0]
    found = processor(tmp_path, {"image_processor_type": kind, **needed}).pixels(np.asarray(image))
    assert found.shape == expected.shape == (3, SIDE, SIDE)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop_pct": 0.875}, r"preprocessor_config.json: crop_pct = 0.875 is not carried out"),
        ({"do_pad": True, "do_reduce_labels": True}, "do_pad = True, do_reduce_labels = True is not carried out"),
        ({"image_processor_type": "SiglipImageProcessor"}, "'SiglipImageProcessor' is not built"),
        ({"size": {"longest_edge": 9}}, "size = .* is not carried out"),
        ({"size": {"height": 13, "width": 12}}, "it makes pictures of 13 x 12, and image_size in config.json is 12"),
        ({"resample": 9}, "resample = 9 is none of Pillow's filters"),
        ({"do_rescale": 1}, "do_rescale = 1 has to be true or false"),
        ({"rescale_factor": "x"}, "rescale_factor = 'x' has to be a number"),
    ],
)
def test_step_that_is_not_carried_out_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    """By name, and nothing is dropped."""
    with pytest.raises(ModelError, match=message):
        processor(tmp_path, values)


MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I;16", "I", "F"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_picture_of_every_mode_is_shown_or_refused_by_name(tmp_path: Path, mode: str, channels: int) -> None:
    """Grey stays grey, colours stay colours within the loss of their mode; what no viewer shows alike is refused."""
    shown = {"1", "L", "LA", "I;16"} if channels == 1 else set(MODES) - {"I", "F"}
    grey = mode in ("1", "L", "LA", "I;16", "I", "F")
    made = pillow.new("L", (SIDE, SIDE), 255) if grey else pillow.new("RGB", (SIDE, SIDE), RED)
    if mode == "I;16":
        made = pillow.fromarray(np.full((SIDE, SIDE), 65535, dtype=np.uint16))
    elif mode == "LAB":
        made = pillow.new("LAB", (SIDE, SIDE), (50, 20, 30))
    elif mode != "PA":
        made = made.convert(mode)
    else:
        made = made.convert("P").convert("PA")
    name = tmp_path / f"x.{'tif' if mode in ('CMYK', 'YCbCr', 'LAB', 'F', 'I') else 'png'}"
    try:
        made.save(name)
    except OSError:  # no format holds the mode, so no file has it
        assert mode in ("PA", "HSV")
        return
    if mode not in shown:
        with pytest.raises(DataError, match=rf"x\.\w+ is a picture of mode .{mode}"):
            processor(tmp_path, channels=channels).decode(name)
        return
    found = processor(tmp_path, channels=channels).decode(name)
    assert found.dtype == np.uint8 and found.shape == ((SIDE, SIDE) if channels == 1 else (SIDE, SIDE, 3))
    colour = made.convert("RGB").getpixel((0, 0)) if mode == "LAB" else RED
    expected = np.array([255] * channels if grey else colour)
    np.testing.assert_allclose(found.reshape(-1, channels)[0], expected, atol=8)


def test_transparent_pixels_are_white_as_in_viewers(tmp_path: Path) -> None:
    """Also those of a palette; with ``do_convert_rgb`` they are what transformers makes of them."""
    made = pillow.new("RGBA", (SIDE, SIDE), (*RED, 255))
    made.putpixel((0, 0), (0, 0, 0, 0))
    made.save(tmp_path / "a.png")
    palette = pillow.new("P", (SIDE, SIDE), 1)
    palette.putpalette([0, 0, 0, *GREEN])
    palette.putpixel((0, 0), 0)
    palette.save(tmp_path / "b.png", transparency=0)
    for name, colour in (("a.png", RED), ("b.png", GREEN)):
        found = processor(tmp_path).decode(tmp_path / name)
        assert found[0, 0].tolist() == [255, 255, 255] and found[5, 5].tolist() == list(colour)
    plain = processor(tmp_path, {"do_convert_rgb": True}).decode(tmp_path / "a.png")
    assert plain[0, 0].tolist() == [0, 0, 0]
    with pytest.raises(DataError, match=r"a\.png is a picture of mode 'RGBA', and the model takes 3 channels of bytes"):
        processor(tmp_path, {"do_convert_rgb": False}).decode(tmp_path / "a.png")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_picture_is_turned_as_its_exif_says(tmp_path: Path, orientation: int) -> None:
    """All eight orientations, by Pillow's own inverse."""
    upright = picture(6, 9)
    exif = pillow.Exif()
    exif[0x0112] = orientation
    inverse = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # methods of Image.transpose that undo the orientation
    stored = upright if orientation == 1 else upright.transpose(pillow.Transpose(inverse[orientation]))
    stored.save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(processor(tmp_path).decode(tmp_path / "x.png"), np.asarray(upright))


def large_png(side: int) -> bytes:
    """The beginning of a black and white picture of so many pixels, which is all that is read of it."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", zlib.compress(b""))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def test_folder_of_pictures_passes_over_what_is_hidden_and_refuses_what_is_too_large(tmp_path: Path) -> None:
    """Copies of Jupyter, files of macOS and others are counted; a bomb is named, before it is unpacked."""
    model = write_family(tmp_path / "model", "vit", num_blocks=1, num_channels=3)
    rows = tmp_path / "rows"
    for name in ("cat", "dog", ".ipynb_checkpoints"):
        (rows / name).mkdir(parents=True)
        picture(SIDE, SIDE).save(rows / name / "a.png")
    (rows / "cat" / "._a.png").write_bytes(b"no picture")
    (rows / "cat" / "notes.txt").write_text("x")
    source = Images(ring.make_job(model, model__task="image-classification"), model)
    found = source.read(rows)
    assert found.labels == ("cat", "dog")
    assert sorted(found.left_out.values()) == [1, 2], "a note, and two that are hidden"
    (rows / "dog" / "b.png").write_bytes(large_png(20_000))
    with pytest.raises(DataError, match=r"b\.png is too large a picture .*400000000 pixels"):
        source.read(rows)
