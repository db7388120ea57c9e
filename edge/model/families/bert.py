"""BERT, RoBERTa, XLM-RoBERTa: a block needs the hidden state and an additive 4-D mask (or None without padding)."""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch


class BertFamily:
    """The ``FamilyForward`` of BERT; the pooler is not used, because the classification head reads the first token.

    Attributes:
        mask_name: name of the attention's argument for the keys' mask, in ``first_tokens``.
    """

    mask_name = "attention_mask"

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Sum word, position and token-type embeddings, and normalise the sum."""
        hidden: torch.Tensor = base.embeddings(input_ids=batch.ids, token_type_ids=batch.token_type_ids)
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor | None:
        """Build the mask as the model's ``forward`` does: None selects another attention kernel."""
        config = base.config
        if config._attn_implementation == "sdpa" and config.position_embedding_type == "absolute":
            return sdpa_mask(hidden_BTD, mask_BT)
        return additive_mask(hidden_BTD, mask_BT)

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer; only the hidden state of its tuple is used."""
        hidden: torch.Tensor = block(hidden_BTD, context, None, None)[0]
        return hidden

    def first_tokens(self, block: Any, hidden_BTD: torch.Tensor, context: Any, count: int) -> torch.Tensor:
        """Run one layer for the first tokens, as queries of a cross attention over all tokens."""
        first_BtD = hidden_BTD[:, :count]
        mask = context if context is None or context.shape[2] == 1 else context[:, :, :count]
        attention = block.attention
        found = attention.self(first_BtD, encoder_hidden_states=hidden_BTD, **{self.mask_name: mask})[0]
        hidden: torch.Tensor = block.feed_forward_chunk(attention.output(found, first_BtD))
        return hidden

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the last hidden state unchanged."""
        return hidden_BTD, {}


def sdpa_mask(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor | None:
    """Build the mask (B, 1, T, T) for the fused attention kernel; None without padding."""
    from transformers.modeling_attn_mask_utils import _prepare_4d_attention_mask_for_sdpa

    mask: torch.Tensor | None = _prepare_4d_attention_mask_for_sdpa(
        mask_BT, hidden_BTD.dtype, tgt_len=hidden_BTD.shape[1]
    )
    return mask


def additive_mask(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Build the mask (B, 1, 1, T) with 0 at tokens and the smallest number at padding."""
    return (1.0 - mask_BT[:, None, None, :].to(hidden_BTD.dtype)) * torch.finfo(hidden_BTD.dtype).min


FAMILY = BertFamily()
