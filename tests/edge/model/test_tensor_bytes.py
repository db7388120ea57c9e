"""Tensors go through in pieces and come out as they were, or converted."""

from __future__ import annotations

import pytest
import torch

from edge.model.tensor_bytes import TORCH_DTYPES, fill, is_finite, pieces_of
from ringtune.errors import IntegrityError
from ringtune.files.pieces import PIECE_BYTES, HeldPieces, Pieces
from ringtune.files.safetensors_stream import TensorPieces


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
