"""Vision transformer: patches are tokens, no mask is needed (the one that travels is all ones)."""

from __future__ import annotations

from typing import Any

import torch

from edge.data.tokens import Batch
from ringtune.errors import DataError


class VitFamily:
    """See ``FamilyForward``. The pooler is not read: the head takes the class token as it is."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Patch and position embeddings behind the class token."""
        if batch.pixels is None:
            raise DataError("the batch has no images; set model.task = 'image-classification'")
        table = base.embeddings.position_embeddings
        hidden: torch.Tensor = base.embeddings(batch.pixels.to(table.dtype))
        return hidden

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Nothing."""

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """One layer."""
        hidden: torch.Tensor = block(hidden_BTD, None)
        return hidden

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """The normalised hidden state."""
        return base.layernorm(hidden_BTD), {}


FAMILY = VitFamily()
