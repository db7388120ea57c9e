"""What each subnet's own weights are, family by family."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edge.model.head_groups.weights import WeightSlice, subnet_slices, subnets_of_block
from edge.model.layouts import LAYOUTS
from ringtune.errors import PlanError
from ringtune.models.families import FAMILIES
from tests.support.tiny_families import MODEL_TYPES, base_model


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("count", [1, 2])
def test_slices_of_all_subnets_are_whole_parameters(model_type: str, count: int) -> None:
    """Every element of every named parameter belongs to exactly one subnet."""
    model = base_model(model_type, num_blocks=1)
    block = model.get_submodule(FAMILIES[model_type].blocks_path)[0]
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


def test_slices_of_bert_are_rows_of_heads_and_columns_behind() -> None:
    """Head 1 of four at width 32, and its quarter of 48 rows."""
    model = base_model("bert", num_blocks=1)
    block = model.encoder.layer[0]
    parts = subnet_slices(block, "bert", subnets_of_block(block, "bert", model.config, 4))[1]
    assert WeightSlice("attention.self.query.weight", 0, 8, 16) in parts
    assert WeightSlice("attention.self.query.bias", 0, 8, 16) in parts
    assert WeightSlice("attention.output.dense.weight", 1, 8, 16) in parts
    assert WeightSlice("intermediate.dense.weight", 0, 12, 24) in parts
    assert WeightSlice("output.dense.weight", 1, 12, 24) in parts
    assert not [part for part in parts if part.name == "output.dense.bias"]


def test_slices_of_gpt2_are_three_ranges_of_one_matrix() -> None:
    """Stored with a row for each input; queries, keys and values side by side."""
    model = base_model("gpt2", num_blocks=1)
    parts = subnet_slices(model.h[0], "gpt2", subnets_of_block(model.h[0], "gpt2", model.config, 4))[1]
    merged = [part[1:] for part in parts if part.name == "attn.c_attn.weight"]
    assert merged == [(1, 8, 16), (1, 40, 48), (1, 72, 80)]
    assert WeightSlice("mlp.c_proj.weight", 0, 12, 24) in parts


def test_slices_of_llama_keep_query_heads_with_their_key_value_head() -> None:
    """Four query heads over two key/value heads, and a gate."""
    model = base_model("llama", num_blocks=1)
    subnets = subnets_of_block(model.layers[0], "llama", model.config, 2)
    parts = subnet_slices(model.layers[0], "llama", subnets)[1]
    assert WeightSlice("self_attn.q_proj.weight", 0, 16, 32) in parts
    assert WeightSlice("self_attn.k_proj.weight", 0, 8, 16) in parts
    assert WeightSlice("mlp.gate_proj.weight", 0, 24, 48) in parts
    with pytest.raises(PlanError, match="4 subnets do not divide 2 key/value heads"):
        subnets_of_block(model.layers[0], "llama", model.config, 4)


def test_every_family_has_a_layout_of_modules_that_exist() -> None:
    """No family is forgotten, and no dotted name is wrong."""
    assert LAYOUTS.keys() == FAMILIES.keys()
    for model_type, layout in LAYOUTS.items():
        model = base_model(model_type, num_blocks=1)
        block = model.get_submodule(FAMILIES[model_type].blocks_path)[0]
        for field in ("attention", "query", "activation", "attention_norm", "feed_forward_norm", "down"):
            assert isinstance(block.get_submodule(getattr(layout, field)), nn.Module)
