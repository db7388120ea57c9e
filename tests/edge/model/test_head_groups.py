"""A block by head groups: each subnet's own weights, less work, and no copy of a weight."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from edge.model.head_groups import (
    Matrix,
    WeightSlice,
    _ranges,
    active_inputs,
    active_outputs,
    subnet_slices,
    subnets_of_block,
)
from edge.model.slice import BlockRunner
from edge.techniques.activation_checkpointing import saved_tensors, storage_bytes
from ringtune.errors import PlanError
from ringtune.job.job import parse_job
from ringtune.models.families import FAMILIES, LAYOUTS
from ringtune.schedule.operation_tables import Subnets
from tests.support.tiny_families import MODEL_TYPES, base_model, write_family
from tests.support.whole_models import built


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_slices_of_all_subnets_are_whole_parameters(model_type: str) -> None:
    """Every element of every named parameter belongs to exactly one subnet; the layout names modules that exist."""
    model = base_model(model_type, num_blocks=1)
    block = model.get_submodule(FAMILIES[model_type].blocks_path)[0]
    for field in ("attention", "query", "activation", "attention_norm", "feed_forward_norm", "down"):
        assert isinstance(block.get_submodule(getattr(LAYOUTS[model_type], field)), nn.Module)
    for count in (1, 2):
        subnets = subnets_of_block(block, model_type, model.config, count)
        taken = {name: torch.zeros_like(value, dtype=torch.int64) for name, value in block.named_parameters()}
        slices = subnet_slices(block, model_type, subnets)
        assert len(slices) == count
        for part in (part for parts in slices for part in parts):
            taken[part.name].narrow(part.dimension, part.start, part.stop - part.start).add_(1)
        own = {part.name for part in slices[0]}
        assert all(bool((counts == (name in own)).all()) for name, counts in taken.items())
        others = {name for name in taken if name not in own}
        assert all("norm" in name.lower() or "ln_" in name or name.endswith("bias") for name in others), others


SLICES = {
    "bert": (
        WeightSlice("attention.self.query.weight", 0, 8, 16),
        WeightSlice("attention.self.query.bias", 0, 8, 16),
        WeightSlice("attention.output.dense.weight", 1, 8, 16),
        WeightSlice("intermediate.dense.weight", 0, 12, 24),
        WeightSlice("output.dense.weight", 1, 12, 24),
    ),
    "gpt2": (
        *(WeightSlice("attn.c_attn.weight", 1, at, at + 8) for at in (8, 40, 72)),
        WeightSlice("mlp.c_proj.weight", 0, 12, 24),
    ),
    "llama": (
        WeightSlice("self_attn.q_proj.weight", 0, 16, 32),
        WeightSlice("self_attn.k_proj.weight", 0, 8, 16),
        WeightSlice("mlp.gate_proj.weight", 0, 24, 48),
    ),
}
"""Some of subnet 1 of four heads at width 32: rows of heads and columns behind them, and its quarter of 48 rows.

GPT-2 stores queries, keys and values side by side, with a row for each input. Llama has four query heads over two
key/value heads, of which two subnets keep those that belong together, and a gate.
"""


@pytest.mark.parametrize("model_type", SLICES)
def test_slices_of_a_subnet_are_those_of_its_heads(model_type: str) -> None:
    """No subnet has the bias of an output matrix, and none a part of a key/value head."""
    model = base_model(model_type, num_blocks=1)
    block = model.get_submodule(FAMILIES[model_type].blocks_path)[0]
    count = 2 if model_type == "llama" else 4
    parts = subnet_slices(block, model_type, subnets_of_block(block, model_type, model.config, count))[1]
    assert set(SLICES[model_type]) <= set(parts)
    assert not [part for part in parts if part.name in ("output.dense.bias", "attn.c_proj.bias", "mlp.c_proj.bias")]
    if model_type == "llama":
        with pytest.raises(PlanError, match="4 subnets do not divide 2 key/value heads"):
            subnets_of_block(block, model_type, model.config, 4)


RANGES = ((1, 3), (4, 7))


def runner_of(folder: Path, adapter: str, model_type: str = "bert") -> tuple[BlockRunner, torch.nn.Module]:
    """A runner of one block with four heads, and the model."""
    write_family(folder, model_type, num_blocks=1)
    job = parse_job(
        f'[model]\npath = "{folder}"\ntask = "sequence-classification"\n[adapter]\nconfig = "{adapter}"\n',
        source="test",
    )
    skeleton = built(folder, job, [0])
    return BlockRunner(skeleton, dropout=0.0, seed=0), skeleton.model


def flops_of(runner: BlockRunner, pattern: str) -> tuple[int, int]:
    """Multiplications and additions of products in the forward, and in the backward."""
    x, mask = torch.randn(2, 8, 32, requires_grad=True), torch.ones(2, 8, dtype=torch.int64)
    context = runner.context(x, mask)
    in_place = {torch.ops.aten.addmm_: _product_flops}
    with FlopCounterMode(display=False, custom_mapping=in_place) as forward:
        y = runner.run(x, mask, context, 0, 1, patterns={0: pattern})
    with FlopCounterMode(display=False, custom_mapping=in_place) as backward:
        torch.autograd.backward([y.sum()])
    return forward.get_total_flops(), backward.get_total_flops()


def _product_flops(to: Any, left: Any, right: Any, out_shape: Any = None, **_: Any) -> int:
    """What torch counts for products that are not added in place."""
    return int(2 * left[0] * left[1] * right[1])


@pytest.mark.promise("3 frozen means free")
@pytest.mark.parametrize("model_type", ["bert", "gpt2", "vit", "llama", "mistral"])
def test_skipped_and_forward_only_subnets_multiply_less(tmp_path: Path, model_type: str) -> None:
    """Of two subnets a skipped one halves both; a forward-only one leaves the forward and halves the backward."""
    runner, _ = runner_of(tmp_path, "full", model_type)
    full, half, free = (flops_of(runner, pattern) for pattern in ("11", "13", "12"))
    assert half == (full[0] / 2, full[1] / 2)
    assert free == (full[0], full[1] / 2)


@pytest.mark.parametrize("adapter", ["seq_bn", "lora", "full"])
def test_graph_of_a_part_keeps_less_and_no_copy_of_a_weight(tmp_path: Path, adapter: str) -> None:
    """What the graph keeps besides the model's own weights is activations, fewer than the whole block's."""
    runner, model = runner_of(tmp_path, adapter)
    own = storage_bytes(model.parameters())
    x, mask = torch.randn(2, 8, 32), torch.ones(2, 8, dtype=torch.int64)
    context = runner.context(x, mask)

    def kept(pattern: str) -> list[torch.Tensor]:
        y = runner.run(x.requires_grad_(), mask, context, 0, 1, patterns={0: pattern})
        return [tensor for tensor in saved_tensors(y) if tensor.untyped_storage().data_ptr() not in own]

    whole, part, one = (kept(pattern) for pattern in ("1111", "1332", "3133"))
    assert sum(storage_bytes(part).values()) == sum(storage_bytes(one).values()) < sum(storage_bytes(whole).values())
    shapes = {tuple(tensor.shape) for tensor in model.parameters() if tensor.dim() == 2 and max(tensor.shape) > 31}
    assert not [tensor.shape for tensor in part if tuple(tensor.shape) in shapes]


def check_product(
    product: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, cut: Callable[..., torch.Tensor]
) -> None:
    """Values and every gradient are those of a linear layer that was cut out, with a bias or changed in place too."""
    given = [value.detach().requires_grad_() for value in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: product(x, w, b, RANGES), tuple(given))
    assert torch.autograd.gradcheck(lambda x, w: product(x, w, None, RANGES).mul_(2), tuple(given[:2]))
    assert torch.allclose(product(*given, RANGES), cut(*given), rtol=1e-12)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_with_ranges_equal_those_with_parts_that_were_cut_out(is_transposed: bool) -> None:
    """Values and every gradient, of stored and of transposed matrices: some outputs, and some inputs."""
    torch.manual_seed(0)
    chosen = [at for start, stop in RANGES for at in range(start, stop)]
    outputs, inputs = (
        torch.randn(*reversed(shape), dtype=torch.float64).t()
        if is_transposed
        else torch.randn(*shape, dtype=torch.float64)
        for shape in ((9, 4), (4, 9))
    )
    linear = torch.nn.functional.linear
    x, some = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    long, short = torch.randn(9, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    check_product(active_outputs, x, outputs, long, lambda x, w, b: linear(x, w[chosen], b[chosen]))
    check_product(active_inputs, some, inputs, short, lambda x, w, b: linear(x, w[:, chosen], b))


@pytest.mark.promise("7 bounded memory")
def test_ranges_of_many_patterns_take_little_memory() -> None:
    """Of 12 subnets there are 4,096 patterns of active ones; the ranges of some of them are kept."""
    subnets, rng = Subnets(heads=12, kv_heads=12, inner=64, count=12), random.Random(0)
    patterns = [tuple(sorted(rng.sample(range(12), rng.randint(1, 12)))) for _ in range(3000)]
    modules = [Matrix(name, True, 0, 32, True, True) for name in ("query", "key", "value")]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        found = [_ranges(matrix, subnets, active) for active in patterns for matrix in modules]
        count = len(found)
        del found
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert count == 9000 and taken < 1_000_000
