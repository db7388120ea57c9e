"""Sizes of models for tests: of a tiny one that is easy to add up, and of MiniLM."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from ringtune.costs.profile import ModelFacts

MINILM: Final = ModelFacts(
    model_type="bert",
    num_blocks=6,
    hidden_size=384,
    intermediate_size=1536,
    num_heads=12,
    vocab_size=30522,
    block_bytes=7_097_856,
    embedding_bytes=48_265_728,
    head_bytes=591_360,
    adapter_block_bytes=75_360,
    digest="ab" * 32,
)
_SMALL: Final = ModelFacts(
    model_type="bert",
    num_blocks=4,
    hidden_size=32,
    intermediate_size=128,
    num_heads=4,
    vocab_size=100,
    block_bytes=1000,
    embedding_bytes=5000,
    head_bytes=300,
    adapter_block_bytes=10,
    digest="d",
    head_class_bytes=50,
)


def small_model(**changes: Any) -> ModelFacts:
    """A model of four blocks, with other values where they are given."""
    return dataclasses.replace(_SMALL, **changes)
