"""Merging safetensors by bytes; the real library reads what came out."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from safetensors import deserialize

from coordinator.run import result_files
from coordinator.run.result_files import result_folder, same_everywhere, saved_files, saved_part
from ringtune.errors import IntegrityError
from ringtune.models.result_files import adapter_result, model_result
from ringtune.schedule.placement import Slice
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorPieces

numpy = pytest.importorskip("numpy")
safetensors_numpy = pytest.importorskip("safetensors.numpy")


def file_of(**tensors: bytes) -> bytes:
    """A safetensors file of float32 vectors, written by the real library."""
    arrays = {name: numpy.frombuffer(data, dtype=numpy.float32) for name, data in tensors.items()}
    return bytes(safetensors_numpy.save(arrays))


def merge(parts: dict[str, bytes]) -> bytes:
    """The merged file of some files."""
    return bytes(result_files.merge({source: Pieces.of(content) for source, content in parts.items()}))


def read_tensors(content: bytes, *, source: str) -> dict[str, TensorPieces]:
    """The tensors of a file."""
    return result_files.read_tensors(Pieces.of(content), source=source)


def test_merge_keeps_every_byte() -> None:
    """The merged file, read by the safetensors library, has each part's tensors unchanged."""
    low, high = struct.pack("<2f", 1.5, -2.0), struct.pack("<3f", 0.25, 1e-30, 7.0)
    merged = merge({"node-1": file_of(a=low), "node-2": file_of(b=high)})
    found = {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in deserialize(merged)}
    assert found == {"a": ("F32", [2], low), "b": ("F32", [3], high)}


def test_merge_does_not_depend_on_who_came_first() -> None:
    """The same tensors give the same file, whichever node sent which."""
    one, two = file_of(a=b"\0" * 4), file_of(b=b"\1" * 8)
    assert merge({"x": one, "y": two}) == merge({"x": two, "y": one})


def test_merge_aligns_wide_tensors_behind_odd_ones() -> None:
    """A float32 tensor never starts at an odd offset because a byte tensor lies before it."""
    odd = bytes(safetensors_numpy.save({"a": numpy.frombuffer(b"abc", dtype=numpy.uint8)}))
    merged = merge({"x": odd, "y": file_of(z=b"\0" * 8)})
    (length,) = struct.unpack("<Q", merged[:8])
    header = json.loads(merged[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["z"]["data_offsets"] == [0, 8]
    assert header["a"]["data_offsets"] == [8, 11]


def test_merge_of_empty_files_is_a_file() -> None:
    """A node that hosts nothing sends an empty file."""
    assert deserialize(merge({"x": file_of()})) == []


def test_merge_refuses_a_tensor_twice() -> None:
    """Two nodes that both claim a block are named."""
    with pytest.raises(IntegrityError, match="nodes x and y both sent tensor a"):
        merge({"x": file_of(a=b"\0" * 4), "y": file_of(a=b"\0" * 4)})


@pytest.mark.parametrize("keep", [0, 4, 7, 20, -1])
def test_read_refuses_a_truncated_file(keep: int) -> None:
    """Whatever is missing, the file is refused and its sender named."""
    content = file_of(a=b"\0" * 64)
    with pytest.raises(IntegrityError, match="node-3"):
        read_tensors(content[:keep], source="node-3")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": ["two"], "data_offsets": [0, 8]},
        [1, 2],
    ],
)
def test_read_refuses_a_header_that_lies(entry: object) -> None:
    """Shapes, ranges and dtypes of a foreign header are checked against the bytes that are there."""
    text = json.dumps({"a": entry}).encode()
    with pytest.raises(IntegrityError):
        read_tensors(struct.pack("<Q", len(text)) + text + b"\0" * 8, source="x")


def test_read_refuses_a_giant_header() -> None:
    """A header length beyond the file is not believed."""
    with pytest.raises(IntegrityError, match="claims"):
        read_tensors(struct.pack("<Q", 1 << 60) + b"{}", source="x")


def test_same_everywhere_names_who_differs() -> None:
    """Configurations of one run have to be equal."""
    assert same_everywhere([("a", b"1"), ("b", b"1")], name="adapter_config.json") == b"1"
    with pytest.raises(IntegrityError, match="nodes a and c"):
        same_everywhere([("a", b"1"), ("b", b"1"), ("c", b"2")], name="adapter_config.json")
    with pytest.raises(IntegrityError, match="no node sent"):
        same_everywhere([], name="adapter_config.json")


def part_of(*names: str, **files: bytes) -> dict[str, Pieces]:
    """What a node hands in of a model: tensors of one number, and small files."""
    weights = bytes(safetensors_numpy.save({name: numpy.ones(2, dtype=numpy.float32) for name in names}))
    return {"model.safetensors": Pieces.of(weights), **{name: Pieces.of(content) for name, content in files.items()}}


LOW = part_of("bert.encoder.layer.0.w", "bert.encoder.layer.1.w")
HIGH = part_of("bert.encoder.layer.2.w", "bert.embeddings.w", "heads.ringtune.1.weight", **{"config.json": b"{}"})


def names_in(content: Pieces) -> set[str]:
    """Names of the tensors in a file."""
    return {name for name, _ in deserialize(bytes(content))}


def test_model_folder_has_all_parts_and_only_files_that_came() -> None:
    """Weights are merged, the config is there; tokenizer files only as the owner has them."""
    folder = result_folder({"a": LOW, "b": {**HIGH, "vocab.txt": Pieces.of(b"x")}}, model_result())
    assert folder.keys() == {"config.json", "model.safetensors", "vocab.txt"}
    assert names_in(folder["model.safetensors"]) == names_in(LOW["model.safetensors"]) | names_in(
        HIGH["model.safetensors"]
    )


def test_adapter_folder_has_an_interface_where_one_came() -> None:
    """Of a family that is plugged in; other results have none, and a second one has to be the same."""
    adapter, result = Pieces.of(file_of(x=b"1234")), adapter_result("causal-lm", "lora")
    own = {"adapter.safetensors": adapter, "adapter_config.json": Pieces.of(b"{}")}
    assert result_folder({"a": own}, result).keys() == own.keys()
    folder = result_folder({"a": {**own, "adapter_interface.json": Pieces.of(b"{1}")}}, result)
    assert bytes(folder["adapter_interface.json"]) == b"{1}"


def test_model_folder_without_config_or_weights_is_refused() -> None:
    """What no node sent is named."""
    with pytest.raises(IntegrityError, match=r"no node sent config\.json"):
        result_folder({"a": LOW}, model_result())
    with pytest.raises(IntegrityError, match=r"no node sent model\.safetensors"):
        result_folder({"b": {"config.json": Pieces.of(b"{}")}}, model_result())


@pytest.mark.parametrize("shard_bytes", [1 << 30, 16])
def test_model_goes_back_to_nodes_in_parts(tmp_path: Path, shard_bytes: int) -> None:
    """From one file or several: each node gets the blocks of its slice, an owner also what is in no block."""
    for name, content in result_folder({"a": LOW, "b": HIGH}, model_result(), shard_bytes=shard_bytes).items():
        (tmp_path / name).write_bytes(bytes(content))
    (sent,) = saved_files(tmp_path, model_result()).items()
    assert sent[0] == "model.safetensors"
    (tmp_path / "came").mkdir()
    (tmp_path / "came" / sent[0]).write_bytes(bytes(sent[1]))
    wanted = {
        (0, 2, False): {"bert.encoder.layer.0.w", "bert.encoder.layer.1.w"},
        (2, 3, True): {"bert.encoder.layer.2.w", "bert.embeddings.w", "heads.ringtune.1.weight"},
        (0, 0, True): {"bert.embeddings.w", "heads.ringtune.1.weight"},
        (0, 0, False): set(),
    }
    for (start, stop, is_owner), names in wanted.items():
        piece = Slice(node="n", start=start, stop=stop)
        part = saved_part(tmp_path / "came", model_result(), piece, is_owner=is_owner)
        assert names_in(part["model.safetensors"]) == names
