"""Families of models that can be sliced, by ``model_type``; the shapes of encoders and of vision transformers (ViT).

A row of a ViT is the patches of one image behind a class token, so all rows are equally long.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from ringtune.errors import ModelError
from ringtune.models.decoders import GEMMA, GEMMA2, GEMMA3, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3
from ringtune.models.family import (
    ACTIVATIONS,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    MATRICES,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
    BlockLayout,
    Config,
    ConfigKey,
    Dimensions,
    Family,
    Shapes,
    counts,
    head_task,
    indivisible,
    layer_norm,
    linear,
    plain,
    plain_dimensions,
)
from ringtune.models.generic_decoders import GENERIC
from ringtune.models.generic_encoders import generic_encoders

_ENCODER_TASKS = (CLASSIFICATION, REGRESSION, TAGGING, QUESTION_ANSWERING)
_PRUNED = {"pruned_heads": "its blocks differ in shape"}
_REFUSED = {
    "is_decoder": "a decoder attends only backwards",
    "add_cross_attention": "cross-attention has a second input",
    **_PRUNED,
}
_ENCODER_UNREAD = """
    tie_word_embeddings directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type cell emb_size pre_trained structure training
"""  # keys of decoder and pooler, which are not read, and keys of the first BERTs and their distillations
_BERT_KEYS = {
    **counts(vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
    **counts(max_position_embeddings=512, type_vocab_size=2),
    "hidden_act": ConfigKey(default="gelu", choices=ACTIVATIONS),
    **plain(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, initializer_range=0.02, layer_norm_eps=1e-12),
    **plain(pad_token_id=0),
    "position_embedding_type": ConfigKey(default="absolute", choices=("absolute",)),
}


def _roberta_dimensions(config: Config) -> Dimensions:
    """Dimensions of a RoBERTa config; positions begin after the padding index.

    Example: 514 positions and padding index 1 leave 512 tokens.
    """
    dimensions = plain_dimensions(config)
    return dataclasses.replace(dimensions, longest=dimensions.longest - config["pad_token_id"] - 1)


def _tables(config: Config, width: int) -> Shapes:
    tables = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    shapes: Shapes = {f"embeddings.{name}_embeddings.weight": (config[key], width) for name, key in tables.items()}
    return shapes | layer_norm("embeddings.LayerNorm", width)


BERT = Family(
    model_type="bert",
    tasks=_ENCODER_TASKS,
    first_token=(CLASSIFICATION, REGRESSION),
    trims=True,
    config_keys=_BERT_KEYS,
    refused=_REFUSED,
    no_number=frozenset(_ENCODER_UNREAD.split()),
    prefix="bert.",
    blocks_path="encoder.layer",
    owner_paths=("embeddings",),
    dimensions=plain_dimensions,
    layout=BlockLayout(
        attention="attention.self",
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        attention_out="attention.output.dense",
        up="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
        attention_norm="attention.output.LayerNorm",
        feed_forward_norm="output.LayerNorm",
        attention_adapter="attention.output",
        feed_forward_adapter="output",
        norm_first=False,
        attention_dropout="attention.output.dropout",
        feed_forward_dropout="output.dropout",
    ),
    owner_shapes=lambda config: _tables(config, config["hidden_size"]),
    unused_paths=("pooler",),
    problem=lambda config: indivisible(config["hidden_size"], config["num_attention_heads"]),
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
    | {**counts(embedding_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024)},
    prefix="electra.",
    owner_paths=("embeddings", "embeddings_project"),
    owner_shapes=_electra_owner,
    unused_paths=(),
)


def _distilbert_owner(config: Config) -> Shapes:
    return {
        "embeddings.word_embeddings.weight": (config["vocab_size"], config["dim"]),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], config["dim"]),
        **layer_norm("embeddings.LayerNorm", config["dim"]),
    }


DISTILBERT = Family(
    model_type="distilbert",
    tasks=_ENCODER_TASKS,
    first_token=(CLASSIFICATION, REGRESSION),
    trims=True,
    config_keys={
        **counts(vocab_size=30522, dim=768, n_layers=6, n_heads=12, hidden_dim=3072, max_position_embeddings=512),
        "activation": ConfigKey(default="gelu", choices=ACTIVATIONS),
        **plain(dropout=0.1, attention_dropout=0.1, sinusoidal_pos_embds=False, initializer_range=0.02, pad_token_id=0),
    },
    refused=_PRUNED,
    no_number=frozenset({"tie_word_embeddings", "is_decoder", "add_cross_attention"}),
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    prefix="distilbert.",
    blocks_path="transformer.layer",
    owner_paths=("embeddings",),
    dimensions=functools.partial(
        plain_dimensions, blocks="n_layers", hidden="dim", inner="hidden_dim", heads="n_heads", activation="activation"
    ),
    layout=BlockLayout(
        attention="attention",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        attention_out="attention.out_lin",
        up="ffn.lin1",
        activation="ffn.activation",
        down="ffn.lin2",
        attention_norm="sa_layer_norm",
        feed_forward_norm="output_layer_norm",
        attention_adapter="attention_adapters",
        feed_forward_adapter="output_adapters",
        norm_first=False,
        feed_forward_dropout="ffn.dropout",
    ),
    owner_shapes=_distilbert_owner,
    problem=lambda config: indivisible(config["dim"], config["n_heads"]),
)

_VIT_UNREAD = (
    "encoder_stride pooler_act pooler_output_size tie_word_embeddings is_decoder add_cross_attention pad_token_id"
)


def image_tokens(config: Config) -> int:
    """Tokens of one image: its patches, and the class token.

    Example: 224 pixels in patches of 16 are 14 * 14 + 1 = 197.
    """
    side: int = config["image_size"] // config["patch_size"]
    return side * side + 1


def _vit_owner(config: Config) -> Shapes:
    hidden, patch = config["hidden_size"], config["patch_size"]
    return {
        "embeddings.cls_token": (1, 1, hidden),
        "embeddings.position_embeddings": (1, image_tokens(config), hidden),
        "embeddings.patch_embeddings.projection.weight": (hidden, config["num_channels"], patch, patch),
        "embeddings.patch_embeddings.projection.bias": (hidden,),
        **layer_norm("layernorm", hidden),
    }


def _vit_problem(config: Config) -> str:
    if config["image_size"] % config["patch_size"]:
        return f"image_size {config['image_size']} is no multiple of patch_size {config['patch_size']}"
    return indivisible(config["hidden_size"], config["num_attention_heads"])


VIT = Family(
    model_type="vit",
    tasks=(IMAGE_CLASSIFICATION,),
    first_token=(IMAGE_CLASSIFICATION,),
    config_keys={
        **counts(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, image_size=224),
        **counts(patch_size=16, num_channels=3),
        "hidden_act": ConfigKey(default="gelu", choices=ACTIVATIONS),
        **plain(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.02),
        **plain(layer_norm_eps=1e-12, qkv_bias=True),
    },
    refused={"pruned_heads": "its blocks differ in shape"},
    no_number=frozenset(_VIT_UNREAD.split()),
    biased=lambda config: MATRICES if config["qkv_bias"] else ("attention_out", "up", "down"),
    prefix="vit.",
    blocks_path="encoder.layer",
    owner_paths=("embeddings", "layernorm"),
    head_paths=("layernorm",),
    dimensions=lambda config: dataclasses.replace(plain_dimensions(config), longest=image_tokens(config), fixed=True),
    layout=BlockLayout(
        attention="attention.attention",
        query="attention.attention.query",
        key="attention.attention.key",
        value="attention.attention.value",
        attention_out="attention.output.dense",
        up="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
        attention_norm="layernorm_before",
        feed_forward_norm="layernorm_after",
        attention_adapter="attention_adapters",
        feed_forward_adapter="output.output_adapters",
        norm_first=True,
        attention_dropout="attention.output.dropout",
        feed_forward_dropout="output.dropout",
        order=("key", "value", "query"),
    ),
    owner_shapes=_vit_owner,
    problem=_vit_problem,
)

_DESCRIBED = (
    *(BERT, ROBERTA, XLM_ROBERTA, ELECTRA, DISTILBERT, GPT2, LLAMA, MISTRAL, VIT),
    *(QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, SMOLLM3),
)
DESCRIBED: Mapping[str, Family] = {family.model_type: family for family in _DESCRIBED}
"""``model_type`` -> family with declared keys and shapes."""
GENERIC_ENCODERS = generic_encoders(BERT)
FAMILIES: Mapping[str, Family] = {
    **DESCRIBED,
    **{family.model_type: family for family in (*GENERIC_ENCODERS, *GENERIC)},
}
LAYOUTS: Mapping[str, BlockLayout] = {name: family.layout for name, family in FAMILIES.items()}
"""``model_type`` -> layout of its blocks."""


def family_named(model_type: object, *, where: str = "config.json") -> Family:
    """Return the family of a ``model_type``; else raise ``ModelError`` with the supported ones."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(f"{where}: model_type {model_type!r} is not supported yet; supported: {', '.join(FAMILIES)}")
    return family


def check_task(family: Family, task: str, *, where: str = "config.json") -> None:
    """Refuse a task for which the family has no head; raises ``ModelError``."""
    if head_task(task) not in family.tasks:
        others = ", ".join(name for name, other in FAMILIES.items() if head_task(task) in other.tasks)
        raise ModelError(
            f"{where}: model_type {family.model_type!r} has no head for model.task = {task!r}; supported for it: "
            f"{', '.join(family.tasks)}; models for that task: {others}"
        )
