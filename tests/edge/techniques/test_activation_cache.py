"""Files of kept hidden states: what is read is what was written, and damage is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edge.techniques.activation_cache import read_hidden, write_hidden
from ringtune.errors import IntegrityError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_hidden_state_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also one that is a view of another tensor."""
    hidden = torch.randn(5, 3, 8).to(dtype).transpose(0, 1)
    mask = torch.tensor([[1, 1, 1, 1, 0]] * 3)
    size_bytes = write_hidden(tmp_path / "one", hidden, mask)
    assert size_bytes == (tmp_path / "one").stat().st_size == 64 + hidden.numel() * dtype.itemsize + 15
    found, its_mask = read_hidden(tmp_path / "one")
    assert torch.equal(found, hidden) and found.dtype == dtype
    assert torch.equal(its_mask, mask.to(torch.uint8))
    assert found.data_ptr() % 64 == 0  # as tensors of torch are, so that kernels give the same bits


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    """In the header, in the hidden state, and in the mask; the rest of the header is empty."""
    path = tmp_path / "one"
    write_hidden(path, torch.randn(2, 2, 4), torch.ones(2, 2))
    whole = path.read_bytes()
    for at in [*range(28), *range(64, len(whole))]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(IntegrityError, match="one"):
            read_hidden(path)
    for content in (b"", whole[:40], whole[:-1], whole + b"x"):
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match="one"):
            read_hidden(path)
    with pytest.raises(IntegrityError, match="two can't be read: No such file"):
        read_hidden(tmp_path / "two")


def test_file_that_has_no_room_leaves_nothing(tmp_path: Path) -> None:
    """``/dev/full`` stands for a full disk."""
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_hidden(full, torch.randn(64, 64, 64), torch.ones(64, 64))
    assert list(tmp_path.iterdir()) == []
