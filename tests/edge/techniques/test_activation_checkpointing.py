"""Blocks that run again: what they keep, with the masks that their dropout drew, and the bytes of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge.model.skeleton import Skeleton, build_skeleton
from edge.model.slice import BlockRunner, materialise
from edge.model.tensor_files import SafetensorsFiles
from edge.techniques.activation_checkpointing import (
    BlockForward,
    PackedMasks,
    SavedActivations,
    run_saving,
    saved_tensors,
    storage_bytes,
)
from ringtune.costs.memory_sizes import drawn_token_bytes
from ringtune.costs.model_facts import model_facts
from ringtune.job.job import Job, parse_job
from ringtune.schedule.placement import Placement
from ringtune.schedule.units import Range, Units
from tests.support import tiny_families


class Stack:
    """All blocks of a skeleton, each of which trains, forward and back as at a node under a policy; none is updated."""

    def __init__(self, skeleton: Skeleton, *, dropout: float, recompute: Sequence[Range] = ()) -> None:
        self.num_blocks = len(skeleton.blocks)
        self._skeleton, self._runner = skeleton, BlockRunner(skeleton, dropout=dropout, seed=0)
        self._placement = Placement(slices=(), private_blocks=self.num_blocks, recompute=tuple(recompute))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> tuple[SavedActivations, torch.Tensor]:
        """Run all blocks for one micro-batch; a gradient of its input is asked for."""
        with torch.no_grad():
            context = self._runner.context(hidden, mask)
        forward = BlockForward(
            blocks=self._runner,
            mask=mask,
            context=context,
            trained=Units.of(self.num_blocks, range(self.num_blocks)),
            lowest=-1,
            train_at=(0, 0),
            patterns={},
            watched=lambda start, stop: contextlib.nullcontext(),
            version=contextlib.nullcontext,
            projections=None,
        )
        return run_saving(forward, hidden, 0, self.num_blocks, self._placement)

    def saved_bytes(self, hidden: torch.Tensor, mask: torch.Tensor) -> float:
        """Bytes that a block keeps for its backward for each token, padding included; the mean over all blocks.

        What the blocks share, such as the attention mask, is divided among them.
        """
        saved, _ = self.forward(hidden, mask)
        weights = storage_bytes([*self._skeleton.model.parameters(), *self._skeleton.model.buffers()])
        saved_at = storage_bytes(saved.tensors())
        kept = sum(size for address, size in saved_at.items() if address not in weights)
        return kept / (mask.numel() * self.num_blocks)


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


def test_measure_agrees_with_saved_tensor_hooks(model_folder: Path) -> None:
    """Walking the graph finds the storages that torch packs."""
    from transformers import AutoModel

    block = AutoModel.from_pretrained(model_folder).encoder.layer[0].train()
    x = torch.randn(3, 7, 32, requires_grad=True)
    packed: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in (*block.parameters(), x)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            packed[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x)[0]
    output = y.untyped_storage()
    packed[output.data_ptr()] = output.nbytes()
    again = block(x)[0]
    kept = storage_bytes([*saved_tensors(again), again])
    assert sum(size for address, size in kept.items() if address not in weights) == sum(packed.values())
