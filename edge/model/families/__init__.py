"""Families of transformers: for each, how it embeds, calls a block, and passes the last hidden state to the head.

To add a family: write ``edge/model/families/<name>.py`` with an object ``FAMILY`` of the shape below, name it in
``MODULES``, describe its files in ``ringtune.models.families``, and add its line to the tiny models of the tests
(``tests/support/tiny_families.py``). Everything else (which tensors are read, adapters, dropout, graphs, saving) is
the same for all.

Whatever the family, a row of a batch is a row of tokens, the hidden state is (B, T, D), and a mask (B, T) travels
with it; an image has a token for each patch and a mask of ones.

B batch rows, T tokens, D model width.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch

from edge.data.tokens import Batch
from ringtune.models.families import family_named

# model_type of config.json -> module of this package
MODULES: Mapping[str, str] = {
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
    "electra": "electra",
    "distilbert": "distilbert",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "vit": "vit",
    "qwen2": "layered",
    "qwen3": "layered",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma3",
    "smollm3": "layered",
}


class FamilyForward(Protocol):
    """How a family embeds, calls one block, and hands the last hidden state to the head.

    ``base`` is always the Hugging Face base model, of which only hosted modules are real.
    """

    def embed(self, base: Any, batch: Batch) -> torch.Tensor:
        """Compute the hidden state (B, T, D) that enters block 0."""

    def context(self, base: Any, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> Any:
        """Build what every block needs besides the hidden state from the 2-D mask, on each node.

        It is built once per micro-batch and node and given to every block there. The blocks may change tensors
        of another batch size than B in place, so every tensor in it needs B rows.
        """

    def block(self, block: Any, hidden_BTD: torch.Tensor, context: Any) -> torch.Tensor:
        """Run one block."""

    def first_tokens(self, block: Any, hidden_BTD: torch.Tensor, context: Any, count: int) -> torch.Tensor:
        """Run one block for the first ``count`` tokens of each row, which attend to all; (B, count, D).

        Only families have it that ``ringtune.models.family.Family.trims``.
        """

    def finish(self, base: Any, hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return what the prediction head is called with: the last hidden state and keyword arguments."""


def family_of(model_type: str) -> FamilyForward:
    """Return the family of a ``model_type`` of config.json.

    Raises:
        ModelError: not a supported one; lists those that are.
    """
    known = family_named(model_type)
    return cast(FamilyForward, importlib.import_module(f"{__name__}.{MODULES[known.model_type]}").FAMILY)
