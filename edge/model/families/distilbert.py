"""DistilBERT: a BERT without token types; its plain attention takes the 2-D mask as it is."""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch
from edge.model.families.bert import BertFamily, sdpa_mask


class DistilBertFamily(BertFamily):
    """The ``FamilyForward`` of DistilBERT."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Sum word and position embeddings, and normalise the sum."""
        hidden: torch.Tensor = base.embeddings(batch.ids, None)
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor | None:
        """Build a 4-D mask for the fused attention kernel; otherwise return the 2-D mask."""
        return sdpa_mask(hidden_BTD, mask_BT) if base.config._attn_implementation == "sdpa" else mask_BT

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer; the hidden state is last in its tuple."""
        hidden: torch.Tensor = block(hidden_BTD, context, None, False)[-1]
        return hidden

    def first_tokens(self, block: Any, hidden_BTD: torch.Tensor, context: Any, count: int) -> torch.Tensor:
        """Run one layer for the first tokens, as queries of an attention over all tokens."""
        first_BtD = hidden_BTD[:, :count]
        mask = context if context is None or context.dim() == 2 else context[:, :, :count]
        found = block.attention(query=first_BtD, key=hidden_BTD, value=hidden_BTD, mask=mask)[0]
        found = block.attention_adapters(found, first_BtD, block.sa_layer_norm)
        hidden: torch.Tensor = block.output_adapters(block.ffn(found), found, block.output_layer_norm)
        return hidden


FAMILY = DistilBertFamily()
