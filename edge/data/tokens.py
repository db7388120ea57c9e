"""Texts to token ids, with the model's own tokenizer."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """One batch as the embedding and the head need it (B rows, T tokens); on the CPU."""

    ids: torch.Tensor  # (B, T) int64
    mask: torch.Tensor  # (B, T) int64, 1 = token, 0 = padding
    token_type_ids: torch.Tensor  # (B, T) int64
    labels: torch.Tensor  # (B,) int64, -100 = no target
