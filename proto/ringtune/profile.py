"""What was measured and counted before planning: one record per node, JSON with units in the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringtune.errors import InvalidInputError, PlanError
from ringtune.strict import read_dataclass

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Sizes of the base model with its adapters; the same on every node that has the same model.

    Bytes are in the compute dtype of the job, whatever the file stores.

    Attributes:
        model_type: of ``config.json``.
        num_blocks: transformer blocks.
        hidden_size: width of the hidden state.
        intermediate_size: width of the feed-forward part.
        num_heads: attention heads.
        vocab_size: rows of the token table; 0 without one.
        block_bytes: frozen weights of one block.
        embedding_bytes: embedding and what else only an owner holds of the base (pooler).
        head_bytes: the head without what grows with the number of classes.
        adapter_block_bytes: trainable weights of one block.
        digest: SHA-256 over the config and the names, types and shapes of the tensors.
        head_class_bytes: what each class adds to the head.
        head_token_logits: numbers that the head computes for each token; 0 if it looks at one token of a row.
        inner_kept: tensors of width ``intermediate_size`` that a block keeps for backward.
    """

    model_type: str
    num_blocks: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    block_bytes: int
    embedding_bytes: int
    head_bytes: int
    adapter_block_bytes: int
    digest: str
    head_class_bytes: int = 0
    head_token_logits: int = 0
    inner_kept: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("num_blocks", "hidden_size", "intermediate_size", "num_heads", "block_bytes", "inner_kept"):
            _check_at_least(f"model.{name}", getattr(self, name), 1)
        for name in (
            "vocab_size",
            "embedding_bytes",
            "head_bytes",
            "adapter_block_bytes",
            "head_class_bytes",
            "head_token_logits",
        ):
            _check_at_least(f"model.{name}", getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """One node: its data (numbers and class names only), memory and speed.

    Attributes:
        node: its name.
        train_rows: rows it trains on; 0 = it is no owner.
        eval_rows: rows it evaluates on.
        labels: class names in its training rows, sorted.
        eval_labels: class names in its evaluation rows, sorted.
        skipped_rows: rows of its files that can't be used (answers that are not in their context).
        memory_bytes: budget for a run.
        threads: compute threads.
        device: ``cpu`` or ``cuda``.
        block_forward_s: one block, one micro-batch at full length, without graph; seconds, 0 = not measured.
        block_graph_s: the same with graph.
        block_backward_s: its backward.
        activation_block_bytes: what that forward with graph keeps for backward.
        model: sizes of the model.
    """

    node: str
    train_rows: int
    eval_rows: int
    labels: tuple[str, ...]
    eval_labels: tuple[str, ...]
    memory_bytes: int
    threads: int
    device: str
    block_forward_s: float
    block_graph_s: float
    block_backward_s: float
    activation_block_bytes: int
    model: ModelFacts
    skipped_rows: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("train_rows", "eval_rows", "skipped_rows", "memory_bytes", "activation_block_bytes"):
            _check_at_least(f"{self.node}.{name}", getattr(self, name), 0)
        for name in ("block_forward_s", "block_graph_s", "block_backward_s"):
            _check_at_least(f"{self.node}.{name}", getattr(self, name), 0)
        _check_at_least(f"{self.node}.threads", self.threads, 1)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form with its schema version."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> NodeFacts:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: another schema, a key is missing, unknown or mistyped.
        """
        return read_dataclass(NodeFacts, _without_schema(value), where="", error=PlanError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What is known about every node, in name order; the content of ``profile.json``."""

    nodes: tuple[NodeFacts, ...]
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {"schema": self.schema, "nodes": [dataclasses.asdict(node) for node in self.nodes]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Profile:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: another schema, a key is missing, unknown or mistyped.
        """
        return read_dataclass(Profile, _without_schema(value), where="", error=PlanError)


def _without_schema(value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError("a profile has to be a table; measure anew with 'ringtune plan'")
    if value.get("schema") != SCHEMA:
        raise PlanError(f"profile schema {value.get('schema')!r} is not {SCHEMA}; measure anew with 'ringtune plan'")
    return {key: item for key, item in value.items() if key != "schema"}


def _check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise InvalidInputError(f"{name} is {value}, it has to be at least {least}")
