"""Blocks that run again: what they keep, with the masks that their dropout drew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import materialise
from edge.model.tensor_files import SafetensorsFiles
from edge.techniques.activation_checkpointing import PackedMasks
from ringtune.costs.memory_sizes import drawn_token_bytes
from ringtune.costs.model_facts import model_facts
from ringtune.job.job import Job, parse_job
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from tests.bench import saved_activations
from tests.edge.techniques.test_velora import BLOCKS, build
from tests.edge.techniques.test_velora import ROWS as VELORA_ROWS
from tests.edge.techniques.test_velora import TOKENS as VELORA_TOKENS
from tests.edge.techniques.test_velora import WIDTH as VELORA_WIDTH
from tests.support import tiny_families
from tests.support.block_stack import Stack

__all__ = ["build"]


def saved_bytes(build: Any, adapter: str, **policy: Any) -> float:
    """Bytes for each block and token."""
    stack = Stack(build("bert", adapter), dropout=0.0, **policy)
    return stack.saved_bytes(
        torch.randn(VELORA_ROWS, VELORA_TOKENS, VELORA_WIDTH), torch.ones(VELORA_ROWS, VELORA_TOKENS, dtype=torch.int64)
    )


def test_stack_counts_what_each_policy_keeps(build: Any) -> None:
    """With 8 parts an input of 4 D values becomes 8 numbers; a block that is run again keeps its input, and a mask."""
    inner = build("bert", "full").model.config.intermediate_size
    velora = Velora(blocks=BLOCKS, layers=("down",), parts=8)
    none = saved_bytes(build, "full")
    vector = 4 * (inner // 8) / (VELORA_ROWS * VELORA_TOKENS)
    assert saved_bytes(build, "full", velora=velora) == pytest.approx(none - 4 * inner + 4 * 8 + vector)
    assert saved_bytes(build, "full", recompute=BLOCKS) == 4 * VELORA_WIDTH + 8 / 2
    half = saved_bytes(build, "full", recompute=(Range(0, 1),))
    assert half == pytest.approx((none + 4 * VELORA_WIDTH) / 2, rel=0.05)


@pytest.mark.parametrize("policy", [{}, {"recompute": BLOCKS}])
def test_stack_goes_back_to_its_input(build: Any, policy: dict[str, Any]) -> None:
    """The gradient of the input is that of all blocks, and the weights have theirs."""
    skeleton = build("bert", "full")
    saved, y = Stack(skeleton, dropout=0.0, **policy).forward(torch.randn(2, 8, VELORA_WIDTH), torch.ones(2, 8).long())
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


ROWS, TOKENS, WIDTH = 2, 16, 32
LORA = "lora[r=4,attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]"


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the masks that are drawn; those that are given never come here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.bernoulli_.float
        return func(*args, **(kwargs or {}))


def make(folder: Path, model_type: str, adapter: str) -> tuple[Skeleton, Job]:
    """Two real blocks with dropout."""
    job = parse_job(
        f'[model]\npath = "{folder}"\n[adapter]\nconfig = "{adapter}"\n'
        f"[train]\ndropout = 0.2\nmax_length = {TOKENS}\nbatch_size = {ROWS}\nmicrobatches = 1\n",
        source="test",
    )
    skeleton = build_skeleton(folder, job)
    with SafetensorsFiles(folder) as weights:
        device = torch.device("cpu")
        materialise(skeleton, weights, blocks=range(2), with_embedding=False, dtype=torch.float32, device=device)
    return skeleton, job


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch without padding."""
    return torch.randn(ROWS, TOKENS, WIDTH), torch.ones(ROWS, TOKENS, dtype=torch.int64)


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "gpt2", "llama"])
@pytest.mark.sampled(1)
def test_second_run_draws_nothing_and_masks_take_what_planning_counts(tmp_path: Path, model_type: str) -> None:
    """For each token the input, and at most the bytes of masks that the memory model says; a shared mask besides."""
    folder = tiny_families.write_family(tmp_path, model_type, num_blocks=2)
    for adapter in ("seq_bn", "double_seq_bn", LORA, "full"):
        skeleton, job = make(folder, model_type, adapter)
        stack = Stack(skeleton, dropout=0.2, recompute=(Range(0, 2),))
        plain = Stack(skeleton, dropout=0.0, recompute=(Range(0, 2),))
        masks_bytes = stack.saved_bytes(*inputs()) - plain.saved_bytes(*inputs())
        planned = drawn_token_bytes(model_facts(folder, job), TOKENS)
        assert planned / 4 < masks_bytes <= planned, adapter
        saved, y = stack.forward(*inputs())
        with Draws() as draws:
            saved.backward(torch.ones_like(y))
        assert draws.count == 0, adapter


def test_masks_are_given_in_the_order_in_which_they_were_drawn() -> None:
    """The values are those of the first run, whatever the generator has come to; sizes that 8 does not divide too."""
    x, masks = torch.ones(3, 7), PackedMasks()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.dropout(x, 0.5, train=True), torch.dropout(x[:2], 0.1, train=True)

    with masks.drawn():
        first = run()
    assert [len(packed) for packed in masks.packed] == [3, 2]
    with masks.given():
        again = run()
    assert all(map(torch.equal, first, again))


def test_nothing_is_kept_where_other_numbers_are_drawn() -> None:
    """Then the generator has to be where it was, so that all is drawn again."""
    masks = PackedMasks()
    with masks.drawn():
        torch.dropout(torch.ones(8), 0.5, train=True)
        torch.rand(2)
    assert masks.packed == []
    with masks.given(), Draws() as draws:
        torch.dropout(torch.ones(8), 0.5, train=True)
    assert draws.count == 1
