"""BERT, RoBERTa, XLM-RoBERTa, ELECTRA, DistilBERT and vision transformers.

A block of a BERT needs the hidden state and an additive 4-D mask (or None without padding). ELECTRA has BERT's blocks
after narrower, projected embeddings; in transformers 4.57 its attention is not fused. DistilBERT has no token types. Of
a vision transformer patches are tokens; the travelling mask is all ones and not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edge.data.tokens import Batch
from ringtune.errors import DataError


class BertFamily:
    """The ``FamilyForward`` of BERT; the pooler is not used, because the classification head reads the first token.

    Attributes:
        is_fused: whether the attention of ``first_tokens`` is torch's fused one.
    """

    is_fused = True

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Sum word, position and token-type embeddings, and normalise the sum."""
        hidden: torch.Tensor = base.embeddings(input_ids=batch.ids, token_type_ids=batch.token_type_ids)
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor | None:
        """Build the mask as the model's ``forward`` does: None selects another attention kernel."""
        make = sdpa_mask if base.config._attn_implementation == "sdpa" else additive_mask
        return make(hidden_BTD, mask_BT)

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer; in a tuple the hidden state is first."""
        output = block(hidden_BTD, context)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def first_tokens(self, block: Any, hidden_BTD: torch.Tensor, context: Any, count: int) -> torch.Tensor:
        """Run one layer for the first tokens, as queries of an attention over all tokens."""
        first_BtD, attention = hidden_BTD[:, :count], block.attention.self

        def compute(first_BtD: torch.Tensor) -> torch.Tensor:
            matrices = (attention.query, attention.key, attention.value)
            return self.attend(
                attention.dropout, matrices, attention.num_attention_heads, first_BtD, hidden_BTD, context
            )

        attended = called(attention, compute, first_BtD)
        hidden: torch.Tensor = block.feed_forward_chunk(block.attention.output(attended, first_BtD))
        return hidden

    def attend(
        self,
        dropout: Any,
        matrices: tuple[Any, ...],
        heads: int,
        first_BtD: torch.Tensor,
        hidden_BTD: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from the first tokens to all; (B, t, D).

        ``matrices`` are those of queries, keys and values; the mask is that of all tokens.
        """
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, : first_BtD.shape[1]]
        inputs = (first_BtD, hidden_BTD, hidden_BTD)
        each = (matrix(x).unflatten(-1, (heads, -1)) for matrix, x in zip(matrices, inputs, strict=True))
        q_BHtW, k_BHTW, v_BHTW = (parts.transpose(1, 2) for parts in each)
        if self.is_fused:
            rate = dropout.p if dropout.training else 0.0
            attended = functional.scaled_dot_product_attention(q_BHtW, k_BHTW, v_BHTW, attn_mask=mask, dropout_p=rate)
        else:
            scores_BHtT = q_BHtW @ k_BHTW.transpose(2, 3) / math.sqrt(q_BHtW.shape[-1]) + mask
            attended = dropout(scores_BHtT.softmax(-1)) @ v_BHTW
        return attended.transpose(1, 2).flatten(2)

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the last hidden state unchanged."""
        return hidden_BTD, {}


def called(module: nn.Module, compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Call a module with ``compute`` in place of its forward, so that the hooks of adapters on it run."""
    module.forward = compute
    try:
        output: torch.Tensor = module(x)
        return output
    finally:
        del module.forward


def sdpa_mask(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor | None:
    """Build the mask (B, 1, T, T) for the fused attention kernel; None without padding."""
    if bool((mask_BT == 1).all()):
        return None
    return additive_mask(hidden_BTD, mask_BT).expand(-1, -1, hidden_BTD.shape[1], -1)


def additive_mask(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Build the mask (B, 1, 1, T) with 0 at tokens and the smallest number at padding."""
    return (1.0 - mask_BT[:, None, None, :].to(hidden_BTD.dtype)) * torch.finfo(hidden_BTD.dtype).min


class DistilBertFamily(BertFamily):
    """The ``FamilyForward`` of DistilBERT."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Sum word and position embeddings, and normalise the sum."""
        hidden: torch.Tensor = base.embeddings(batch.ids, None)
        return hidden

    def first_tokens(self, block: Any, hidden_BTD: torch.Tensor, context: Any, count: int) -> torch.Tensor:
        """Run one layer for the first tokens, as queries of an attention over all tokens."""
        first_BtD, attention = hidden_BTD[:, :count], block.attention

        def compute(first_BtD: torch.Tensor) -> Any:
            matrices = (attention.q_lin, attention.k_lin, attention.v_lin)
            return attention.out_lin(
                self.attend(attention.dropout, matrices, attention.n_heads, first_BtD, hidden_BTD, context)
            )

        attended = called(attention, compute, first_BtD)
        attended = block.sa_layer_norm(attended + first_BtD)
        hidden: torch.Tensor = block.output_layer_norm(block.ffn(attended) + attended)
        return hidden


class ElectraFamily(BertFamily):
    """The ``FamilyForward`` of ELECTRA."""

    is_fused = False

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
        hidden: torch.Tensor = block(hidden_BTD)
        return hidden

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state."""
        return base.layernorm(hidden_BTD), {}
