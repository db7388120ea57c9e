"""The projected linear layer and VeLoRA's vectors, each against the formula that defines it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from edge.compute.saving.projected import project, projected_linear, subtokens
from edge.compute.saving.vectors import Vectors
from ringtune.errors import IntegrityError
from ringtune.schedule.saving import INITS, subtoken_size


def tensors(inputs: int, outputs: int = 5) -> tuple[torch.Tensor, ...]:
    """An input of two rows of three tokens, a weight, a bias, and the gradient of the output."""
    generator = torch.Generator().manual_seed(inputs)
    shapes = ((2, 3, inputs), (outputs, inputs), (outputs,), (2, 3, outputs))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def gradients(call: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, grad: torch.Tensor) -> list[torch.Tensor]:
    """Value and gradients of a linear layer."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    y = call(*leaves[:2], leaves[2] if bias is not None else None)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def projected(z: torch.Tensor, vector: torch.Tensor) -> Any:
    """A projected layer as a function of input, weight and bias."""
    return lambda x, weight, bias: projected_linear(functional.linear, x, weight, bias, z, vector)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("inputs", "parts"), [(32, 8), (32, 5), (33, 32), (7, 7), (6, 1)])
def test_projected_linear_is_exact_but_for_the_weight(inputs: int, parts: int, with_bias: bool) -> None:
    """Value, input's and bias' gradients have the bits of a plain layer; the weight's is that of the rebuilt input."""
    x, weight, bias, grad = tensors(inputs)
    vector = torch.randn(subtoken_size(inputs, parts), dtype=torch.float64)
    given = bias if with_bias else None
    z = project(x, vector)
    ours = gradients(projected(z, vector), x, weight, given, grad)
    plain = gradients(functional.linear, x, weight, given, grad)
    assert all(torch.equal(ours[at], plain[at]) for at in range(len(plain)) if at != 2)
    sub = subtokens(x, len(vector))
    rebuilt = torch.stack([(row @ vector) * vector for row in sub]).view(6, -1)[:, :inputs]
    assert torch.allclose(ours[2], grad.view(6, -1).t() @ rebuilt, rtol=1e-9, atol=1e-12)


def test_projected_linear_of_one_value_a_subtoken_is_exact() -> None:
    """As many parts as inputs: nothing is saved, and nothing is lost."""
    x, weight, bias, grad = tensors(6)
    z, vector = project(x, torch.ones(1, dtype=torch.float64)), torch.ones(1, dtype=torch.float64)
    ours = gradients(projected(z, vector), x, weight, bias, grad)
    for mine, plain in zip(ours, gradients(functional.linear, x, weight, bias, grad), strict=True):
        assert torch.allclose(mine, plain, rtol=1e-12)


def test_subtokens_have_zeros_behind_the_last_value() -> None:
    """Five values in sub-tokens of two."""
    assert subtokens(torch.arange(1.0, 6.0).view(1, 5), 2).tolist() == [[1, 2], [3, 4], [5, 0]]


# ---- vectors ---------------------------------------------------------------------------------------


def make(init: str, **sizes: int) -> Vectors:
    """The vectors of some layers of seed 3."""
    return Vectors(sizes or {"0.down": 4}, init=init, seed=3)


@pytest.mark.parametrize("init", INITS)
def test_vectors_have_length_one_and_stay(init: str) -> None:
    """Whatever the init; only a running average changes, and not what it has handed out."""
    vectors, inputs = make(init), torch.randn(3, 5, 16)
    first = [vectors.next("0.down", x) for x in inputs]
    copies = [vector.clone() for vector in first]
    vectors.next("0.down", torch.randn(5, 16))
    assert all(float(vector.norm()) == pytest.approx(1, rel=1e-6) for vector in first)
    assert all(map(torch.equal, first, copies))
    assert torch.equal(first[0], first[2]) is (init != "running")


def test_vectors_of_random_depend_on_seed_and_layer_alone() -> None:
    """Not on the input, and not on the order."""
    one, other = make("random", a=4, b=4), make("random", a=4, b=4)
    x = torch.randn(5, 16)
    pair = (one.next("a", x), one.next("b", x))
    assert torch.equal(other.next("b", 2 * x), pair[1])
    assert torch.equal(other.next("a", x), pair[0])
    assert not torch.equal(*pair)
    assert not torch.equal(Vectors({"a": 4}, init="random", seed=4).next("a", x), pair[0])


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("value", [0.0, math.inf, math.nan, 1e30])
def test_vectors_of_an_input_without_direction_are_finite(init: str, value: float) -> None:
    """Zeros, and what diverged, give a vector of equal values; numbers that are near the largest one give some."""
    vector = make(init).next("0.down", torch.full((5, 16), value))
    assert torch.isfinite(vector).all()
    assert float(vector.norm()) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("init", INITS)
def test_vectors_go_on_from_a_checkpoint(init: str) -> None:
    """With the same bits, those without a micro-batch so far too."""
    vectors, again = make(init, a=4, b=4), make(init, a=4, b=4)
    inputs = torch.randn(4, 5, 16)
    for x in inputs[:2]:
        vectors.next("a", x)
    saved = vectors.tensors()
    assert saved["b"].numel() == 0
    again.check(saved, where="the shard")
    again.load(saved)
    for x in inputs[2:]:
        assert torch.equal(again.next("a", x), vectors.next("a", x))
        assert torch.equal(again.next("b", x), vectors.next("b", x))


def test_vectors_refuse_a_checkpoint_of_other_layers() -> None:
    """Missing, unknown, and of another size: one line names the layer."""
    vectors = make("average", a=4)
    for given, problem in (
        ({}, "has VeLoRA's vectors of other layers than this node's: a"),
        ({"a": torch.ones(4), "b": torch.ones(4)}, "has VeLoRA's vectors of other layers than this node's: b"),
        ({"a": torch.ones(5)}, r"has VeLoRA's vector of a as \[5\], expected \[4\]"),
    ):
        with pytest.raises(IntegrityError, match=f"the shard {problem}"):
            vectors.check(given, where="the shard")
