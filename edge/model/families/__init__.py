"""Families of transformers: embedding, call of a block, and last hidden state for the head.

To add a family: write a ``FamilyForward`` in a module of this package, name it in ``FORWARDS``, describe its files in
``ringtune.models.families``, and add a line to ``tests/support/tiny_families.py``. Everything else (tensors to read,
adapters, dropout, graphs, saving) is common.

A row of a batch is a row of tokens, the hidden state is (B, T, D), and a mask (B, T) travels with it; an image has a
token for each patch and a mask of ones.

B batch rows, T tokens, D model width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch

from edge.data.tokens import Batch
from ringtune.models.families import family_named

# model_type of config.json -> module of this package, and value in it
FORWARDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), ("encoders", "BERT")),
    "electra": ("encoders", "ELECTRA"),
    "distilbert": ("encoders", "DISTILBERT"),
    "vit": ("encoders", "VIT"),
    "gpt2": ("decoders", "GPT2"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3_text"), ("decoders", "ROTARY")),
    **dict.fromkeys(("gemma", "gemma2"), ("decoders", "GEMMA")),
}


class FamilyForward(NamedTuple):
    """Forward of a family's parts; ``base`` is the Hugging Face base model, in which only hosted modules are real.

    Attributes:
        embed: (base, batch) -> hidden state (B, T, D) that enters block 0.
        context: (base, hidden state, mask (B, T)) -> the other inputs of every block, once per micro-batch and node.
            Blocks may change tensors of another batch size than B in place, so every tensor in it needs B rows.
            Families with ``Family.takes_cache`` take a ``KeyValueCache`` too: the tokens follow those in it, and blocks
            add theirs.
        block: (block, hidden state, context) -> hidden state.
        finish: (base, hidden state, batch) -> arguments of the prediction head: the last hidden state, and keyword
            arguments.
        first_tokens: (block, hidden state, context, count) -> (B, count, D) of the first tokens of each row, which
            attend to all; only for families with ``ringtune.models.family.Family.trims``.
    """

    embed: Callable[[Any, Batch], torch.Tensor]
    context: Callable[..., Any]
    block: Callable[[Any, torch.Tensor, Any], torch.Tensor]
    finish: Callable[[Any, torch.Tensor, Batch], tuple[torch.Tensor, dict[str, Any]]]
    first_tokens: Callable[[Any, torch.Tensor, Any, int], torch.Tensor] | None = None


def family_of(model_type: str) -> FamilyForward:
    """Return the forward of a ``model_type`` of config.json; raises ``ModelError``."""
    known = family_named(model_type)
    if known.generic:
        from edge.model.families.recorded import RecordedFamily

        recorded = RecordedFamily(known)
        return FamilyForward(recorded.embed, recorded.context, recorded.block, recorded.finish)
    module, name = FORWARDS[known.model_type]
    return cast(FamilyForward, getattr(importlib.import_module(f"{__name__}.{module}"), name))


def first_of(output: Any) -> torch.Tensor:
    """Return the hidden state that a block puts out, in a tuple the first value."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
