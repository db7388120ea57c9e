"""Gemma and Gemma 2: the word embeddings are scaled by the root of the model's width."""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch
from edge.model.families.layered import LayeredFamily


class GemmaFamily(LayeredFamily):
    """The ``FamilyForward`` of Gemma and Gemma 2."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Look up the word embeddings and scale them in their own dtype, as the library does."""
        hidden = super().embed(base, batch)
        return hidden * torch.tensor(base.config.hidden_size**0.5, dtype=hidden.dtype)


FAMILY = GemmaFamily()
