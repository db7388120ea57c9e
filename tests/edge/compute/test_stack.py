"""A stack of blocks by itself keeps, for each token, what its policy says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edge.compute.saving.stack import Stack
from ringtune.schedule.saving import Velora
from ringtune.schedule.units import Range
from tests.bench import saved_activations
from tests.edge.compute.test_velora_saved import BLOCKS, ROWS, TOKENS, WIDTH, build

__all__ = ["build"]


def saved_bytes(build: Any, adapter: str, **policy: Any) -> float:
    """Bytes for each block and token."""
    stack = Stack(build("bert", adapter), dropout=0.0, **policy)
    return stack.saved_bytes(torch.randn(ROWS, TOKENS, WIDTH), torch.ones(ROWS, TOKENS, dtype=torch.int64))


def test_stack_counts_what_each_policy_keeps(build: Any) -> None:
    """With 8 parts an input of 4 D values becomes 8 numbers; a block that is run again keeps its input, and a mask."""
    inner = build("bert", "full").model.config.intermediate_size
    velora = Velora(blocks=BLOCKS, layers=("down",), parts=8)
    none = saved_bytes(build, "full")
    vector = 4 * (inner // 8) / (ROWS * TOKENS)
    assert saved_bytes(build, "full", velora=velora) == pytest.approx(none - 4 * inner + 4 * 8 + vector)
    assert saved_bytes(build, "full", recompute=BLOCKS) == 4 * WIDTH + 8 / 2
    half = saved_bytes(build, "full", recompute=(Range(0, 1),))
    assert half == pytest.approx((none + 4 * WIDTH) / 2, rel=0.05)


@pytest.mark.parametrize("policy", [{}, {"recompute": BLOCKS}])
def test_stack_goes_back_to_its_input(build: Any, policy: dict[str, Any]) -> None:
    """The gradient of the input is that of all blocks, and the weights have theirs."""
    skeleton = build("bert", "full")
    saved, y = Stack(skeleton, dropout=0.0, **policy).forward(torch.randn(2, 8, WIDTH), torch.ones(2, 8).long())
    found = saved.backward(torch.ones_like(y))
    assert found is not None
    assert found.shape == y.shape
    weights = [value for block in skeleton.blocks for value in block.parameters() if value.requires_grad]
    assert all(value.grad is not None for value in weights)


def test_bench_of_saved_activations_names_what_misses_its_bound() -> None:
    """The worst case of each figure counts."""
    case = {policy: {"saved_over_none": 0.1, "time_ratio": 1.0} for policy in saved_activations.POLICIES}
    cases = {f"{name}_dropout_0.0": case for name in saved_activations.ADAPTERS}
    figures = {"figures": saved_activations.figures_of(cases)}
    assert saved_activations.missed(figures) == []
    worse = {**case, "recompute": {"saved_over_none": 0.1, "time_ratio": 1.6}}
    figures = {"figures": saved_activations.figures_of(cases | {"lora_dropout_0.1": worse})}
    assert saved_activations.missed(figures) == ["recompute_time_ratio is 1.6, at most 1.5"]
