"""Tests of ``ringtune.models.adapter_support``: head group support, summed adapters, merge support."""

from __future__ import annotations

import pytest

from ringtune.errors import UsageError
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.models.adapter_support import head_group_refusal, merge_refusal, summed_config
from tests.support.cases import cases

COVERED = (
    "seq_bn",
    "double_seq_bn",
    "par_bn",
    "seq_bn[use_gating=True]",
    "lora",
    "lora[dropout=0.1]",
    "lora[attn_matrices=['q','k','v'], intermediate_lora=True, output_lora=True]",
    "seq_bn|lora[r=4]",
)
REFUSED = {
    "ia3": "it scales",
    "dora": "DoRA",
    "lora[use_dora=True]": "DoRA",
    "lora[use_gating=True]": "gate of LoRA",
    "mtl_lora": "MTL-LoRA",
    "loreft": "ReFT",
    "seq_bn|ia3": "it scales",
    "linear": "an auxiliary model is not divided",
    "mlp[hidden=8]": "an auxiliary model is not divided",
}


@cases("config", COVERED)
def test_covered_adapters_are_not_refused(config: str) -> None:
    """Bottlenecks are applied once, LoRA has rows and columns."""
    assert head_group_refusal(config, heads=1) == ""


@cases("config", REFUSED)
def test_what_is_not_covered_is_refused_with_the_remedy(config: str) -> None:
    """Both keys are named, and whole blocks stay possible."""
    message = head_group_refusal(config, heads=2)
    assert REFUSED[config] in message
    assert "adapter.config" in message and "operations.heads = 0" in message
    assert head_group_refusal(config, heads=0) == ""


@cases(
    ("config", "options"),
    [
        ("lora[r=4,alpha=16]", {"r": 12, "alpha": 48}),
        ("lora", {"r": 24, "alpha": 24}),
        ("lora[attn_matrices=['k'],init_weights='bert']", {"r": 24, "alpha": 24, "attn_matrices": ["k"]}),
        ("ia3[composition_mode='add']", {"r": 3, "alpha": 3}),
        ("linear[alpha=2.0]", {"alpha": 2.0}),
    ],
)
def test_sum_has_the_rank_and_alpha_of_all_so_that_their_ratio_stays(config: str, options: dict[str, object]) -> None:
    """Other options stay; a matrix of its own does not grow."""
    (part,) = parse_adapter_config(summed_config(config, 3))
    assert {name: part.options[name] for name in options} == options


def test_sum_of_a_mixture_is_the_mixture_of_sums() -> None:
    """Each part by its own rule."""
    own = "linear[alpha=2.0,attn_matrices=['v']]|linear[selfattn_lora=False,output_lora=True]"
    config = f"lora[r=4,attn_matrices=['q']] | {own}"
    lora, *linear = parse_adapter_config(summed_config(config, 3))
    assert lora == ("lora", {"r": 12, "alpha": 24, "attn_matrices": ["q"]})
    assert linear == list(parse_adapter_config(config)[1:])


@cases(
    ("config", "count", "message"),
    [
        ("seq_bn", 2, "can't be added up: it is no change of matrices; give one of them with --user"),
        ("mlp[hidden=4]", 2, "can't be added up"),
        ("lora[r=64]", 65, "add up to rank 4,160, at most 4,096 is allowed; give one of them with --user"),
    ],
)
def test_sum_that_is_no_adapter_is_refused(config: str, count: int, message: str) -> None:
    """It says why, and the remedy."""
    with pytest.raises(UsageError, match=message):
        summed_config(config, count)


@cases(
    ("config", "problem"),
    [
        ("linear", ""),
        ("linear[alpha=0.5,output_lora=True]", ""),
        ("lora[r=4]", ""),
        ("lora[use_gating=True]", "its gate"),
        ("dora", "its gate, or DoRA's norm"),
        ("ia3", "it is no change of matrices"),
        ("mtl_lora", "it is no change of matrices"),
        ("mlp", "it is no change of matrices"),
        ("seq_bn", "it is no change of matrices"),
        ("lora|seq_bn", "its part 'seq_bn' can't, as it is no change of matrices"),
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['v']]", ""),
        ("linear[attn_matrices=['q']]|mlp[attn_matrices=['v']]", "its part 'mlp' can't, as it is no change"),
        ("full", "the blocks' own weights trained"),
    ],
)
def test_merging_needs_a_change_of_matrices(config: str, problem: str) -> None:
    """LoRA and linear are one; anything else says why it is not."""
    assert merge_refusal(config).startswith(problem)
    assert bool(merge_refusal(config)) is bool(problem)
