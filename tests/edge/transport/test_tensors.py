"""Tensors as bytes and back: exact where the type is, bounded where it is not, never NaN."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from edge.transport import tensors
from ringtune.errors import DivergedError, FrameError
from ringtune.schedule.course import WIRE_DTYPES
from tests.support.wire_parts import hidden


def _payload(encoded: tensors.EncodedTensor) -> memoryview:
    return memoryview(bytearray(b"".join(encoded.parts)))


def _round_trip(
    tensor: torch.Tensor,
    mask: torch.Tensor | None,
    dtype: str,
    compute_dtype: torch.dtype = torch.float32,
    packed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    encoded = tensors.encode(tensor, mask, dtype)
    return tensors.decode(
        _payload(encoded),
        encoded.shape,
        encoded.dtype,
        encoded.mask_bytes,
        compute_dtype=compute_dtype,
        exponent=encoded.exponent,
        packed=packed,
    )


def test_tensors_know_every_wire_dtype_of_a_plan() -> None:
    """What a plan may ask for can be encoded."""
    assert set(tensors.WIRE_TYPES) == set(WIRE_DTYPES)


def test_tensors_of_full_width_arrive_bit_for_bit_and_of_half_width_as_if_cast() -> None:
    """float32 over float32, and anything over float64, loses nothing; a half type costs exactly one rounding."""
    tensor, mask = hidden()
    for dtype, compute_dtype in itertools.product(("float32", "float64"), (torch.float32, torch.float64)):
        came, came_mask = _round_trip(tensor, mask, dtype, compute_dtype)
        assert came.dtype == compute_dtype
        assert torch.equal(came, tensor.to(compute_dtype))
        assert came_mask is not None
        assert torch.equal(came_mask, mask)
    for dtype in ("bfloat16", "float16"):
        came, came_mask = _round_trip(tensor, None, dtype)
        assert came_mask is None
        assert torch.equal(came, tensor.to(tensors.WIRE_TYPES[dtype]).to(torch.float32))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-38, 36), rows=st.integers(1, 5), width=st.integers(1, 33))
def test_tensors_int8_is_off_by_half_a_scale_at_most(seed: int, exponent: int, rows: int, width: int) -> None:
    """For each row: ``|error| <= max|row| / 254``, but for rounding in float32 itself."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, width, generator=generator, dtype=torch.float64) * 10.0**exponent
    tensor = tensor.to(torch.float32)
    came, _ = _round_trip(tensor, None, "int8")
    largest = tensor.double().abs().amax(dim=-1, keepdim=True)
    smallest_step = 2.0**-149  # of float32
    bound = largest / 254 * (1 + 1e-5) + 127 * smallest_step
    assert bool(((came.double() - tensor.double()).abs() <= bound).all())


def test_tensors_bytes_are_known_before_encoding() -> None:
    """``wire_bytes`` is exactly what encoding gives, for every type."""
    tensor, mask = hidden(3, 5, 7)
    for dtype, sent_mask in itertools.product(sorted(WIRE_DTYPES), (mask, None)):
        encoded = tensors.encode(tensor, sent_mask, dtype)
        assert encoded.mask_bytes == (0 if sent_mask is None else 15)
        expected = tensors.wire_bytes(tensor.shape, dtype, encoded.mask_bytes)
        assert (encoded.payload_bytes, _payload(encoded).nbytes) == (expected, expected), dtype


def test_tensors_that_are_views_or_have_a_history_are_sent_as_seen() -> None:
    """Strides do not reach the wire: a transposed, sliced tensor arrives as it looks; so does a forward's result."""
    tensor = torch.arange(48.0).view(4, 3, 4).transpose(0, 2)[1:, ::2]
    came, _ = _round_trip(tensor, None, "float32")
    assert torch.equal(came, tensor)
    came, _ = _round_trip((torch.ones(2, 3, 4, requires_grad=True) * 2.0).reshape(2, 3, 4), None, "bfloat16")
    assert torch.equal(came, torch.full((2, 3, 4), 2.0))


def test_tensors_with_nan_or_infinity_are_refused() -> None:
    """Whatever the type on the wire and wherever it lies, a value that is not finite does not come through."""
    for dtype, bad, place in itertools.product(
        sorted(WIRE_DTYPES), (torch.nan, torch.inf, -torch.inf), (0, 1500, 5999)
    ):
        tensor = torch.rand(3, 50, 40)
        tensor.view(-1)[place] = bad
        with pytest.raises(DivergedError, match=r"values of a tensor of shape \[3, 50, 40\] are NaN or infinite"):
            _round_trip(tensor, None, dtype)


def test_tensors_that_overflow_where_they_are_computed_with_are_refused() -> None:
    """Finite scales of int8, and finite numbers of float64, may be infinite in float32."""
    scales_and_steps = torch.tensor([3e38] * 6).numpy().tobytes() + bytes([127] * 48)
    with pytest.raises(DivergedError, match="48 values"):
        tensors.decode(memoryview(bytearray(scales_and_steps)), (2, 3, 8), "int8", 0, compute_dtype=torch.float32)
    with pytest.raises(DivergedError, match="48 values"):
        _round_trip(torch.full((2, 3, 8), 1e300, dtype=torch.float64), None, "float64")


def test_tensors_whose_sum_overflows_are_finite_all_the_same() -> None:
    """The quick check by a sum never refuses a tensor for being large."""
    tensor = torch.full((2, 3, 8), 3e38)
    came, _ = _round_trip(tensor, None, "float32")
    assert torch.equal(came, tensor)


def test_tensors_of_any_size_arrive() -> None:
    """Gradients of 1e-8 do not become zero, and 1e6 does not overflow: every type has the range of float32."""
    bounds = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
    for dtype, size in itertools.product(bounds, (1e-30, 1e-8, 1e-4, 1.0, 1e6, 1e30)):
        tensor = torch.randn(4, 6, 33, generator=torch.Generator().manual_seed(3)) * size
        came, _ = _round_trip(tensor, None, dtype)
        error, exact = (came.double() - tensor.double()).abs(), tensor.double().abs()
        assert bool((error <= exact * bounds[dtype]).all()), (dtype, size)


def test_tensors_float16_keeps_every_digit_whatever_the_size() -> None:
    """What float16 can hold arrives bit for bit, times any power of two.

    The smallest number of float32 arrives; of the largest ones, which only diverged training has, none is wrong.
    """
    for power in (-100, -40, 0, 40, 100):
        tensor = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(4)).to(torch.float16).to(torch.float32)
        came, _ = _round_trip(tensor * 2.0**power, None, "float16")
        assert torch.equal(came, tensor * 2.0**power), power
    for largest in (0.0, 2.0**-149, 2.0**-126, 2.0**127, torch.finfo(torch.float32).max):
        tensor = torch.full((1, 1, 4), largest)
        encoded = tensors.encode(tensor, None, "float16")
        assert tensors.MIN_EXPONENT <= encoded.exponent <= tensors.MAX_EXPONENT
        if largest > 2.0**127:
            with pytest.raises(DivergedError, match="4 values"):
                _round_trip(tensor, None, "float16")
        else:
            assert torch.equal(_round_trip(tensor, None, "float16")[0], tensor), largest


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down the bytes of the largest tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        for made in found if isinstance(found, tuple | list) else (found,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.largest_bytes = max(self.largest_bytes, made.nbytes)
        return found


def test_tensors_float16_are_made_without_a_second_one_of_full_width() -> None:
    """A link's thread holds what it was given and half as many bytes: what memory estimates count on."""
    tensor = torch.randn(1, 512, 256)
    with _Made() as made:
        encoded = tensors.encode(tensor, None, "float16")
    assert made.largest_bytes == encoded.payload_bytes == tensor.nbytes // 2


def test_tensors_mask_of_other_values_is_refused() -> None:
    """A mask holds zeros and ones only, and twos where rows are packed."""
    tensor, mask = hidden()
    with pytest.raises(FrameError, match="other values than 0 and 1"):
        _round_trip(tensor, mask * 2, "float32")
    for values in (mask * 2, mask):
        found = _round_trip(tensor, values, "float32", packed=True)[1]
        assert found is not None and torch.equal(found, values)
    with pytest.raises(FrameError, match="other values than 0, 1 and 2"):
        _round_trip(tensor, mask * 3, "float32", packed=True)


def test_tensors_of_another_size_are_refused() -> None:
    """Bytes that do not fit the shape are refused before they are looked at."""
    tensor, _ = hidden()
    payload = _payload(tensors.encode(tensor, None, "float32"))
    for shape, mask_bytes in (((2, 6, 7), 0), ((2, 6, 8), 12), ((2, 3, 6, 8), 0)):
        with pytest.raises(FrameError, match="bytes arrived for shape"):
            tensors.decode(payload, shape, "float32", mask_bytes, compute_dtype=torch.float32)
    with pytest.raises(FrameError, match="does not fit shape"):
        tensors.decode(payload[:-4], (2, 6, 7), "float32", 44, compute_dtype=torch.float32)
