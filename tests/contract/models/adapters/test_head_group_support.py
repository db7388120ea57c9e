"""Which adapters can be run by head groups is decided before anything trains."""

from __future__ import annotations

import pytest

from ringtune.models.adapters.head_group_support import refusal

COVERED = (
    "seq_bn",
    "double_seq_bn",
    "par_bn",
    "seq_bn[use_gating=True]",
    "lora",
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
    "lora[dropout=0.1]": "draws numbers",
    "seq_bn|ia3": "it scales",
    "linear": "an auxiliary model is not divided",
    "mlp[hidden=8]": "an auxiliary model is not divided",
}


@pytest.mark.parametrize("config", COVERED)
def test_covered_adapters_are_not_refused(config: str) -> None:
    """Bottlenecks are applied once, LoRA has rows and columns."""
    assert refusal(config, dropout=0.0, heads=1) == ""


@pytest.mark.parametrize("config", REFUSED)
def test_what_is_not_covered_is_refused_with_the_remedy(config: str) -> None:
    """Both keys are named, and whole blocks stay possible."""
    message = refusal(config, dropout=0.0, heads=2)
    assert REFUSED[config] in message
    assert "adapter.config" in message and "operations.heads = 0" in message
    assert refusal(config, dropout=0.0, heads=0) == ""


def test_dropout_is_refused_for_parts_of_a_block_only() -> None:
    """Attention dropout would be drawn for another number of heads."""
    assert "train.dropout = 0.1" in refusal("seq_bn", dropout=0.1, heads=1)
    assert refusal("seq_bn", dropout=0.1, heads=0) == ""
