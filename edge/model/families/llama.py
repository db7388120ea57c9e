"""Llama and Mistral: rotary positions, grouped key-value heads, Mistral with a sliding window."""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch
from edge.model.families.gpt2 import CausalContext, causal_context, last_token


class LlamaFamily:
    """The ``FamilyForward`` of Llama and Mistral; each node makes its own rotary embedding, which has no weights."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Look the word embeddings up."""
        hidden: torch.Tensor = base.embed_tokens(batch.ids)
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> CausalContext:
        """Build the causal mask as the library does, and the rotary tables."""
        config = base.config
        window = config.model_type == "mistral" and config.sliding_window is not None
        context = causal_context(config, hidden_BTD, mask_BT, window=window)
        return context._replace(rotary=base.rotary_emb(hidden_BTD, context.positions))

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer."""
        hidden: torch.Tensor = block(
            hidden_BTD,
            attention_mask=context.mask,
            position_ids=context.positions,
            cache_position=context.row_positions,
            position_embeddings=context.rotary,
        )
        return hidden

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state, and pick each row's last token for classification."""
        last = base.norm(hidden_BTD)
        return last, {"cls_output": last_token(last, batch.mask)}


FAMILY = LlamaFamily()
