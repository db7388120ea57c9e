"""Tensors of a model folder are read one at a time, go through in pieces, and are finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from edge.machine.resources import peak_rss_bytes, release_memory, reset_peak, rss_bytes
from edge.model.tensor_files import (
    TORCH_DTYPES,
    SafetensorsFiles,
    fill,
    first_not_finite,
    is_finite,
    pieces_of,
    require_finite_grads,
)
from ringtune.errors import DivergedError, IntegrityError, ModelError
from ringtune.storage.pieces import PIECE_BYTES, HeldPieces, Pieces
from ringtune.storage.tensor_files import TensorPieces


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (3, PIECE_BYTES // 8)])
def test_tensor_of_any_type_comes_out_as_it_was(name: str, shape: tuple[int, ...]) -> None:
    """No piece is larger than the limit, and the pieces of one that is contiguous are its own memory."""
    tensor = torch.randint(0, 2, shape).to(TORCH_DTYPES[name])
    source = pieces_of(tensor)
    assert (source.dtype, source.shape) == (name, shape)
    assert all(len(piece) <= PIECE_BYTES for piece in source.data)
    target = torch.empty(shape, dtype=tensor.dtype)
    fill(target, source)
    assert torch.equal(target, tensor)


def test_pieces_are_read_from_the_tensor_when_they_are_gone_through() -> None:
    """Nothing was copied before."""
    tensor = torch.zeros(4)
    source = pieces_of(tensor)
    tensor += 1
    assert bytes(source.data) == torch.ones(4).numpy().tobytes()


def test_fill_converts_and_takes_pieces_that_cut_a_number() -> None:
    """As a message of a link may; into a part of a larger tensor too."""
    values = torch.randn(3, 5, dtype=torch.bfloat16)
    content = bytes(pieces_of(values).data)
    odd = HeldPieces([memoryview(content)[at : at + 7] for at in range(0, len(content), 7)])
    whole = torch.zeros(3, 6, dtype=torch.float64)
    fill(whole[:, 1:], TensorPieces("BF16", (3, 5), odd))
    assert torch.equal(whole[:, 1:], values.double())
    assert not whole[:, 0].any()


def test_fill_puts_pieces_that_cut_a_number_where_they_belong() -> None:
    """Of the type of the target they are copied as they came."""
    values = torch.randn(3, 5)
    content = bytes(pieces_of(values).data)
    odd = HeldPieces([memoryview(content)[at : at + 7] for at in range(0, len(content), 7)])
    whole = torch.zeros(4, 5)
    fill(whole[1:], TensorPieces("F32", (3, 5), odd))
    assert torch.equal(whole[1:], values)
    assert not whole[0].any()


@pytest.mark.parametrize("size", [0, 11, 12, 20])
def test_fill_refuses_a_source_of_another_size(size: int) -> None:
    """Too short or too long."""
    with pytest.raises(IntegrityError, match="came with"):
        fill(torch.zeros(4), TensorPieces("F32", (4,), Pieces.of(bytes(size))))


def test_numbers_that_are_not_finite_are_seen_in_any_piece() -> None:
    """Whole numbers always are."""
    tensor = torch.zeros(PIECE_BYTES)
    assert is_finite(pieces_of(tensor))
    tensor[-1] = torch.nan
    assert not is_finite(pieces_of(tensor))
    assert is_finite(pieces_of(torch.ones(3, dtype=torch.int64)))


def test_type_that_is_not_supported_is_named() -> None:
    """As a model in float8 has."""
    with pytest.raises(IntegrityError, match="F8_E4M3"):
        fill(torch.zeros(4), TensorPieces("F8_E4M3", (4,), Pieces.of(bytes(4))))


def parameter(grad: torch.Tensor | None, shape: tuple[int, ...] = (3,)) -> torch.nn.Parameter:
    """A parameter with a gradient."""
    made = torch.nn.Parameter(torch.zeros(shape))
    made.grad = grad
    return made


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_number_that_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    """Infinities of both signs, which would add up to NaN, and one alone."""
    tensors = {"a": torch.ones(5, dtype=dtype), "b": torch.ones(2, 3, dtype=dtype), "c": torch.ones(2, dtype=dtype)}
    assert first_not_finite(tensors) == ""
    tensors["b"][1, 2] = value
    assert first_not_finite(tensors) == "b"
    tensors["a"][0] = -value
    assert first_not_finite(tensors) == "a"


def test_sum_that_overflows_is_no_number_that_is_not_finite() -> None:
    """Each number is finite."""
    assert first_not_finite({"a": torch.full((100,), 3e38), "b": torch.full((100,), -3e38)}) == ""
    assert first_not_finite({}) == ""


def test_gradient_that_is_not_finite_is_named_with_its_unit() -> None:
    """Of a parameter without a gradient nothing is asked; of a table only the rows that have one."""
    table = parameter(
        torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=False), (4, 2)
    )
    good = {"rests": parameter(None), "table": table, "bias": parameter(torch.ones(3))}
    require_finite_grads(good, "block 2")
    bad = good | {"bias": parameter(torch.tensor([1.0, torch.inf, 0.0]))}
    with pytest.raises(DivergedError, match="the gradient of block 2 is not finite, first that of bias"):
        require_finite_grads(bad, "block 2")


MIB = 1 << 20
TENSORS = {
    "half": torch.linspace(-3, 3, 77, dtype=torch.bfloat16).reshape(7, 11),
    "single": torch.linspace(-3, 3, 5_000_011),  # more than one piece, and not a multiple of one
    "count": torch.tensor(7),
    "none": torch.zeros(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with these tensors."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_tensor_is_read_as_it_is_converted(folder: Path, dtype: torch.dtype | None, private: bool) -> None:
    """Every value, shape and dtype is that of the whole tensor, converted; whole numbers stay as they are."""
    with SafetensorsFiles(folder) as files:
        for name, want in TENSORS.items():
            found = files.read(name, dtype, private=private)
            expected = want.to(dtype) if dtype is not None and want.is_floating_point() else want
            assert found.dtype is expected.dtype and torch.equal(found, expected)


@pytest.mark.promise("7 bounded memory")
def test_tensor_that_is_read_whole_is_resident_once(tmp_path: Path) -> None:
    """A file in bfloat16 of 64 MiB becomes 128 MiB in float32: its mapped pages, 64 MiB more, are not there."""
    save_file({"w": torch.zeros(32 * MIB, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    release_memory()
    reset_peak()
    before = rss_bytes()
    with SafetensorsFiles(tmp_path) as files:
        tensor = files.read("w", torch.float32, private=True)
    added = peak_rss_bytes() - before
    assert tensor.nbytes == 128 * MIB
    assert added < 128 * MIB + 24 * MIB


def test_file_that_is_cut_off_or_gone_meanwhile_is_named(folder: Path) -> None:
    """The header was whole when the folder was opened."""
    path = folder / "model.safetensors"
    with SafetensorsFiles(folder) as files:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(IntegrityError, match="ends too soon"):
            files.read("single", private=True)
        path.unlink()
        with pytest.raises(ModelError, match="is missing"):
            files.read("single", private=True)


def test_tensor_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    """A model in 8-bit floating point has to be converted."""
    save_file({"w": torch.zeros(4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with SafetensorsFiles(tmp_path) as files, pytest.raises(ModelError, match="F8_E4M3"):
        files.read("w")
