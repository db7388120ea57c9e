"""Qwen2, Qwen3 and SmolLM3: a Llama with blocks of full or of sliding-window attention.

A context has a mask for each type of block: ``full_attention`` and ``sliding_attention``. SmolLM3's blocks without
positions ignore the rotary tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from edge.data.tokens import Batch
from edge.model.families.gpt2 import CausalContext, causal_context, last_token

_SLIDING = "sliding_attention"


class LayeredContext(NamedTuple):
    """Masks and positions for blocks of each type.

    Attributes:
        full: for blocks in which a token attends to all before it.
        sliding: for blocks with a window; the same object where a model has none.
    """

    full: CausalContext
    sliding: CausalContext

    def of(self, attention: Any) -> CausalContext:
        """Return the context of the block with this attention module."""
        types = getattr(attention.config, "layer_types", None)
        return self.sliding if types and types[attention.layer_idx] == _SLIDING else self.full


class LayeredFamily:
    """The ``FamilyForward`` of Qwen2, Qwen3 and SmolLM3."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Look the word embeddings up."""
        hidden: torch.Tensor = base.embed_tokens(batch.ids)
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> LayeredContext:
        """Build the masks of both types as the library does, and the rotary tables."""
        config = base.config
        full = _context(config, hidden_BTD, mask_BT, window=False)
        full = full._replace(rotary=base.rotary_emb(hidden_BTD, full.positions))
        if _SLIDING not in (getattr(config, "layer_types", None) or ()):
            return LayeredContext(full, full)
        sliding = _context(config, hidden_BTD, mask_BT, window=True)
        return LayeredContext(full, sliding._replace(rotary=self.sliding_rotary(base, hidden_BTD, full)))

    def sliding_rotary(self, base: Any, hidden_BTD: torch.Tensor, full: CausalContext) -> Any:
        """Return the rotary tables of blocks with a window: those of all blocks."""
        return full.rotary

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer; in a tuple the hidden state is first."""
        own = context.of(block.self_attn)
        found = block(
            hidden_BTD,
            attention_mask=own.mask,
            position_ids=own.positions,
            cache_position=own.row_positions,
            **self.positions(context),
        )
        hidden: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return hidden

    def positions(self, context: LayeredContext) -> dict[str, Any]:
        """Return the rotary tables as arguments of a block."""
        return {"position_embeddings": context.full.rotary}

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state, and pick each row's last token for classification."""
        last = base.norm(hidden_BTD)
        return last, {"cls_output": last_token(last, batch.mask)}


def _context(config: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, *, window: bool) -> CausalContext:
    """Build the mask of one type as the library does.

    Eager attention computes its softmax in float32, where the smallest float64 overflows and a row of padding would
    spoil all others. So numeric masks are clamped to float32.
    """
    context = causal_context(config, hidden_BTD, mask_BT, window=window)
    if context.mask is None or not context.mask.is_floating_point():
        return context
    return context._replace(mask=context.mask.clamp(min=torch.finfo(torch.float32).min))


FAMILY = LayeredFamily()
