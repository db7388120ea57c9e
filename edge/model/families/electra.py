"""ELECTRA: BERT's blocks after narrower, projected embeddings; always plain (eager) attention."""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch
from edge.model.families.bert import BertFamily, additive_mask


class ElectraFamily(BertFamily):
    """The ``FamilyForward`` of ELECTRA."""

    mask_name = "encoder_attention_mask"

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Embed as BERT, then project to the model's width if it differs."""
        hidden = super().embed(base, batch)
        return base.embeddings_project(hidden) if hasattr(base, "embeddings_project") else hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor | None:
        """Build an additive mask, with padding or without."""
        return additive_mask(hidden_BTD, mask_BT)


FAMILY = ElectraFamily()
