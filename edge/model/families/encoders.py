"""BERT, RoBERTa, XLM-RoBERTa, ELECTRA, DistilBERT and vision transformers.

A block of a BERT needs the hidden state and an additive 4-D mask (or None without padding). ELECTRA has BERT's blocks
after narrower, projected embeddings, and always plain (eager) attention. DistilBERT has no token types; its plain
attention takes the 2-D mask as it is. Of a vision transformer patches are tokens; the travelling mask is all ones and
not used.
"""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch
from ringtune.errors import DataError


class BertFamily:
    """The ``FamilyForward`` of BERT; the pooler is not used, because the classification head reads the first token."""

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
        found = attention.self(first_BtD, attention_mask=mask, encoder_hidden_states=hidden_BTD)[0]
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
        found = block.sa_layer_norm(found + first_BtD)
        hidden: torch.Tensor = block.output_layer_norm(block.ffn(found) + found)
        return hidden


class ElectraFamily(BertFamily):
    """The ``FamilyForward`` of ELECTRA."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Embed as BERT, then project to the model's width if it differs."""
        hidden = super().embed(base, batch)
        return base.embeddings_project(hidden) if hasattr(base, "embeddings_project") else hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor | None:
        """Build an additive mask, with padding or without."""
        return additive_mask(hidden_BTD, mask_BT)


class VitFamily:
    """The ``FamilyForward`` of vision transformers; the pooler is not used, because the head reads the class token."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Embed patches and positions after the class token."""
        if batch.pixels is None:
            raise DataError("the batch has no images; set model.task = 'image-classification'")
        table = base.embeddings.position_embeddings
        hidden: torch.Tensor = base.embeddings(batch.pixels.to(table.dtype))
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Return None: a block has no other input."""

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer."""
        hidden: torch.Tensor = block(hidden_BTD, None)
        return hidden

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state."""
        return base.layernorm(hidden_BTD), {}
