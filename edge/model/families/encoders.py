"""BERT, RoBERTa, XLM-RoBERTa, ELECTRA, DistilBERT and vision transformers.

A block of a BERT needs the hidden state and an additive 4-D mask (or None without padding). ELECTRA has BERT's blocks
after narrower, projected embeddings, and its attention is not fused. DistilBERT has no token types. Of a vision
transformer patches are tokens; the travelling mask is all ones and not used. Poolers are not used, because the head
reads the first token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from edge.data.tokens import Batch
from edge.model.families import FamilyForward, first_of
from ringtune.errors import DataError


def _embed(base: Any, batch: Batch) -> torch.Tensor:
    """Normalise the sum of word, position and token-type embeddings; ELECTRA may project it to the model's width."""
    hidden: torch.Tensor = base.embeddings(input_ids=batch.ids, token_type_ids=batch.token_type_ids)
    return base.embeddings_project(hidden) if hasattr(base, "embeddings_project") else hidden


def _embed_without_types(base: Any, batch: Batch) -> torch.Tensor:
    hidden: torch.Tensor = base.embeddings(batch.ids, None)
    return hidden


def _mask(base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor | None:
    """Build the mask as the model's ``forward`` does: 0 at tokens, the smallest number at padding.

    (B, 1, T, T) for the fused attention kernel, and None without padding, which selects another one; else (B, 1, 1, T).
    """
    is_fused = base.config._attn_implementation == "sdpa"
    if is_fused and bool((mask_BT == 1).all()):
        return None
    mask = (1.0 - mask_BT[:, None, None, :].to(hidden_BTD.dtype)) * torch.finfo(hidden_BTD.dtype).min
    return mask.expand(-1, -1, hidden_BTD.shape[1], -1) if is_fused else mask


def _block(block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
    return first_of(block(hidden_BTD, context))


def _unchanged(base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    return hidden_BTD, {}


def _first_of_bert(
    block: Any, hidden_BTD: torch.Tensor, context: Any, count: int, *, is_fused: bool = True
) -> torch.Tensor:
    """Run one layer for the first tokens, as queries of an attention over all tokens."""
    first_BtD, attention = hidden_BTD[:, :count], block.attention.self

    def compute(first_BtD: torch.Tensor) -> torch.Tensor:
        matrices, heads = (attention.query, attention.key, attention.value), attention.num_attention_heads
        return _attend(attention.dropout, matrices, heads, first_BtD, hidden_BTD, context, is_fused=is_fused)

    attended = _called(attention, compute, first_BtD)
    hidden: torch.Tensor = block.feed_forward_chunk(block.attention.output(attended, first_BtD))
    return hidden


def _first_of_distilbert(block: Any, hidden_BTD: torch.Tensor, context: Any, count: int) -> torch.Tensor:
    first_BtD, attention = hidden_BTD[:, :count], block.attention

    def compute(first_BtD: torch.Tensor) -> Any:
        matrices, heads = (attention.q_lin, attention.k_lin, attention.v_lin), attention.n_heads
        attended = _attend(attention.dropout, matrices, heads, first_BtD, hidden_BTD, context, is_fused=True)
        return attention.out_lin(attended)

    between = block.sa_layer_norm(_called(attention, compute, first_BtD) + first_BtD)
    hidden: torch.Tensor = block.output_layer_norm(block.ffn(between) + between)
    return hidden


def _attend(
    dropout: Any,
    matrices: tuple[Any, ...],
    heads: int,
    first_BtD: torch.Tensor,
    hidden_BTD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_fused: bool,
) -> torch.Tensor:
    """Attend from the first tokens to all; (B, t, D).

    ``matrices`` are those of queries, keys and values; the mask is that of all tokens.
    """
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, : first_BtD.shape[1]]
    inputs = (first_BtD, hidden_BTD, hidden_BTD)
    each = (matrix(x).unflatten(-1, (heads, -1)) for matrix, x in zip(matrices, inputs, strict=True))
    q_BHtW, k_BHTW, v_BHTW = (parts.transpose(1, 2) for parts in each)
    if is_fused:
        rate = dropout.p if dropout.training else 0.0
        attended = functional.scaled_dot_product_attention(q_BHtW, k_BHTW, v_BHTW, attn_mask=mask, dropout_p=rate)
    else:
        scores_BHtT = q_BHtW @ k_BHTW.transpose(2, 3) / math.sqrt(q_BHtW.shape[-1]) + mask
        attended = dropout(scores_BHtT.softmax(-1)) @ v_BHTW
    return attended.transpose(1, 2).flatten(2)


def _called(module: nn.Module, compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Call a module with ``compute`` in place of its forward, so that the hooks of adapters on it run."""
    module.forward = compute
    try:
        output: torch.Tensor = module(x)
        return output
    finally:
        del module.forward


BERT = FamilyForward(_embed, _mask, _block, _unchanged, _first_of_bert)
ELECTRA = BERT._replace(first_tokens=functools.partial(_first_of_bert, is_fused=False))
DISTILBERT = BERT._replace(embed=_embed_without_types, first_tokens=_first_of_distilbert)


def _embed_patches(base: Any, batch: Batch) -> torch.Tensor:
    """Embed patches and positions after the class token."""
    if batch.pixels is None:
        raise DataError("the batch has no images; set model.task = 'image-classification'")
    hidden: torch.Tensor = base.embeddings(batch.pixels.to(base.embeddings.position_embeddings.dtype))
    return hidden


VIT = FamilyForward(
    embed=_embed_patches,
    context=lambda base, hidden_BTD, mask_BT: None,
    block=lambda block, hidden_BTD, context: cast(torch.Tensor, block(hidden_BTD)),
    finish=lambda base, hidden_BTD, batch: (base.layernorm(hidden_BTD), {}),
)
