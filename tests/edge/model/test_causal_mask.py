"""The causal mask of decoders equals the library's, which is made cell by cell."""

from __future__ import annotations

import itertools
from inspect import signature

import pytest
import torch

from edge.model.families.decoders import causal_context
from tests.support.tiny_families import DECODERS, config_of

MASKS = {
    "all tokens": lambda tokens: torch.ones(3, tokens, dtype=torch.int8),
    "padded on the right": lambda tokens: (torch.arange(tokens)[None] < torch.tensor([tokens, 2, 1])[:, None]).long(),
    "padded on the left": lambda tokens: torch.arange(tokens)[None] >= torch.tensor([tokens - 1, 1, 0])[:, None],
}
WINDOWED = ("mistral", "qwen2", "gemma2", "gemma3_text")


@pytest.mark.parametrize("model_type", DECODERS)
def test_causal_mask_is_that_of_the_library(model_type: str) -> None:
    """Shorter than a window of five tokens, as long, and longer; None where the kernel makes the mask."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = config_of(model_type, num_blocks=2)
    config._attn_implementation = "sdpa"
    windows = (False, True) if model_type in WINDOWED else (False,)
    for window, tokens, padding in itertools.product(windows, (1, 4, 5, 6, 9), MASKS):
        make = create_sliding_window_causal_mask if window else create_causal_mask
        hidden, mask = torch.zeros(3, tokens, 32), MASKS[padding](tokens)
        context = causal_context(config, hidden, mask, window=window)
        places = [context.row_positions] if "cache_position" in signature(make).parameters else []  # of 4.57
        wanted = make(config, hidden, mask, *places, None, context.positions)
        where = f"{padding}, {tokens} tokens, window: {window}"
        assert (context.mask is None) == (wanted is None), where
        assert wanted is None or torch.equal(context.mask, wanted), where  # type: ignore[arg-type]


def test_causal_mask_of_another_attention_is_made_by_the_library() -> None:
    """Written-out attention adds its mask to the scores: numbers instead of truth values."""
    config = config_of("gpt2", num_blocks=1)
    config._attn_implementation = "eager"
    mask = causal_context(config, torch.zeros(2, 4, 32), torch.ones(2, 4), window=False).mask
    assert mask is not None and mask.dtype == torch.float32
