"""Tensors of a model folder are read one at a time, and those that are kept whole without a second copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from edge.machine.memory_budget import give_memory_back, peak_rss_bytes, reset_peak, rss_bytes
from edge.model.safetensors_files import SafetensorsFiles
from ringtune.errors import IntegrityError, ModelError

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
    give_memory_back()
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
