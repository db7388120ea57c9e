"""Encoders: BERT, RoBERTa, XLM-RoBERTa, ELECTRA, DistilBERT."""

from __future__ import annotations

import dataclasses

from ringtune.models.family import (
    ACTIVATIONS,
    CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
    Config,
    ConfigKey,
    Dimensions,
    Family,
    Shapes,
    Widths,
    divided,
    indivisible,
    keeps_result,
    kept_by,
    layer_norm,
    linear,
)

_TASKS = (CLASSIFICATION, REGRESSION, TAGGING, QUESTION_ANSWERING)
_PRUNED = {"pruned_heads": "its blocks differ in shape"}
_REFUSED = {
    "is_decoder": "a decoder attends only backwards",
    "add_cross_attention": "cross-attention has a second input",
    **_PRUNED,
}
_UNREAD = """
    tie_word_embeddings directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type cell emb_size pre_trained structure training
"""  # keys of decoder and pooler, which are not read, and keys of the first BERTs and their distillations
_NO_NUMBER = frozenset(_UNREAD.split())
_BERT_KEYS = {
    "vocab_size": ConfigKey(default=30522, at_least=1),
    "hidden_size": ConfigKey(default=768, at_least=1),
    "num_hidden_layers": ConfigKey(default=12, at_least=1),
    "num_attention_heads": ConfigKey(default=12, at_least=1),
    "intermediate_size": ConfigKey(default=3072, at_least=1),
    "hidden_act": ConfigKey(default="gelu", choices=ACTIVATIONS),
    "hidden_dropout_prob": ConfigKey(default=0.1),
    "attention_probs_dropout_prob": ConfigKey(default=0.1),
    "max_position_embeddings": ConfigKey(default=512, at_least=1),
    "type_vocab_size": ConfigKey(default=2, at_least=1),
    "initializer_range": ConfigKey(default=0.02),
    "layer_norm_eps": ConfigKey(default=1e-12),
    "pad_token_id": ConfigKey(default=0),
    "position_embedding_type": ConfigKey(default="absolute", choices=("absolute",)),
}


def _bert_dimensions(config: Config) -> Dimensions:
    return Dimensions(
        num_blocks=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        vocab=config["vocab_size"],
        longest=config["max_position_embeddings"],
        inner_kept=kept_by(config["hidden_act"]),
        keeps_down_input=keeps_result(config["hidden_act"]),
    )


def _roberta_dimensions(config: Config) -> Dimensions:
    """Dimensions of a RoBERTa config; positions begin after the padding index.

    Example: 514 positions and padding index 1 leave 512 tokens.
    """
    dimensions = _bert_dimensions(config)
    return dataclasses.replace(dimensions, longest=dimensions.longest - config["pad_token_id"] - 1)


def _bert_widths(config: Config) -> Widths:
    return Widths.plain(config["hidden_size"], config["intermediate_size"])


def _bert_block(config: Config) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        **linear("attention.self.query", hidden, hidden),
        **linear("attention.self.key", hidden, hidden),
        **linear("attention.self.value", hidden, hidden),
        **linear("attention.output.dense", hidden, hidden),
        **layer_norm("attention.output.LayerNorm", hidden),
        **linear("intermediate.dense", hidden, inner),
        **linear("output.dense", inner, hidden),
        **layer_norm("output.LayerNorm", hidden),
    }


def _tables(config: Config, width: int) -> Shapes:
    tables = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    shapes: Shapes = {f"embeddings.{name}_embeddings.weight": (config[key], width) for name, key in tables.items()}
    return shapes | layer_norm("embeddings.LayerNorm", width)


def _bert_problem(config: Config) -> str:
    return indivisible(config["hidden_size"], config["num_attention_heads"])


BERT = Family(
    model_type="bert",
    tasks=_TASKS,
    first_token=(CLASSIFICATION, REGRESSION),
    trims=True,
    config_keys=_BERT_KEYS,
    refused=_REFUSED,
    no_number=_NO_NUMBER,
    prefix="bert.",
    blocks_path="encoder.layer",
    owner_paths=("embeddings",),
    dimensions=_bert_dimensions,
    widths=_bert_widths,
    block_shapes=_bert_block,
    owner_shapes=lambda config: _tables(config, config["hidden_size"]),
    subnet_weights=divided(
        into=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
        out=("attention.output.dense", "output.dense"),
    ),
    unused_paths=("pooler",),
    problem=_bert_problem,
)

ROBERTA = dataclasses.replace(
    BERT,
    model_type="roberta",
    config_keys=_BERT_KEYS | {"vocab_size": ConfigKey(default=50265, at_least=1), "pad_token_id": ConfigKey(default=1)},
    prefix="roberta.",
    dimensions=_roberta_dimensions,
)

XLM_ROBERTA = dataclasses.replace(
    ROBERTA,
    model_type="xlm-roberta",
    config_keys={**ROBERTA.config_keys, "vocab_size": ConfigKey(default=30522, at_least=1)},
)


def _electra_owner(config: Config) -> Shapes:
    hidden, width = config["hidden_size"], config["embedding_size"]
    projection = linear("embeddings_project", width, hidden) if hidden != width else {}
    return _tables(config, width) | projection


ELECTRA = dataclasses.replace(
    BERT,
    model_type="electra",
    config_keys=_BERT_KEYS
    | {
        "embedding_size": ConfigKey(default=128, at_least=1),
        "hidden_size": ConfigKey(default=256, at_least=1),
        "num_attention_heads": ConfigKey(default=4, at_least=1),
        "intermediate_size": ConfigKey(default=1024, at_least=1),
    },
    prefix="electra.",
    owner_paths=("embeddings", "embeddings_project"),
    owner_shapes=_electra_owner,
    unused_paths=(),
)


def _distilbert_dimensions(config: Config) -> Dimensions:
    return Dimensions(
        num_blocks=config["n_layers"],
        hidden=config["dim"],
        inner=config["hidden_dim"],
        num_heads=config["n_heads"],
        vocab=config["vocab_size"],
        longest=config["max_position_embeddings"],
        inner_kept=kept_by(config["activation"]),
        keeps_down_input=keeps_result(config["activation"]),
    )


def _distilbert_block(config: Config) -> Shapes:
    hidden, inner = config["dim"], config["hidden_dim"]
    return {
        **linear("attention.q_lin", hidden, hidden),
        **linear("attention.k_lin", hidden, hidden),
        **linear("attention.v_lin", hidden, hidden),
        **linear("attention.out_lin", hidden, hidden),
        **layer_norm("sa_layer_norm", hidden),
        **linear("ffn.lin1", hidden, inner),
        **linear("ffn.lin2", inner, hidden),
        **layer_norm("output_layer_norm", hidden),
    }


def _distilbert_owner(config: Config) -> Shapes:
    return {
        "embeddings.word_embeddings.weight": (config["vocab_size"], config["dim"]),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], config["dim"]),
        **layer_norm("embeddings.LayerNorm", config["dim"]),
    }


DISTILBERT = Family(
    model_type="distilbert",
    tasks=_TASKS,
    first_token=(CLASSIFICATION, REGRESSION),
    trims=True,
    config_keys={
        "vocab_size": ConfigKey(default=30522, at_least=1),
        "dim": ConfigKey(default=768, at_least=1),
        "n_layers": ConfigKey(default=6, at_least=1),
        "n_heads": ConfigKey(default=12, at_least=1),
        "hidden_dim": ConfigKey(default=3072, at_least=1),
        "activation": ConfigKey(default="gelu", choices=ACTIVATIONS),
        "dropout": ConfigKey(default=0.1),
        "attention_dropout": ConfigKey(default=0.1),
        "max_position_embeddings": ConfigKey(default=512, at_least=1),
        "sinusoidal_pos_embds": ConfigKey(default=False),
        "initializer_range": ConfigKey(default=0.02),
        "pad_token_id": ConfigKey(default=0),
    },
    refused=_PRUNED,
    no_number=frozenset({"tie_word_embeddings", "is_decoder", "add_cross_attention"}),
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    prefix="distilbert.",
    blocks_path="transformer.layer",
    owner_paths=("embeddings",),
    dimensions=_distilbert_dimensions,
    widths=lambda config: Widths.plain(config["dim"], config["hidden_dim"]),
    block_shapes=_distilbert_block,
    owner_shapes=_distilbert_owner,
    subnet_weights=divided(
        into=("attention.q_lin", "attention.k_lin", "attention.v_lin", "ffn.lin1"),
        out=("attention.out_lin", "ffn.lin2"),
    ),
    problem=lambda config: indivisible(config["dim"], config["n_heads"]),
)
