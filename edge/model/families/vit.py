"""Vision transformer: patches are tokens, no mask is needed (the one that travels is all ones)."""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch
from ringtune.errors import DataError


class VitFamily:
    """The ``FamilyForward`` of vision transformers; no pooler is read, as the head takes the class token itself."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Embed patches and positions behind the class token."""
        if batch.pixels is None:
            raise DataError("the batch has no images; set model.task = 'image-classification'")
        table = base.embeddings.position_embeddings
        hidden: torch.Tensor = base.embeddings(batch.pixels.to(table.dtype))
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Return None: a block needs nothing but the hidden state."""

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one layer."""
        hidden: torch.Tensor = block(hidden_BTD, None)
        return hidden

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Normalise the hidden state."""
        return base.layernorm(hidden_BTD), {}


FAMILY = VitFamily()
