"""What a family of models looks like on disk: which config keys count, which tensors a block has.

A pure table beside the code that computes (``edge.model.families``): planning needs sizes, loading needs
names, and a damaged or foreign folder has to be refused before torch is asked. Adding a family is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigKey:
    """One allowed key of ``config.json``.

    Attributes:
        default: the value that the family assumes when the key is absent; its type is the key's type.
        at_least: smallest allowed number.
        choices: allowed values; empty: any.
    """

    default: Any
    at_least: float = 0
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        model_type: of ``config.json``.
        config_keys: allowed keys; any other is dropped, because a config may name code to run.
        refused: keys that must be absent, null or falsy, with the reason.
        prefix: of all names in files that were saved with a task head, e.g. ``bert.``.
        block_prefix: of a block's names; the block index follows.
        block_shapes: config -> name inside the block -> shape.
        owner_shapes: config -> name -> shape of what an owner needs besides blocks.
        optional: owner names that a file may lack.
    """

    model_type: str
    config_keys: Mapping[str, ConfigKey]
    refused: Mapping[str, str]
    prefix: str
    block_prefix: str
    block_shapes: Callable[[Mapping[str, Any]], Shapes]
    owner_shapes: Callable[[Mapping[str, Any]], Shapes]
    optional: frozenset[str] = frozenset()


_ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh")


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _bert_block(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {}
    for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
        shapes |= _linear(name, hidden, hidden)
    shapes |= _norm("attention.output.LayerNorm", hidden)
    shapes |= _linear("intermediate.dense", inner, hidden)
    shapes |= _linear("output.dense", hidden, inner)
    return shapes | _norm("output.LayerNorm", hidden)


def _bert_owner(config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    tables = {
        "word": config["vocab_size"],
        "position": config["max_position_embeddings"],
        "token_type": config["type_vocab_size"],
    }
    shapes: Shapes = {f"embeddings.{name}_embeddings.weight": (rows, hidden) for name, rows in tables.items()}
    return shapes | _norm("embeddings.LayerNorm", hidden) | _linear("pooler.dense", hidden, hidden)


BERT = Family(
    model_type="bert",
    config_keys={
        "vocab_size": ConfigKey(default=30522, at_least=1),
        "hidden_size": ConfigKey(default=768, at_least=1),
        "num_hidden_layers": ConfigKey(default=12, at_least=1),
        "num_attention_heads": ConfigKey(default=12, at_least=1),
        "intermediate_size": ConfigKey(default=3072, at_least=1),
        "hidden_act": ConfigKey(default="gelu", choices=_ACTIVATIONS),
        "hidden_dropout_prob": ConfigKey(default=0.1),
        "attention_probs_dropout_prob": ConfigKey(default=0.1),
        "max_position_embeddings": ConfigKey(default=512, at_least=1),
        "type_vocab_size": ConfigKey(default=2, at_least=1),
        "initializer_range": ConfigKey(default=0.02),
        "layer_norm_eps": ConfigKey(default=1e-12),
        "pad_token_id": ConfigKey(default=0),
        "position_embedding_type": ConfigKey(default="absolute", choices=("absolute",)),
    },
    refused={
        "is_decoder": "a decoder attends only backwards",
        "add_cross_attention": "cross-attention has a second input",
        "pruned_heads": "its blocks differ in shape",
    },
    prefix="bert.",
    block_prefix="encoder.layer.",
    block_shapes=_bert_block,
    owner_shapes=_bert_owner,
    optional=frozenset({"pooler.dense.weight", "pooler.dense.bias"}),
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (BERT,)}
