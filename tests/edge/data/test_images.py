"""Images: what is read, pictures as viewers show them, and pixels as the preprocessor says."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from edge.data.dataset import OwnerDataset
from edge.data.images import ImageExamples, ImageFile, ImageProcessor, Images
from edge.profiler.timing import Timer
from ringtune.costs.model_facts import model_facts
from ringtune.errors import DataError, ModelError
from ringtune.job.rows import FRAMES, LINKED, NO_PICTURE
from ringtune.models.preprocessor import PREPROCESSOR_FILE, read_image_steps
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.tiny_data import make_images, write_images
from tests.support.tiny_families import IMAGE_TOKENS, write_family

pillow = pytest.importorskip("PIL.Image")
SIDE = 12
ORDER = (0, 2, 4, 1, 3)
RED, GREEN = (255, 0, 0), (10, 240, 30)


def processor(folder: Path, values: dict[str, Any] | None = None, *, channels: int = 3) -> ImageProcessor:
    """The steps of a preprocessor's file; None = there is none."""
    if values is not None:
        (folder / PREPROCESSOR_FILE).write_text(json.dumps(values))
    return ImageProcessor(read_image_steps(folder, channels=channels, side=SIDE))


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


def test_steps_are_those_of_transformers(tmp_path: Path) -> None:
    """Every key that is carried out, of large and small pictures, upright and lying; 1e-6."""
    for (kind, values), size in itertools.product(STEPS, ((SIDE, SIDE), (31, 18), (9, 23), (5, 5))):
        family = kind.removesuffix("ImageProcessor").lower()
        library, name = importlib.import_module(f"transformers.models.{family}.image_processing_{family}"), kind
        if hasattr(library, "TorchvisionBackend"):  # in transformers 5, where Pillow's steps are another class
            library = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
            name = f"{kind}Pil"
        needed = {"size": SQUARE, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **values}
        image = picture(*size)
        wanted = getattr(library, name)(**needed)
        expected = wanted(images=image, return_tensors="np", input_data_format="channels_last")["pixel_values"][0]
        found = processor(tmp_path, {"image_processor_type": kind, **needed}).pixels(np.asarray(image))
        assert found.shape == expected.shape == (3, SIDE, SIDE)
        bound = 1e-6 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=f"{kind} {values} {size}")


def test_step_that_is_not_carried_out_is_refused(tmp_path: Path) -> None:
    """By name, and nothing is dropped."""
    for values, message in (
        ({"crop_pct": 0.875}, r"preprocessor_config.json: crop_pct = 0.875 is not carried out"),
        ({"do_pad": True, "do_reduce_labels": True}, "do_pad = True, do_reduce_labels = True is not carried out"),
        ({"image_processor_type": "SiglipImageProcessor"}, "'SiglipImageProcessor' is not built"),
        ({"size": {"longest_edge": 9}}, "size = .* is not carried out"),
        ({"size": {"height": 13, "width": 12}}, "it makes pictures of 13 x 12 pixels, config.json has image_size 12"),
        ({"resample": 9}, "resample = 9 is none of Pillow's filters"),
        ({"do_rescale": 1}, "do_rescale = 1 has to be true or false"),
        ({"rescale_factor": "x"}, "rescale_factor = 'x' has to be a number"),
    ):
        with pytest.raises(ModelError, match=message):
            processor(tmp_path, values)


MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I;16", "I", "F"]


@pytest.mark.parametrize("mode", MODES)
def test_picture_of_every_mode_is_shown_or_refused_by_name(tmp_path: Path, mode: str) -> None:
    """Grey stays grey, colours stay colours within the loss of their mode; what no viewer shows alike is refused."""
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
    for channels, shown in ((1, {"1", "L", "LA", "I;16"}), (3, set(MODES) - {"I", "F"})):
        if mode not in shown:
            with pytest.raises(DataError, match=rf"x\.\w+ is a picture of mode .{mode}"):
                processor(tmp_path, channels=channels).decode(ImageFile(name))
            continue
        found = processor(tmp_path, channels=channels).decode(ImageFile(name))
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
        found = processor(tmp_path).decode(ImageFile(tmp_path / name))
        assert found[0, 0].tolist() == [255, 255, 255] and found[5, 5].tolist() == list(colour)
    plain = processor(tmp_path, {"do_convert_rgb": True}).decode(ImageFile(tmp_path / "a.png"))
    assert plain[0, 0].tolist() == [0, 0, 0]
    with pytest.raises(DataError, match=r"a\.png is a picture of mode 'RGBA', and the model takes 3 channels of bytes"):
        processor(tmp_path, {"do_convert_rgb": False}).decode(ImageFile(tmp_path / "a.png"))


def test_picture_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    """All eight orientations, by Pillow's own inverse."""
    upright, exif = picture(6, 9), pillow.Exif()
    inverse = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # methods of Image.transpose that undo the orientation
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        stored = upright if orientation == 1 else upright.transpose(pillow.Transpose(inverse[orientation]))
        stored.save(tmp_path / "x.png", exif=exif)
        assert np.array_equal(processor(tmp_path).decode(ImageFile(tmp_path / "x.png")), np.asarray(upright)), (
            orientation
        )


def large_png(side: int) -> bytes:
    """The beginning of a black and white picture of so many pixels, which is all that is read of it."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", zlib.compress(b""))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def test_folder_of_pictures_passes_over_what_is_hidden_and_refuses_what_is_too_large(
    vit_of_colours: Path, tmp_path: Path
) -> None:
    """Copies of Jupyter, files of macOS and others are counted; a bomb is named, before it is unpacked."""
    rows = tmp_path / "rows"
    for name in ("cat", "dog", ".ipynb_checkpoints"):
        (rows / name).mkdir(parents=True)
        picture(SIDE, SIDE).save(rows / name / "a.png")
    (rows / "cat" / "._a.png").write_bytes(b"no picture")
    (rows / "cat" / "notes.txt").write_text("x")
    os.mkfifo(rows / "cat" / "pipe.png")  # opening it would wait for a writer
    source = make_source(vit_of_colours)
    found = source.read(rows)
    assert found.labels == ("cat", "dog")
    assert sorted(found.left_out.values()) == [2, 2], "a note and a pipe, and two that are hidden"
    (rows / "dog" / "b.png").write_bytes(large_png(20_000))
    with pytest.raises(DataError, match=r"b\.png is too large a picture .*400000000 pixels"):
        source.read(rows)


def test_linked_class_of_pictures_is_read_and_one_that_can_not_be_is_refused(
    vit_of_colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were left out without a word; a link deeper inside is counted, and may be a loop."""
    (tmp_path / "elsewhere" / "dog").mkdir(parents=True)
    (rows := tmp_path / "rows" / "cat").mkdir(parents=True)
    for folder in (rows, tmp_path / "elsewhere" / "dog"):
        picture(SIDE, SIDE).save(folder / "a.png")
    (rows.parent / "dog").symlink_to(tmp_path / "elsewhere" / "dog")
    (rows / "again").symlink_to(rows.parent)
    found = make_source(vit_of_colours).read(rows.parent)
    assert found.labels == ("cat", "dog") and dict(found.left_out) == {LINKED: 1}
    listed = os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name == "cat":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(DataError, match=r"can't read .*rows/cat: Permission denied; permit it, or move it away"):
        make_source(vit_of_colours).read(rows.parent)


def test_picture_that_would_be_huge_before_it_is_cropped_is_refused(vit_of_colours: Path, tmp_path: Path) -> None:
    """By the model's preprocessor, or by its own shape: a line of pixels becomes as wide as its shorter side grows."""
    folder = Path(shutil.copytree(vit_of_colours, tmp_path / "model"))
    (tmp_path / "rows" / "cat").mkdir(parents=True)
    for shortest, size, is_taken in ((14, (SIDE, SIDE), True), (12_000, (SIDE, SIDE), False), (1000, (200, 1), False)):
        steps = {"size": {"shortest_edge": shortest}, "do_center_crop": True, "crop_size": SIDE}
        (folder / PREPROCESSOR_FILE).write_text(json.dumps(steps))
        picture(*size).save(tmp_path / "rows" / "cat" / "a.png")
        if is_taken:
            assert make_source(folder).read(tmp_path / "rows").labels == ("cat",)
            continue
        with pytest.raises(DataError, match=r"a\.png has images of shape"):
            make_source(folder).read(tmp_path / "rows")


TARGETS = {name: index for index, name in enumerate(tiny.LABELS)}


@pytest.fixture(scope="module")
def vit(family: Callable[[str], Path]) -> Path:
    """Takes grey images of 12 x 12."""
    return family("vit")


@pytest.fixture(scope="module")
def vit_of_colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes coloured images of 12 x 12."""
    return write_family(tmp_path_factory.mktemp("model"), "vit", num_blocks=1, num_channels=3)


def make_source(vit: Path, **overrides: object) -> Images:
    """Reads images for a model."""
    return Images(ring.make_job(vit, model__task="image-classification", **overrides), vit)


def load(vit: Path, path: Path, **overrides: object) -> ImageExamples:
    """Everything that a file has."""
    source = make_source(vit, **overrides)
    rows = source.read(path)
    return source.examples(rows.rows, rows.labels)


def test_images_of_npz_and_folder_are_equal(vit: Path, tmp_path: Path) -> None:
    """A folder per class gives the same images and classes as the arrays."""
    images, labels = make_images(10, seed=1)
    one = load(vit, write_images(tmp_path / "images.npz", 10, seed=1))
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{index:03}.npy", image)
    (tmp_path / "images" / "README.md").write_text("not a class")
    (tmp_path / "images" / labels[0] / "notes.txt").write_text("not an image")
    other = load(vit, tmp_path / "images")
    order = sorted(range(10), key=lambda index: (labels[index], index))
    first, second = one.batch(order, TARGETS), other.batch(range(10), TARGETS)
    assert len(one) == len(other) == 10
    assert first.pixels is not None and second.pixels is not None
    assert torch.equal(first.pixels, second.pixels)
    assert torch.equal(first.labels, second.labels)


def encoded(image: Any) -> dict[str, Any]:
    """A picture as ``datasets`` writes it."""
    image.save(content := io.BytesIO(), "PNG")
    return {"bytes": content.getvalue(), "path": None}


def test_pictures_in_a_column_are_those_of_a_folder(vit_of_colours: Path, tmp_path: Path) -> None:
    """Classes have the names of the schema; a row that is no picture is refused by its number."""
    pictures = [picture(SIDE, SIDE, seed=index) for index in range(5)]
    for index, image in enumerate(pictures):
        (tmp_path / "images" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "images" / "ab"[index % 2] / f"{index}.png")
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    columns: dict[str, Any] = {"image": list(map(encoded, pictures)), "label": [0, 1, 0, 1, 0]}
    path, bad = tmp_path / "train-00000-of-00001.parquet", tmp_path / "bad.parquet"
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    one, other = load(vit_of_colours, tmp_path / "images"), load(vit_of_colours, path)
    first, second = (examples.batch(order, {"a": 0, "b": 1}) for examples, order in ((one, range(5)), (other, ORDER)))
    assert first.pixels is not None and second.pixels is not None and torch.equal(first.pixels, second.pixels)
    assert torch.equal(first.labels, second.labels)
    dataset = OwnerDataset.load(
        ring.make_job(vit_of_colours, model__task="image-classification"),
        tmp_path / "train",
        None,
        tokenizer_folder=vit_of_colours,
    )
    assert dataset.labels == ("a", "b")
    columns["image"][2:4] = [{"bytes": b"no picture", "path": None}, {"bytes": None, "path": "x.png"}]
    pq.write_table(pa.table(columns), bad)
    with pytest.raises(
        DataError,
        match=r"bad.parquet: 2 rows can't be used: column 'image' is no readable picture in row 3; "
        r"column 'image' is empty in row 4",
    ):
        load(vit_of_colours, bad)
    numbers = [number for number, _ in make_source(vit_of_colours).rows_of(path)]
    assert numbers == [1, 2, 3, 4, 5]
    with pytest.raises(
        DataError, match=r"train-.*.parquet, row 1 is a picture of mode 'RGB', and the model takes 1 chan"
    ):
        load(write_family(tmp_path / "grey", "vit", num_blocks=1), path)


def test_images_of_bytes_are_scaled_to_minus_one_and_one(vit: Path, tmp_path: Path) -> None:
    """Without a preprocessor: 0 becomes -1, 255 becomes 1; the mask is all ones, one for each token."""
    images = np.zeros((2, 12, 12), np.uint8)
    images[1] = 255
    np.savez(tmp_path / "images.npz", image=images, label=np.array([0, 1]))
    batch = load(vit, tmp_path / "images.npz").batch([0, 1], {"0": 0, "1": 1})
    assert batch.pixels is not None
    assert batch.pixels.shape == (2, 1, 12, 12)
    assert batch.pixels.dtype == torch.float32
    assert batch.pixels[:, 0, 0, 0].tolist() == [-1.0, 1.0]
    assert batch.labels.tolist() == [0, 1]
    assert torch.equal(batch.mask, torch.ones(2, IMAGE_TOKENS, dtype=torch.int64))
    assert batch.rows(1, 2).pixels is not None


def test_images_follow_the_preprocessor(vit: Path, tmp_path: Path) -> None:
    """Mean and deviation of the folder hold; a broken file belongs to the model, so it is the model's error."""
    folder = Path(shutil.copytree(vit, tmp_path / "model"))
    images = np.stack([np.zeros((12, 12), np.uint8), np.full((12, 12), 255, np.uint8)])
    np.savez(tmp_path / "images.npz", image=images, label=np.array([0, 1]))
    for values, expected in (
        ({"image_mean": [0.25], "image_std": [0.5]}, [-0.5, 1.5]),
        ({"do_normalize": False, "image_mean": [0.25]}, [0.0, 1.0]),
    ):
        (folder / PREPROCESSOR_FILE).write_text(json.dumps(values))
        pixels = load(folder, tmp_path / "images.npz").batch([0, 1], {}).pixels
        assert pixels is not None
        assert pixels[:, 0, 3, 3].tolist() == expected
    for text, message in (
        ("{", "is not readable"),
        ("[1]", "is not readable"),
        ('{"image_mean": [0.5, 0.5]}', "image_mean has to be 1 numbers"),
        ('{"image_std": [0]}', "image_std has to be above 0"),
        ('{"image_std": ["a"]}', "image_std has to be 1 numbers"),
    ):
        (folder / PREPROCESSOR_FILE).write_text(text)
        with pytest.raises(ModelError, match=message):
            make_source(folder)


def test_images_lie_either_way(vit_of_colours: Path, tmp_path: Path) -> None:
    """Channels first or last, floats as they are."""
    image = np.arange(3 * 12 * 12, dtype=np.float32).reshape(1, 3, 12, 12)
    np.savez(tmp_path / "first.npz", image=image, label=np.array(["a"]))
    np.savez(tmp_path / "last.npz", image=image.transpose(0, 2, 3, 1), label=np.array(["a"]))
    for name in ("first", "last"):
        found = load(vit_of_colours, tmp_path / f"{name}.npz").batch([0], {}).pixels
        assert found is not None and torch.equal(found, torch.from_numpy(image)), name


def _arrays(**more: Any) -> dict[str, Any]:
    return {"image": np.zeros((2, 12, 12), np.uint8), "label": np.array([0, 1]), **more}


def test_images_refuse_what_the_model_cannot_take(vit: Path, tmp_path: Path) -> None:
    """Shape, type and names, each with what was found; nothing is unpickled, and a NaN would make the whole run one."""
    for arrays, message in (
        (_arrays(image=np.zeros((2, 28, 28), np.uint8)), r"images of shape \(28, 28\), the model takes 1 x 12 x 12"),
        (_arrays(image=np.zeros((2, 12, 12, 3), np.uint8)), r"images of shape \(12, 12, 3\), the model takes 1 x 12"),
        (_arrays(image=np.zeros((2, 144), np.uint8)), r"images of shape \(144,\)"),
        (_arrays(image=np.zeros((3, 12, 12), np.uint8)), r"labels of shape \(2,\)"),
        (_arrays(image=np.zeros((2, 12, 12), np.int64)), "pixels of type int64; give uint8"),
        (_arrays(label=np.array([0.5, 1.0])), "labels are float64"),
        ({"x": np.zeros(2), "y": np.zeros(2)}, r"no array 'image'; it has x, y; set data\.image"),
        ({"image": np.zeros((2, 12, 12), np.uint8)}, r"no array 'label'; it has image; set data\.label"),
        (_arrays(label=np.array([{}, {}], dtype=object)), "is no readable npz file"),
        (_arrays(image=np.zeros((0, 12, 12), np.uint8), label=np.zeros(0, np.int64)), r"shape \(0, 12, 12\)"),
        (_arrays(image=np.full((2, 12, 12), np.nan, np.float32)), "not finite"),
    ):
        np.savez(tmp_path / "images.npz", **arrays)
        with pytest.raises(DataError, match=message):
            load(vit, tmp_path / "images.npz").batch([0], {})


def test_images_refuse_damaged_files(vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing, cut off or foreign file, an empty folder, a wrong one in a folder: each is named."""
    path = write_images(tmp_path / "images.npz", 20, seed=1)
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:500])
    (tmp_path / "empty").mkdir()
    for name in ("bad", "torn", "zip", "odd"):
        (tmp_path / name / "cat").mkdir(parents=True)
    np.save(tmp_path / "bad" / "cat" / "a.npy", np.zeros((5, 5), np.uint8))
    (tmp_path / "torn" / "cat" / "a.npy").write_bytes(b"\x93NUMPY")
    shutil.copy(path, tmp_path / "zip" / "cat" / "a.npy")
    (tmp_path / "odd" / "cat" / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 117 + b"\n")
    (tmp_path / "rows.csv").write_text("image,label\n")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("image.npy", "no array")
        archive.writestr("label.npy", "no array")
    np.savez_compressed(tmp_path / "bomb.npz", **_arrays(more=np.zeros(1 << 22, np.uint8)))
    monkeypatch.setattr("ringtune.storage.text_files.check_archive.__kwdefaults__", {"most_bytes": 1, "factor": 200})
    for name, message in (
        ("bomb.npz", r"unpacks to 4,[0-9,]+ bytes, more than 200 times its own; write it with numpy\.savez, not"),
        ("no.npz", "is not there"),
        ("cut.npz", "is no readable npz file"),
        ("text.npz", "'image' is no array; write it with"),
        ("empty", "has no images; put them into a folder for each class"),
        ("bad", r"cat/a\.npy has images of shape \(5, 5\)"),
        ("torn", r"cat/a\.npy is no readable array"),
        ("zip", r"cat/a\.npy is an archive of arrays; write a single one"),
        ("odd", r"cat/a\.npy is no readable array"),
        ("rows.csv", r"images are read from \.npz or a folder per class"),
    ):
        with pytest.raises(DataError, match=message):
            load(vit, tmp_path / name)


HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (%s,)}" % ("9" * 30),
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
    "{'descr': ('<f4',), 'fortran_order': False, 'shape': (5,)}",
    "{1: 2, 'a': 3}",
    "+".join("1" * 4900),
    "if 1:\n    a\n  b",
)
"""Headers of arrays that numpy's reader refuses with errors of all kinds."""


@pytest.mark.parametrize("header", HEADERS)
def test_array_with_a_damaged_header_is_named(vit: Path, tmp_path: Path, header: str) -> None:
    """A header is a text of Python: numbers, names and nesting of any kind."""
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "rows.npz", "w") as archive:
        archive.writestr("image.npy", content)
        archive.writestr("label.npy", content)
    for path, message in (
        (tmp_path, r"cat/a\.npy is no readable array"),
        (tmp_path / "rows.npz", "is no readable npz"),
    ):
        with pytest.raises(DataError, match=message):
            load(vit, path)


def test_picture_that_is_a_program_is_not_run(
    vit_of_colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow gives EPS to Ghostscript, whatever the suffix; links to devices, such as a terminal, are no pictures."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/run\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "rows" / "cat").mkdir(parents=True)
    picture(SIDE, SIDE).save(tmp_path / "rows" / "cat" / "a.png")
    (tmp_path / "rows" / "cat" / "b.png").symlink_to("/dev/zero")
    source = make_source(vit_of_colours)
    assert dict(source.read(tmp_path / "rows").left_out) == {NO_PICTURE: 1}
    (tmp_path / "rows" / "cat" / "c.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 12\n%%EndComments\n%%EndProlog\nshowpage\n%%EOF\n"
    )
    with pytest.raises(DataError, match=r"c\.png is no readable picture \(cannot identify"):
        source.read(tmp_path / "rows")
    assert not (tmp_path / "run").exists()


def test_images_say_what_pictures_need(vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are read by a package that is not required."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match="needs the package 'pillow'"):
        load(vit, tmp_path)


def test_images_have_their_tokens_whatever_the_longest_text_is(vit: Path, tmp_path: Path) -> None:
    """Facts, rows and measured sizes follow the model; no frame of the ring is bounded by the job's key."""
    path = write_images(tmp_path / "images.npz", 12, seed=2)
    for max_length in (128, 3):
        job = ring.make_job(vit, model__task="image-classification", train__max_length=max_length)
        assert model_facts(vit, job).fixed_tokens == IMAGE_TOKENS
        data = OwnerDataset.load(job, path, None, share=0, num_owners=1, tokenizer_folder=vit)
        assert data.mean_tokens(4, 1, "a").train == IMAGE_TOKENS
        bench = ring.make_bench(vit, job, data)
        assert {size.tokens for size in bench.sizes} == {IMAGE_TOKENS}
    assert bench.measure(Timer(window_s=0.0), budget_s=0.0, disk=None).work_times


def test_further_frames_of_moving_pictures_are_counted_and_the_first_is_taken(
    vit_of_colours: Path, tmp_path: Path
) -> None:
    """GIF, APNG, WebP, TIFF of several pages; one frame says nothing, and further pictures of a photo are no frames."""
    from PIL import Image

    source = make_source(vit_of_colours)
    first, *others = (Image.new("RGB", (12, 12), (value,) * 3) for value in (40, 90, 200))
    folder = tmp_path / "rows" / "a"
    folder.mkdir(parents=True)
    for suffix in ("gif", "png", "webp", "tif"):
        first.save(folder / f"still.{suffix}")
        first.save(folder / f"moving.{suffix}", save_all=True, append_images=others)
    first.save(folder / "photo.jpg", format="MPO", save_all=True, append_images=others)
    rows = source.read(folder.parent)
    assert dict(rows.left_out) == {FRAMES: 4 * 2}
    pixels = source.examples(rows.rows, rows.labels).batch(range(9), {"a": 0}).pixels
    assert pixels is not None
    assert float((pixels - (2 * 40 / 255 - 1)).abs().max()) < 0.02  # of jpeg and WebP nearly so
