"""Gemma 3 (text): separate rotary tables for blocks with a window; the token table scales its output."""

from __future__ import annotations

from typing import Any

import torch

from edge.model.families.gpt2 import CausalContext
from edge.model.families.layered import LayeredContext, LayeredFamily


class Gemma3Family(LayeredFamily):
    """The ``FamilyForward`` of Gemma 3."""

    def sliding_rotary(self, base: Any, hidden_BTD: torch.Tensor, full: CausalContext) -> Any:
        """Build the rotary tables of blocks with a window."""
        return base.rotary_emb_local(hidden_BTD, full.positions)

    def positions(self, context: LayeredContext) -> dict[str, Any]:
        """Return both rotary tables; each block uses its own."""
        return {"position_embeddings_global": context.full.rotary, "position_embeddings_local": context.sliding.rotary}


FAMILY = Gemma3Family()
