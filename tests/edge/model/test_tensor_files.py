"""Tensors of a model folder are read one at a time, go through in pieces, and are finite."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from edge.machine.resources import peak_rss_bytes, release_memory, reset_peak, rss_bytes
from edge.model import tensor_files
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
from ringtune.storage.tensor_files import ALIGNMENT, TensorPieces
from tests.support.slice_memory import is_mapped, mapped_bytes
from tests.support.tiny import write_at


def test_tensor_of_any_type_comes_out_as_it_was() -> None:
    """No piece is larger than the limit, and the pieces of one that is contiguous are its own memory."""
    for (name, dtype), shape in itertools.product(TORCH_DTYPES.items(), ((), (0, 3), (5, 7), (3, PIECE_BYTES // 8))):
        tensor = torch.randint(0, 2, shape).to(dtype)
        source = pieces_of(tensor)
        assert (source.dtype, source.shape) == (name, shape)
        assert all(len(piece) <= PIECE_BYTES for piece in source.data)
        target = torch.empty(shape, dtype=dtype)
        fill(target, source)
        assert torch.equal(target, tensor), (name, shape)


def test_fill_takes_pieces_that_cut_a_number() -> None:
    """As a message of a link may; converted into a part of a larger tensor, or as they came."""
    for dtype, target_dtype in ((torch.bfloat16, torch.float64), (torch.float32, torch.float32)):
        values = torch.randn(3, 5).to(dtype)
        content = bytes(pieces_of(values).data)
        odd = HeldPieces([memoryview(content)[at : at + 7] for at in range(0, len(content), 7)])
        columns, rows = torch.zeros(3, 6, dtype=target_dtype), torch.zeros(4, 5, dtype=target_dtype)
        for whole, part in ((columns, columns[:, 1:]), (rows, rows[1:])):
            fill(part, TensorPieces(pieces_of(values).dtype, (3, 5), odd))
            assert torch.equal(part, values.to(target_dtype))
            assert whole.count_nonzero() == part.count_nonzero()


def test_fill_refuses_a_source_that_does_not_fit() -> None:
    """Too short, too long, or of a type that is not supported, as a model in float8 has."""
    for size in (0, 11, 12, 20):
        with pytest.raises(IntegrityError, match="came with"):
            fill(torch.zeros(4), TensorPieces("F32", (4,), Pieces.of(bytes(size))))
    with pytest.raises(IntegrityError, match="F8_E4M3"):
        fill(torch.zeros(4), TensorPieces("F8_E4M3", (4,), Pieces.of(bytes(4))))


def test_numbers_that_are_not_finite_are_seen_in_any_piece() -> None:
    """Whole numbers always are."""
    tensor = torch.zeros(PIECE_BYTES)
    assert is_finite(pieces_of(tensor))
    tensor[-1] = torch.nan
    assert not is_finite(pieces_of(tensor))
    assert is_finite(pieces_of(torch.ones(3, dtype=torch.int64)))


def parameter(grad: torch.Tensor | None, shape: tuple[int, ...] = (3,)) -> torch.nn.Parameter:
    """A parameter with a gradient."""
    made = torch.nn.Parameter(torch.zeros(shape))
    made.grad = grad
    return made


def test_number_that_is_not_finite_is_found() -> None:
    """Infinities of both signs, which would add up to NaN, and one alone."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, value in itertools.product(dtypes, (torch.nan, torch.inf, -torch.inf)):
        tensors = {"a": torch.ones(5, dtype=dtype), "b": torch.ones(2, 3, dtype=dtype), "c": torch.ones(2, dtype=dtype)}
        assert first_not_finite(tensors) == ""
        tensors["b"][1, 2] = value
        assert first_not_finite(tensors) == "b", (dtype, value)
        tensors["a"][0] = -value
        assert first_not_finite(tensors) == "a", (dtype, value)


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
    "single": torch.linspace(-3, 3, 2_500_011),  # more than one piece, and not a multiple of one
    "count": torch.tensor(7),
    "none": torch.zeros(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with these tensors."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_tensor_is_read_as_it_is_converted(folder: Path) -> None:
    """Every value, shape and dtype is that of the whole tensor, converted; whole numbers stay as they are."""
    with SafetensorsFiles(folder) as files:
        for dtype, private, (name, want) in itertools.product(
            (None, torch.float32, torch.float64), (False, True), TENSORS.items()
        ):
            found = files.read(name, dtype, private=private)
            expected = want.to(dtype) if dtype is not None and want.is_floating_point() else want
            assert found.dtype is expected.dtype and torch.equal(found, expected), (name, dtype, private)


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


@pytest.mark.parametrize("private", [True, False])
def test_file_that_is_cut_off_or_gone_meanwhile_is_named(folder: Path, private: bool) -> None:
    """The header was whole when the folder was opened; a mapped tensor is refused before its pages are used."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    with SafetensorsFiles(folder) as files:
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(IntegrityError, match="ends too soon"):
            files.read("single", private=private)
    path.write_bytes(content)
    with SafetensorsFiles(folder) as files:
        path.unlink()
        with pytest.raises(ModelError, match="is missing"):
            files.read("single", private=private)


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("at", [0, 8, 32])
def test_frozen_matrix_is_its_file_mapped_where_torch_would_place_it(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, converted, or a vector, it is copied. Its file is not kept open or changed, and let go of with it."""
    tensors = {"m": torch.randn(64, 48), "v": torch.randn(16)}
    path = write_at(tmp_path, tensors, at)
    content = path.read_bytes()
    with SafetensorsFiles(tmp_path) as files:
        matrix, anywhere = (files.read_frozen("m", torch.float32, whole=True, alignment=k) for k in (ALIGNMENT, 1))
        vector = files.read_frozen("v", torch.float32, whole=True)
        converted = files.read_frozen("m", torch.float64, whole=True)
    found = [is_mapped(one.data_ptr(), path) for one in (matrix, anywhere, vector, converted)]
    assert found == [at == 0, True, False, False]
    assert matrix.data_ptr() % ALIGNMENT == 0
    assert not files.copied_text(), "a line for so few bytes helps nobody"
    monkeypatch.setattr(tensor_files, "_TOLD_BYTES", 1)
    words = "12.0 KiB of frozen weights are copied into memory, not mapped from model.safetensors .* FILE COPY"
    assert re.match(words if at else "$", files.copied_text()), "of the matrix that torch would place elsewhere, alone"
    assert str(path) not in [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    assert torch.equal(matrix, tensors["m"]) and torch.equal(vector, tensors["v"])
    assert torch.equal(converted, tensors["m"].double())
    anywhere.add_(1)
    assert path.read_bytes() == content
    del matrix, anywhere
    assert not mapped_bytes(path, "Size")


def test_mapped_matrix_that_is_used_whole_is_checked(tmp_path: Path) -> None:
    """As a copied one is; a table may have such numbers in rows that nobody uses."""
    for at in (0, 8):
        write_at(tmp_path, {"m": torch.tensor([[1.0, 2.0], [torch.nan, 3.0]])}, at)
        with SafetensorsFiles(tmp_path) as files:
            files.read_frozen("m", torch.float32)
            with pytest.raises(ModelError, match="tensor m has numbers that are not finite"):
                files.read_frozen("m", torch.float32, whole=True)


def test_tensor_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    """A model in 8-bit floating point has to be converted."""
    save_file({"w": torch.zeros(4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with SafetensorsFiles(tmp_path) as files, pytest.raises(ModelError, match="F8_E4M3"):
        files.read("w")
