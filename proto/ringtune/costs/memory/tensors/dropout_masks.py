"""What the masks of a block's dropout take, a bit for each value, where a block that runs again keeps them."""

from __future__ import annotations

from typing import Final

from ringtune.costs.profile import ModelFacts
from ringtune.models.adapters.kept_inputs import ADAPTER_DOWN

_HIDDEN_STATES: Final = 4
"""Hidden states that are dropped besides those of the adapters: two, and two more where LoRA is on three matrices."""


def drawn_token_bytes(model: ModelFacts, max_length: int) -> float:
    """Bytes of a block's masks for each padded token, at most.

    A value is drawn for every attention probability, and for those of some hidden states. Each part of an adapter
    drops as many values as its input has.

    Example: 12 heads, rows of 128 tokens, width 384 and a bottleneck are 1,536 + 5 * 384 values, 432 bytes.

    Args:
        model: sizes of the model.
        max_length: tokens of a row.
    """
    adapters = sum(kept.width for kept in model.kept_inputs if ADAPTER_DOWN in kept.layers)
    return (model.num_heads * max_length + _HIDDEN_STATES * model.hidden_size + adapters) / 8
