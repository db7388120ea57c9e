"""Headers of GGUF files: read as the package ``gguf`` wrote them; what is inconsistent is refused before it is read."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from ringtune.errors import IntegrityError, ModelError, RingTuneError
from ringtune.storage.gguf import BLOCK_TYPES, GgufType, read_gguf_header
from ringtune.storage.tensor_files import stored_bytes


def test_header_is_what_was_written(tmp_path: Path) -> None:
    """Values of every kind, tensors of every type at their places; lists only where they are wanted."""
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("u", 7)
    writer.add_int64("i", -3)
    writer.add_float32("f", 0.5)
    writer.add_bool("b", True)
    writer.add_string("s", "\u2581text")
    writer.add_array("strings", ["a", "bc"])
    writer.add_array("numbers", [1.5, 2.5])
    rng, wanted = np.random.default_rng(0), {}
    for name, block in BLOCK_TYPES.items():
        data = rng.integers(0, 256, (3, block.nbytes), dtype=np.uint8)
        data = data.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[name])
        wanted[name] = data.tobytes()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf_header(path, lists=["strings"])
    kept = {key: found.values[key] for key in ("u", "i", "f", "b", "s", "strings", "numbers")}
    assert kept == {"u": 7, "i": -3, "f": 0.5, "b": True, "s": "\u2581text", "strings": ["a", "bc"], "numbers": None}
    assert read_gguf_header(path, lists=["numbers"]).values["numbers"] == [1.5, 2.5]
    content = path.read_bytes()
    for name, tensor in found.tensors.items():
        assert (tensor.kind, tensor.shape) == (name, (3, BLOCK_TYPES[name].numbers))
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == wanted[name]
    assert found.tensors.keys() == wanted.keys()
    for name, block in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == tuple(block)


def text(value: str) -> bytes:
    """A text with its length."""
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, sides: tuple[int, ...] = (32, 2), kind: int = 2, offset: int = 0) -> bytes:
    """The entry of a tensor; kind 2 is Q4_0."""
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, offset)


def file_of(
    entries: list[bytes],
    *,
    keys: bytes = b"",
    counts: tuple[int, int] | None = None,
    data: int = 128,
    head: bytes = b"",
) -> bytes:
    """A file with these entries and so many bytes of data."""
    num_tensors, num_keys = counts or (len(entries), 0)
    found = (
        (head or b"GGUF" + struct.pack("<I", 3)) + struct.pack("<QQ", num_tensors, num_keys) + keys + b"".join(entries)
    )
    return found + bytes(-len(found) % 32) + bytes(data)


def of_key(kind: int, content: bytes, name: str = "k") -> bytes:
    """A key of a type."""
    return text(name) + struct.pack("<I", kind) + content


HUGE = (1 << 64) - 1
DAMAGED: dict[str, tuple[bytes, str]] = {
    "other magic": (file_of([entry("a")], head=b"GGML" + struct.pack("<I", 3)), "does not begin with GGUF"),
    "other version": (file_of([entry("a")], head=b"GGUF" + struct.pack("<I", 1)), "of version 1"),
    "big-endian": (file_of([entry("a")], head=b"GGUF" + struct.pack(">I", 3)), "of version 50331648"),
    "no tensor": (file_of([]), "claims 0 tensors"),
    "too many tensors": (file_of([entry("a")], counts=(HUGE, 0)), "claims 18,446,744,073,709,551,615 tensors"),
    "too many keys": (file_of([entry("a")], counts=(1, HUGE)), "18,446,744,073,709,551,615 keys"),
    "more tensors than entries": (file_of([entry("a")], counts=(3, 0)), "has 0 sides"),
    "long name": (file_of([entry("a" * 300)]), "a text has 300 bytes"),
    "text beyond the end": (
        file_of([entry("a")], keys=of_key(8, struct.pack("<Q", HUGE)), counts=(1, 1)),
        "a text has",
    ),
    "no UTF-8": (file_of([struct.pack("<Q", 1) + b"\xff" + entry("")[8:]]), "not UTF-8"),
    "key twice": (file_of([entry("a")], keys=of_key(0, b"\1") * 2, counts=(1, 2)), "occurs twice"),
    "unknown type of a key": (file_of([entry("a")], keys=of_key(77, b"\1"), counts=(1, 1)), "is of type 77"),
    "long list": (
        file_of([entry("a")], keys=of_key(9, struct.pack("<IQ", 8, HUGE)), counts=(1, 1)),
        "values of type 8",
    ),
    "list of lists": (file_of([entry("a")], keys=of_key(9, struct.pack("<IQ", 9, 1)), counts=(1, 1)), "of type 9"),
    "list beyond the end": (
        file_of([entry("a")], keys=of_key(9, struct.pack("<IQ", 8, 1 << 20)), counts=(1, 1)),
        "header ends",
    ),
    "alignment of 0": (
        file_of([entry("a")], keys=of_key(4, struct.pack("<I", 0), "general.alignment"), counts=(1, 1)),
        "its alignment is",
    ),
    "alignment of a text": (
        file_of([entry("a")], keys=of_key(8, text("32"), "general.alignment"), counts=(1, 1)),
        "its alignment is",
    ),
    "name twice": (file_of([entry("a"), entry("a", offset=64)]), "occurs twice"),
    "overlapping tensors": (file_of([entry("a"), entry("b", offset=32)]), "where those before end"),
    "place between": (file_of([entry("a", offset=7)]), "has bytes"),
    "beyond the end": (file_of([entry("a", offset=1 << 40)]), "has bytes"),
    "cut data": (file_of([entry("a", (32, 400))]), "has bytes"),
    "no sides": (file_of([entry("a", ())]), "has 0 sides"),
    "five sides": (file_of([entry("a", (32, 1, 1, 1, 1))]), "has 5 sides"),
    "part of a block": (file_of([entry("a", (33, 2))]), "has the shape"),
    "side of 0": (file_of([entry("a", (32, 0))]), "has the shape"),
    "huge sides": (file_of([entry("a", (1 << 63, 1 << 63))]), "has the shape"),
    "three sides": (file_of([entry("a", (32, 2, 2))]), "has the shape"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_inconsistent_header_is_refused(tmp_path: Path, damage: str) -> None:
    """With its reason."""
    content, reason = DAMAGED[damage]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=f"a.gguf is damaged or no GGUF file: .*{reason}"):
        read_gguf_header(path)


def test_every_cut_is_refused_and_every_changed_byte_is_an_answer(tmp_path: Path) -> None:
    """With an error of ours or a header, whatever the place."""
    path = tmp_path / "a.gguf"
    keys = of_key(8, text("llama"), "general.architecture") + of_key(9, struct.pack("<IQ", 8, 1) + text("x"), "l")
    good = file_of([entry("a"), entry("b", offset=64)], keys=keys, counts=(2, 2), data=100)
    path.write_bytes(good)
    assert list(read_gguf_header(path).tensors) == ["a", "b"]
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(IntegrityError):
            read_gguf_header(path)
    refused = 0
    for at in range(len(good) - 100):
        for change in (0xFF, 0x01):
            path.write_bytes(good[:at] + bytes([good[at] ^ change]) + good[at + 1 :])
            try:
                read_gguf_header(path, lists=["l"])
            except RingTuneError:
                refused += 1
    assert refused > 150


def test_other_type_is_refused_by_name(tmp_path: Path) -> None:
    """Of tensors of types that can't be read."""
    path = tmp_path / "a.gguf"
    path.write_bytes(file_of([entry("a", (256, 2), kind=10)], data=512))
    with pytest.raises(ModelError, match="tensor 'a' is of type Q2_K; known are F32"):
        read_gguf_header(path)
    with pytest.raises(ModelError, match="can't read"):
        read_gguf_header(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("gguf:Q4_K", (2, 512), 2 * 2 * 144),
        ("gguf:Q8_0:2", (8, 32), 8 * 34),
        ("gguf:F32:+1", (5,), 20),
        ("gguf:Q4_K", (2, 500), None),
        ("gguf:Q8_0:3", (8, 32), None),
        ("gguf:Q2_K", (2, 256), None),
        ("gguf:Q4_0:0", (2, 32), None),
        ("gguf:Q4_0", (2, 2, 32), None),
        ("gguf:Q4_0", (), None),
        ("F32", (2, 3), 24),
        ("x", (2,), None),
    ],
)
def test_type_says_how_many_bytes_a_tensor_has(dtype: str, shape: tuple[int, ...], nbytes: int | None) -> None:
    """None where there is no such tensor."""
    assert stored_bytes(dtype, shape) == nbytes
    kind = GgufType.of(dtype)
    assert kind is None or str(kind) == dtype
