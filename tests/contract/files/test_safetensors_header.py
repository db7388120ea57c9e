"""The safetensors header: good files as they are, damaged ones refused, whatever the damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.errors import IntegrityError, ModelError, RingTuneError
from ringtune.files.safetensors_header import TensorInfo, read_safetensors_header
from tests.support.model_folder import safetensors_bytes, with_header

GOOD = safetensors_bytes({"a": (2, 3), "b": (), "c": (0, 5)})


def _read(tmp_path: Path, content: bytes) -> dict[str, TensorInfo]:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return read_safetensors_header(path)


def test_header_of_a_good_file_is_read_as_it_is(tmp_path: Path) -> None:
    """Scalars and empty tensors included; offsets count from the start of the file."""
    infos = _read(tmp_path, GOOD)
    start = len(GOOD) - 28
    assert infos == {
        "a": TensorInfo("F32", (2, 3), 24, start),
        "b": TensorInfo("F32", (), 4, start + 24),
        "c": TensorInfo("F32", (0, 5), 0, start + 28),
    }


def _entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its header claims 0 bytes of 0"),
        (b"\x10\x00", "its header claims 16 bytes of 2"),
        (b"\xff" * 8, "its header claims 18,446,744,073,709,551,615 bytes of 8"),
        (with_header(b"", b""), "its header claims 0 bytes"),
        (with_header(b"[]", b""), "its header is not a table"),
        (with_header(b"{]", b""), "its header is not readable"),
        (with_header(b"\xff\xfe", b""), "its header is not readable"),
        (with_header(b'{"a": {}, "a": {}}', b""), "a name occurs twice"),
        (with_header({"a": 3}, b""), "the entry of tensor 'a' is malformed"),
        (with_header({"a": {}}, b""), "the entry of tensor 'a' is malformed"),
        (with_header({"a": _entry(offsets=[0])}, b"0000"), "the entry of tensor 'a' is malformed"),
        (with_header({"a": _entry(dtype="F7")}, b"0000"), "tensor 'a' of type F7"),
        (with_header({"a": _entry(dtype=["F32"])}, b"0000"), "the entry of tensor 'a' is malformed"),
        (with_header({"a": _entry(shape=[-1])}, b"0000"), "shape [-1]"),
        (with_header({"a": _entry(shape=[1.0])}, b"0000"), "shape [1.0]"),
        (with_header({"a": _entry(shape=[True])}, b"0000"), "shape [True]"),
        (with_header({"a": _entry(shape=[2**62, 2**62])}, b"0000"), "can't take bytes [0, 4)"),
        (with_header({"a": _entry(offsets=[4, 0])}, b"0000"), "can't take bytes [4, 0)"),
        (with_header({"a": _entry(offsets=[4, 8])}, b"00000000"), "tensor 'a' begins at byte"),
        (with_header({"a": _entry(), "b": _entry()}, b"0000"), "tensor 'b' begins at byte"),
        (with_header({"a": _entry()}, b"000"), "its tensors need"),
        (with_header({"a": _entry()}, b"00000"), "its tensors need"),
    ],
)
def test_header_of_a_damaged_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """Truncated, overlapping, with holes, with nonsense: an error that says what and what to do."""
    with pytest.raises(IntegrityError) as caught:
        _read(tmp_path, content)
    assert reason in str(caught.value)
    assert str(caught.value).endswith("copy it again from its source")


def test_header_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is no damage."""
    with pytest.raises(ModelError, match=r"can't read .*No such file"):
        read_safetensors_header(tmp_path / "nothing")


@settings(max_examples=150)
@given(position=st.integers(0, len(GOOD) - 29), byte=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
def test_header_survives_any_damage(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int, cut: int
) -> None:
    """One wrong header byte or a cut anywhere: a consistent answer or an error of the tree, never another."""
    damaged = GOOD[:position] + bytes([byte]) + GOOD[position + 1 :]
    for content in (damaged, GOOD[:cut]):
        path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
        path.write_bytes(content)
        try:
            infos = read_safetensors_header(path)
        except RingTuneError:
            continue
        assert sum(info.nbytes for info in infos.values()) <= len(content)
