"""Vision transformers (ViT): a row is the patches of one image behind a class token, so all rows are equally long."""

from __future__ import annotations

from ringtune.models.family import (
    ACTIVATIONS,
    IMAGE_CLASSIFICATION,
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

_UNREAD = "encoder_stride pooler_act pooler_output_size tie_word_embeddings is_decoder add_cross_attention pad_token_id"
_NO_NUMBER = frozenset(_UNREAD.split())


def image_tokens(config: Config) -> int:
    """Tokens of one image: its patches, and the class token.

    Example: 224 pixels in patches of 16 are 14 * 14 + 1 = 197.
    """
    side: int = config["image_size"] // config["patch_size"]
    return side * side + 1


def _dimensions(config: Config) -> Dimensions:
    return Dimensions(
        num_blocks=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        vocab=0,
        longest=image_tokens(config),
        fixed=True,
        inner_kept=kept_by(config["hidden_act"]),
        keeps_down_input=keeps_result(config["hidden_act"]),
    )


def _block(config: Config) -> Shapes:
    hidden, inner, bias = config["hidden_size"], config["intermediate_size"], bool(config["qkv_bias"])
    return {
        **linear("attention.attention.query", hidden, hidden, bias=bias),
        **linear("attention.attention.key", hidden, hidden, bias=bias),
        **linear("attention.attention.value", hidden, hidden, bias=bias),
        **linear("attention.output.dense", hidden, hidden),
        **linear("intermediate.dense", hidden, inner),
        **linear("output.dense", inner, hidden),
        **layer_norm("layernorm_before", hidden),
        **layer_norm("layernorm_after", hidden),
    }


def _owner(config: Config) -> Shapes:
    hidden, patch = config["hidden_size"], config["patch_size"]
    return {
        "embeddings.cls_token": (1, 1, hidden),
        "embeddings.position_embeddings": (1, image_tokens(config), hidden),
        "embeddings.patch_embeddings.projection.weight": (hidden, config["num_channels"], patch, patch),
        "embeddings.patch_embeddings.projection.bias": (hidden,),
        **layer_norm("layernorm", hidden),
    }


def _problem(config: Config) -> str:
    if config["image_size"] % config["patch_size"]:
        return f"image_size {config['image_size']} is no multiple of patch_size {config['patch_size']}"
    return indivisible(config["hidden_size"], config["num_attention_heads"])


VIT = Family(
    model_type="vit",
    tasks=(IMAGE_CLASSIFICATION,),
    first_token=(IMAGE_CLASSIFICATION,),
    config_keys={
        "hidden_size": ConfigKey(default=768, at_least=1),
        "num_hidden_layers": ConfigKey(default=12, at_least=1),
        "num_attention_heads": ConfigKey(default=12, at_least=1),
        "intermediate_size": ConfigKey(default=3072, at_least=1),
        "hidden_act": ConfigKey(default="gelu", choices=ACTIVATIONS),
        "hidden_dropout_prob": ConfigKey(default=0.0),
        "attention_probs_dropout_prob": ConfigKey(default=0.0),
        "initializer_range": ConfigKey(default=0.02),
        "layer_norm_eps": ConfigKey(default=1e-12),
        "image_size": ConfigKey(default=224, at_least=1),
        "patch_size": ConfigKey(default=16, at_least=1),
        "num_channels": ConfigKey(default=3, at_least=1),
        "qkv_bias": ConfigKey(default=True),
    },
    refused={"pruned_heads": "its blocks differ in shape"},
    no_number=_NO_NUMBER,
    prefix="vit.",
    blocks_path="encoder.layer",
    owner_paths=("embeddings", "layernorm"),
    head_paths=("layernorm",),
    dimensions=_dimensions,
    widths=lambda config: Widths.plain(config["hidden_size"], config["intermediate_size"]),
    block_shapes=_block,
    owner_shapes=_owner,
    subnet_weights=divided(
        into=(
            "attention.attention.query",
            "attention.attention.key",
            "attention.attention.value",
            "intermediate.dense",
        ),
        out=("attention.output.dense", "output.dense"),
    ),
    problem=_problem,
)
