"""What is looked at before an update: every number of every gradient, whatever the sums are."""

from __future__ import annotations

import pytest
import torch

from edge.model.finite import first_not_finite, require_finite_grads
from ringtune.errors import DivergedError


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
