"""A frozen matrix stands for a weight: torch multiplies with it, and nothing changes or widens it for good."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from edge.model.activations import saved_tensors
from edge.model.frozen import held as held_module
from edge.model.frozen.held import Held, Room, rounded_to_int8
from edge.model.frozen.matrix import FrozenMatrix, mm_into

ROWS, COLUMNS = 48, 32
WAYS = [(dtype, native) for dtype in ("bfloat16", "int8") for native in (False, True)]


def make(dtype: str, *, native: bool = False, room: Room | None = None) -> FrozenMatrix:
    """A matrix of random numbers, rounded."""
    numbers = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    found = (numbers.bfloat16(), None) if dtype == "bfloat16" else rounded_to_int8(numbers)
    return FrozenMatrix.of(Held(*found, native=native, room=room or Room()))


def linear(matrix: torch.Tensor) -> nn.Linear:
    """A linear layer with this weight, and always the same bias."""
    layer = nn.Linear(COLUMNS, ROWS).requires_grad_(False)
    layer.load_state_dict({"weight": matrix, "bias": torch.arange(float(ROWS))}, assign=True)
    return layer


def forward_and_backward(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the gradient of the input."""
    x = x.clone().requires_grad_(True)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return y.detach(), gradient


@pytest.mark.parametrize(("dtype", "native"), WAYS)
def test_matrix_in_a_linear_layer_is_that_of_its_numbers(dtype: str, native: bool) -> None:
    """Widened to the bit; natively as near as products in bfloat16 are."""
    matrix, x = make(dtype, native=native), torch.randn(3, 5, COLUMNS)
    found = forward_and_backward(linear(matrix), x)
    for got, want in zip(found, forward_and_backward(linear(matrix.wide()), x), strict=True):
        assert got.dtype is torch.float32
        if native:
            assert 0 < float((got - want).abs().max() / want.abs().max()) < 0.01
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize(("dtype", "native"), WAYS)
def test_matrix_that_is_too_large_is_multiplied_in_parts(
    monkeypatch: pytest.MonkeyPatch, dtype: str, native: bool
) -> None:
    """Rows that fit the room at a time, forwards and backwards; the room holds no more."""
    room, x = Room(), torch.randn(7, COLUMNS)
    matrix = make(dtype, native=native, room=room)
    whole = forward_and_backward(linear(matrix), x)
    room.__init__()  # type: ignore[misc]
    most = 5 * COLUMNS * 4
    monkeypatch.setattr(held_module, "MOST_WIDENED_BYTES", most)
    for got, want in zip(forward_and_backward(linear(matrix), x), whole, strict=True):
        assert float((got - want).norm() / want.norm()) < (0.01 if native else 1e-6)
    assert room.held_bytes == (0 if (dtype, native) == ("bfloat16", True) else most)


def test_matrix_keeps_nothing_else_for_the_backward() -> None:
    """A graph with a frozen matrix holds neither its input nor a widened copy."""
    x = torch.randn(4, COLUMNS, requires_grad=True)
    assert not saved_tensors(linear(make("int8"))(x))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "use",
    [
        lambda weight: functional.linear(torch.ones(4, ROWS), torch.t(weight)),
        lambda weight: functional.linear(torch.ones(4, ROWS), torch.transpose(weight, -2, -1), torch.ones(COLUMNS)),
        lambda weight: torch.addmm(torch.ones(COLUMNS), torch.ones(4, ROWS), weight),
        lambda weight: torch.ones(2, 4, ROWS) @ weight,
        lambda weight: functional.embedding(torch.tensor([[0, 7, 7]]), weight),
        lambda weight: torch.linalg.norm(weight + torch.ones(ROWS, COLUMNS), dim=1),
        lambda weight: functional.linear(torch.ones(4, COLUMNS), weight[3:7]),
        lambda weight: torch.ones(4, ROWS) @ weight[:, 2:5],
        lambda weight: torch.ones(4, 3) @ weight.t()[2:5, :],
        lambda weight: torch.stack([weight, weight]).sum(0),
    ],
)
def test_matrix_serves_every_use_of_the_libraries(dtype: str, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Linear layers with inputs first, LoRA's transposes, embeddings, DoRA's norms, rows and columns of subnets."""
    matrix = nn.Parameter(make(dtype), requires_grad=False)
    assert isinstance(matrix, FrozenMatrix)
    torch.testing.assert_close(use(matrix), use(matrix.wide()))


@pytest.mark.parametrize("native", [False, True])
def test_matrix_is_multiplied_into_a_place(native: bool) -> None:
    """The products of subnets write into parts of a result, or add to them, with a bias or without."""
    matrix, x, bias = make("int8", native=native), torch.randn(6, ROWS), torch.randn(COLUMNS)
    plain, out = matrix.wide(), torch.zeros(6, 2 * COLUMNS)
    mm_into(out[:, :COLUMNS], x, matrix, bias=bias)
    mm_into(out[:, :COLUMNS], x, matrix, add=True)
    want = torch.zeros(6, COLUMNS)
    mm_into(want, x, plain, bias=bias)
    mm_into(want, x, plain, add=True)
    torch.testing.assert_close(out[:, :COLUMNS], want, rtol=1e-5, atol=0.2 if native else 1e-4)
    assert not out[:, COLUMNS:].any()


def test_matrix_stays_small_when_its_module_is_converted() -> None:
    """Type and gradients of a module do not reach it; what would change it is refused."""
    layer = linear(make("int8")).to(device="cpu", dtype=torch.float32)
    assert isinstance(layer.weight, FrozenMatrix)
    assert (layer.weight.dtype, layer.weight.shape, layer.weight.requires_grad) == (torch.int8, (ROWS, COLUMNS), False)
    assert isinstance(layer.weight.detach(), FrozenMatrix)
    with pytest.raises(TypeError, match="zero_ would change a frozen matrix"):
        nn.init.zeros_(layer.weight)


def test_int8_has_a_scale_for_each_row() -> None:
    """The largest magnitude of a row is 127 steps; zeros stay zeros."""
    rows = torch.tensor([[-1.27, 0.5, 0.004], [0.0, 0.0, 0.0], [3e-30, -1e-30, 0.0]])
    numbers, scales = rounded_to_int8(rows)
    assert numbers.tolist() == [[-127, 50, 0], [0, 0, 0], [127, -42, 0]]
    assert scales.flatten().tolist() == pytest.approx([0.01, 0.0, 3e-30 / 127])
