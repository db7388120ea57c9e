"""Vision transformer: patches are tokens; the travelling mask is all ones and not used."""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch
from ringtune.errors import DataError


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


FAMILY = VitFamily()
