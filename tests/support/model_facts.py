"""Sizes of models for tests: of tiny ones that are easy to add up, and of MiniLM."""

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
WEIGHTLESS: Final = ModelFacts(
    model_type="bert",
    num_blocks=1,
    hidden_size=1,
    intermediate_size=1,
    num_heads=1,
    vocab_size=1,
    block_bytes=1,
    embedding_bytes=0,
    head_bytes=0,
    adapter_block_bytes=0,
    digest="",
)
"""A model whose weights take nothing: what is left of a node's memory is activations and buffers."""
ROUND: Final = ModelFacts(
    model_type="bert",
    num_blocks=4,
    hidden_size=2,
    intermediate_size=8,
    num_heads=1,
    vocab_size=100,
    block_bytes=0,
    embedding_bytes=0,
    head_bytes=3_000,
    adapter_block_bytes=10_000,
    digest="",
    embedding_train_bytes=60_000,
    token_table_bytes=50_000,
)
"""A model all of whose parameters train, in round numbers."""


def small_model(**changes: Any) -> ModelFacts:
    """A model of four blocks, with other values where they are given."""
    return dataclasses.replace(_SMALL, **changes)
