"""The bytes of pairs and weights, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ringtune.costs.offload.pair_bytes import BFLOAT16, FLOAT32, VELORA, pair_token_bytes, pair_widths, weight_bytes
from ringtune.models.family import Widths

BASE: dict[str, Any] = {"hidden_size": 768, "widths": Widths.plain(768, 3072)}
FUSED: dict[str, Any] = {"hidden_size": 768, "widths": Widths.plain(768, 3072, merged=True)}


@pytest.mark.parametrize(
    ("config", "dropout", "facts", "values", "signs"),
    [
        ("lora", 0.0, BASE, 768 + 2 * 768, 0),  # q and v read one tensor
        ("lora", 0.1, BASE, 2 * 768 + 2 * 768, 0),  # each drops its own
        ("lora", 0.1, FUSED, 768 + 2 * 768, 0),  # one dropout for all three
        ("lora[attn_matrices=['q','k','v']]", 0.0, BASE, 768 + 3 * 768, 0),
        ("lora[selfattn_lora=False,output_lora=True]", 0.0, BASE, 3072 + 768, 0),
        ("seq_bn", 0.1, BASE, 2 * 768, 6),  # 48 units of ReLU
        ("double_seq_bn", 0.0, BASE, 4 * 768, 0),  # swish
        ("double_seq_bn[non_linearity='relu']", 0.0, BASE, 4 * 768, 12),
        ("mlp[hidden=12]", 0.1, BASE, 3 * 768, 4),
        ("mlp[hidden=12]", 0.1, FUSED, 3 * 768, 3),  # one tensor of bits
        ("linear", 0.1, BASE, 3 * 768, 0),
        ("linear[attn_matrices=['q']]|mlp[attn_matrices=['v'],hidden=12]", 0.0, BASE, 3 * 768, 2),
        ("linear[attn_matrices=['q']]|mlp[attn_matrices=['v'],hidden=12]", 0.0, FUSED, 3 * 768, 2),
        ("mlp[attn_matrices=['q'],hidden=4]|mlp[attn_matrices=['v'],hidden=4]", 0.0, FUSED, 3 * 768, 1),
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['k','v']]", 0.0, BASE, 4 * 768, 0),  # one tensor for all
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['k','v']]", 0.0, FUSED, 4 * 768, 0),
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['k','v']]", 0.1, BASE, 5 * 768, 0),  # LoRA drops its own
        ("lora[attn_matrices=['q']]|linear[attn_matrices=['k','v']]", 0.1, FUSED, 5 * 768, 0),
        ("linear[leave_out=[2,3]]|mlp[leave_out=[0,1],hidden=8]", 0.0, BASE, 3 * 768, 2),  # of block 3
        ("par_bn|lora[intermediate_lora=True]", 0.0, BASE, 2 * 768 + 3 * 768 + 768 + 3072, 48),
    ],
)
def test_pair_bytes_are_those_of_inputs_and_gradients(
    config: str, dropout: float, facts: Any, values: int, signs: int
) -> None:
    """In the type of the run, and in half of float32 with a bit for each unit of a ReLU."""
    found = pair_widths(config, 3, dropout=dropout, **facts)
    assert pair_token_bytes(found, FLOAT32, value_bytes=4) == 4 * values
    assert pair_token_bytes(found, BFLOAT16, value_bytes=4) == 2 * values + signs


def test_pair_bytes_with_velora_have_a_number_for_each_part() -> None:
    """The example of the module: 32 projections and two gradients."""
    found = pair_widths("lora", 0, dropout=0.0, **BASE)
    assert pair_token_bytes(found, FLOAT32, value_bytes=4) == 9216
    assert pair_token_bytes(found, VELORA, value_bytes=4) == 6272


def test_weight_bytes_are_those_of_the_block() -> None:
    """Eight ranks of two matrices; nothing where a block is left out."""
    assert weight_bytes("lora", 0, num_blocks=4, value_bytes=4, **BASE) == 4 * 8 * 4 * 768
    assert weight_bytes("lora[leave_out=[0]]", 0, num_blocks=4, value_bytes=4, **BASE) == 0
