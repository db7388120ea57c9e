"""Families of transformers: embedding, call of a block, and last hidden state for the head.

To add a family: write a class of the shape below in a module of this package, name it in ``CLASSES``, describe its
files in ``ringtune.models.families``, and add a line to ``tests/support/tiny_families.py``. Everything else (tensors to
read, adapters, dropout, graphs, saving) is common.

A row of a batch is a row of tokens, the hidden state is (B, T, D), and a mask (B, T) travels with it; an image has a
token for each patch and a mask of ones.

B batch rows, T tokens, D model width.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch

from edge.data.tokens import Batch
from edge.model.key_values import KeyValueCache
from ringtune.models.families import family_named

# model_type of config.json -> module of this package, and class in it
CLASSES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), ("encoders", "BertFamily")),
    "electra": ("encoders", "ElectraFamily"),
    "distilbert": ("encoders", "DistilBertFamily"),
    "vit": ("encoders", "VitFamily"),
    "gpt2": ("decoders", "Gpt2Family"),
    **dict.fromkeys(("llama", "mistral"), ("decoders", "LlamaFamily")),
    **dict.fromkeys(("qwen2", "qwen3", "smollm3"), ("decoders", "LayeredFamily")),
    **dict.fromkeys(("gemma", "gemma2"), ("decoders", "GemmaFamily")),
    "gemma3_text": ("decoders", "Gemma3Family"),
}


class FamilyForward(Protocol):
    """Forward of a family's parts; ``base`` is the Hugging Face base model, in which only hosted modules are real."""

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Compute the hidden state (B, T, D) that enters block 0."""

    def context(
        self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None
    ) -> Any:
        """Build the other inputs of every block from the 2-D mask, once per micro-batch and node.

        Blocks may change tensors of another batch size than B in place, so every tensor in it needs B rows. Families
        with ``Family.takes_cache`` take a cache: the tokens follow those in it, and blocks add theirs.
        """

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one block."""

    def first_tokens(self, block: Any, hidden_BTD: torch.Tensor, context: Any, count: int) -> torch.Tensor:
        """Run one block for the first ``count`` tokens of each row, which attend to all; (B, count, D).

        Only for families with ``ringtune.models.family.Family.trims``.
        """

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the arguments of the prediction head: the last hidden state, and keyword arguments."""


def family_of(model_type: str) -> FamilyForward:
    """Return the family of a ``model_type`` of config.json; raises ``ModelError``."""
    known = family_named(model_type)
    if known.generic:
        from edge.model.families.recorded import RecordedFamily

        return cast(FamilyForward, RecordedFamily(known))
    module, name = CLASSES[known.model_type]
    return cast(FamilyForward, getattr(importlib.import_module(f"{__name__}.{module}"), name)())
