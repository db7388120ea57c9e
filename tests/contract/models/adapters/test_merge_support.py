"""Which adapters can be merged into weights."""

from __future__ import annotations

import pytest

from ringtune.models.adapters.merge_support import merge_refusal


@pytest.mark.parametrize(
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
