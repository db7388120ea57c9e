"""Encoders whose forward is their architecture's own (``edge.model.families.recorded``): keys, names of modules, sizes.

Their configs are strict as those of the described families: a key that is not known is refused. Shapes of blocks are
those in the weights. Relative positions of DeBERTa and MPNet are tables outside the blocks, which every host reads
(``Family.shared_paths``). A classification head is the architecture's (``models.architecture_heads``). Bottlenecks are
where norms are before attention and feed-forward part, as in Llama: behind them AdapterHub's plug-in interface would
use the last block's norm in every block.

Source: the configurations and classes of transformers 4.57.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from ringtune.models.family import (
    ACTIVATIONS,
    MATRICES,
    BlockLayout,
    Config,
    ConfigKey,
    Dimensions,
    Family,
    Shapes,
    counts,
    indivisible,
    kept_by,
    layer_norm,
    linear,
    plain,
    plain_dimensions,
)

ALBERT_PROJECTION: Final = "embedding_hidden_mapping_in"
"""ALBERT's matrix from the width of its embeddings to that of its blocks."""
_ALBERT_LAYER: Final = "albert_layers.0."
_POSITIONS: Final = ("c2p", "p2c", "c2p|p2c", "p2c|c2p")
_DEBERTA_KEYS: Final[Mapping[str, ConfigKey]] = {
    **plain(type_vocab_size=0, layer_norm_eps=1e-7, relative_attention=False, position_biased_input=True),
    "max_relative_positions": ConfigKey(default=-1, at_least=-1),
    "pos_att_type": ConfigKey(default=None, nullable=str, choices=_POSITIONS),
    "pooler_hidden_act": ConfigKey(default="gelu", choices=ACTIVATIONS),
}
_DEBERTA_V2_KEYS: Final[Mapping[str, ConfigKey]] = {
    "position_buckets": ConfigKey(default=-1, at_least=-1),
    "norm_rel_ebd": ConfigKey(default="none", choices=("none", "layer_norm")),
    "share_att_key": ConfigKey(default=False),
}
_DEBERTA_UNREAD: Final = frozenset({"legacy", "padding_idx", "pooler_dropout", "pooler_hidden_size", "cls_dropout"})
_CONVOLUTION: Final = {"conv_kernel_size": "a convolution beside block 0 reads the embedding too"}
_ALBERT_UNREAD: Final = """
    classifier_dropout_prob down_scale_factor gap_size layers_to_keep net_structure_type num_memory_blocks
"""
_MODERNBERT_KEYS: Final[Mapping[str, ConfigKey]] = {
    **counts(vocab_size=50368, hidden_size=768, num_hidden_layers=22, num_attention_heads=12, intermediate_size=1152),
    "hidden_activation": ConfigKey(default="gelu", choices=ACTIVATIONS),
    **counts(max_position_embeddings=8192, global_attn_every_n_layers=3, local_attention=128),
    **plain(initializer_range=0.02, initializer_cutoff_factor=2.0, norm_eps=1e-5, norm_bias=False, pad_token_id=50283),
    **plain(global_rope_theta=160000.0, local_rope_theta=10000.0, attention_bias=False, attention_dropout=0.0),
    **plain(embedding_dropout=0.0, mlp_bias=False, mlp_dropout=0.0, classifier_bias=False),
    "classifier_pooling": ConfigKey(default="cls", choices=("cls", "mean")),
    "classifier_activation": ConfigKey(default="gelu", choices=ACTIVATIONS),
}
_MODERNBERT_UNREAD: Final = """
    cls_token_id decoder_bias deterministic_flash_attn layer_norm_eps position_embedding_type reference_compile
    repad_logits_with_grad sparse_pred_ignore_index sparse_prediction tie_word_embeddings
"""


def _dimensions(
    config: Config, *, before: int = 0, after_padding: bool = False, scores: int = 0, more: float = 0.5
) -> Dimensions:
    """Dimensions of a BERT's keys.

    The first ``before`` positions are of no token, or with ``after_padding`` those up to that of padding. ``scores`` of
    written-out attention are kept, and ``more`` tensors of the model's width (measured): 0.5 holds for a mask too.
    """
    dimensions = plain_dimensions(config)
    before = config["pad_token_id"] + 1 if after_padding else before
    kept = int(more * dimensions.hidden)
    return dataclasses.replace(dimensions, longest=dimensions.longest - before, more_kept=kept, kept_scores=scores)


def _mpnet_dimensions(config: Config) -> Dimensions:
    """Dimensions of an MPNet, whose blocks read a bias of each head; its positions begin at 2."""
    dimensions = _dimensions(config, before=2, scores=1, more=0.0)
    return dataclasses.replace(dimensions, more_masks=dimensions.num_heads - 1)


def _deberta_dimensions(config: Config) -> Dimensions:
    """Dimensions of a DeBERTa, whose mask and relative positions have eight bytes each."""
    return dataclasses.replace(_dimensions(config, scores=5, more=5.5), more_masks=3)


def _albert_dimensions(config: Config) -> Dimensions:
    """Dimensions of an ALBERT, whose block is a group: one layer's weights, applied once for each of its layers.

    Example: 12 layers of one group are one block, applied 12 times.
    """
    groups = config["num_hidden_groups"]
    return dataclasses.replace(_dimensions(config), num_blocks=groups, repeats=config["num_hidden_layers"] // groups)


def _albert_problem(config: Config) -> str:
    layers, groups = config["num_hidden_layers"], config["num_hidden_groups"]
    if layers % groups:
        return (
            f"num_hidden_layers {layers} can't be shared by num_hidden_groups {groups}: each group has as many layers; "
            "use a model whose num_hidden_layers is a multiple of its num_hidden_groups"
        )
    if config["inner_group_num"] != 1:
        return f"inner_group_num is {config['inner_group_num']}: a group of several layers is refused"
    return indivisible(config["hidden_size"], config["num_attention_heads"])


def _mpnet_shared(config: Config) -> Shapes:
    rows = config["relative_attention_num_buckets"]
    return {"encoder.relative_attention_bias.weight": (rows, config["num_attention_heads"])}


def _deberta_shared(config: Config) -> Shapes:
    rows = _relative_span(config)
    shapes: Shapes = {"encoder.rel_embeddings.weight": (rows, config["hidden_size"])} if rows else {}
    has_norm = config.get("norm_rel_ebd") == "layer_norm"
    return shapes | (layer_norm("encoder.LayerNorm", config["hidden_size"]) if has_norm else {})


def _relative_span(config: Config) -> int:
    """Rows of DeBERTa's table of relative positions; 0 without one."""
    if not config["relative_attention"]:
        return 0
    longest = config["max_relative_positions"]
    span = longest if longest > 0 else config["max_position_embeddings"]
    buckets = config.get("position_buckets", -1)
    return 2 * int(buckets if buckets > 0 else span)


def _deberta_v2_dimensions(config: Config) -> Dimensions:
    """Dimensions of a DeBERTa v2: each row keeps projected relative positions, each token its scores with them."""
    kinds = len(config["pos_att_type"].split("|")) if config.get("pos_att_type") else 0
    rows, dimensions = _relative_span(config) * kinds, _dimensions(config, scores=1)
    more = dimensions.more_kept + dimensions.num_heads * rows
    return dataclasses.replace(dimensions, more_kept=more, row_kept=rows * dimensions.hidden, more_masks=3)


def _with_joined_kinds(values: Config) -> dict[str, Any]:
    """Write DeBERTa's kinds of positions as one text. Example: ``["p2c", "c2p"]`` becomes ``p2c|c2p``."""
    kinds = values.get("pos_att_type")
    return {**values, "pos_att_type": "|".join(map(str, kinds)) or None} if isinstance(kinds, list) else dict(values)


def _with_period(values: Config) -> dict[str, Any]:
    """Replace ModernBERT's kinds of layers, as transformers 5 names them, by the period of those with full attention.

    Other kinds stay, and are refused as an unknown key. The rotary base of windows that is null is that of the others,
    which transformers 5 does not know.
    """
    base = values.get("global_rope_theta") or _MODERNBERT_KEYS["global_rope_theta"].default
    values = {key: base if key == "local_rope_theta" and value is None else value for key, value in values.items()}
    kinds, key = values.get("layer_types"), "global_attn_every_n_layers"
    count = values.get("num_hidden_layers", _MODERNBERT_KEYS["num_hidden_layers"].default)
    if not isinstance(kinds, list) or not kinds or len(kinds) != count:
        return values
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    period = values.get(key, full[1] if len(full) > 1 else count)
    if type(period) is not int or period < 1:
        return values
    if kinds != ["sliding_attention" if index % period else "full_attention" for index in range(count)]:
        return values
    return {**{name: value for name, value in values.items() if name != "layer_types"}, key: period}


def _deberta_problem(config: Config) -> str:
    if config.get("pos_att_type") and not config["relative_attention"]:
        return "pos_att_type without relative_attention has no table of positions; set relative_attention = true"
    return indivisible(config["hidden_size"], config["num_attention_heads"])


def _modernbert_dimensions(config: Config) -> Dimensions:
    dimensions = plain_dimensions(config, activation="hidden_activation")
    kept = 2 + kept_by(config["hidden_activation"])
    return dataclasses.replace(
        dimensions, inner_kept=kept, keeps_down_input=False, more_kept=5 * dimensions.hidden // 2, more_masks=1
    )


def generic_encoders(bert: Family) -> tuple[Family, ...]:
    """Return the rows in the order of their ``model_type``, each by what differs from BERT."""
    layout = dataclasses.replace(
        bert.layout,
        adds_residual=True,
        attention="attention",
        attention_adapter="",
        feed_forward_adapter="",
        attention_dropout="",
        feed_forward_dropout="",
    )
    norm_first = dataclasses.replace(
        layout, norm_first=True, attention_adapter="attention_adapters", feed_forward_adapter="output_adapters"
    )

    def row(
        model_type: str,
        prefix: str,
        layout: BlockLayout = layout,
        *,
        keys: Mapping[str, ConfigKey] = {},
        norm: str = "",
        shared: Callable[[Config], Shapes] = lambda config: {},
        **changes: Any,
    ) -> Family:
        """Describe an encoder by what differs from BERT.

        ``keys`` are those that BERT has not or otherwise, ``norm`` is behind the blocks, ``shared`` are the shapes of
        what all hosts read.
        """
        last = (norm,) if norm else ()
        replaced: dict[str, Any] = {
            "config_keys": {**bert.config_keys, **keys},
            "embeddings_path": "embeddings.word_embeddings",
            "owner_paths": ("embeddings", *last),
            "dimensions": _dimensions,
            **changes,
        }
        table = f"{replaced['embeddings_path']}.weight"

        def owner_shapes(config: Config) -> Shapes:
            return {table: (config["vocab_size"], config["hidden_size"]), **shared(config)}

        return dataclasses.replace(
            bert,
            model_type=model_type,
            prefix=f"{prefix}.",
            head_paths=last,
            trims=False,
            generic=True,
            plugged=True,
            packs=False,
            methods=("bottleneck", "lora") if layout.norm_first else ("lora",),
            layout=layout,
            **{"owner_shapes": owner_shapes, **replaced},
        )

    def without(*names: str) -> dict[str, ConfigKey]:
        return {name: key for name, key in bert.config_keys.items() if name not in names}

    roberta = {"vocab_size": ConfigKey(default=30522, at_least=1), "pad_token_id": ConfigKey(default=1)}
    like_roberta = functools.partial(_dimensions, after_padding=True)
    written_out = functools.partial(_dimensions, scores=1, more=0.0)
    deberta = dataclasses.replace(layout, query="", key="", value="attention.self.in_proj")
    deberta_v2 = dataclasses.replace(
        layout, query="attention.self.query_proj", key="attention.self.key_proj", value="attention.self.value_proj"
    )
    mpnet = dataclasses.replace(
        layout,
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        attention_out="attention.attn.o",
        attention_norm="attention.LayerNorm",
    )
    modernbert = dataclasses.replace(
        norm_first,
        attention="attn",
        query="",
        key="",
        value="attn.Wqkv",
        attention_out="attn.Wo",
        up="mlp.Wi",
        activation="mlp.act",
        down="mlp.Wo",
        attention_norm="attn_norm",
        feed_forward_norm="mlp_norm",
    )
    albert = dataclasses.replace(
        layout,
        attention=f"{_ALBERT_LAYER}attention",
        query=f"{_ALBERT_LAYER}attention.query",
        key=f"{_ALBERT_LAYER}attention.key",
        value=f"{_ALBERT_LAYER}attention.value",
        attention_out=f"{_ALBERT_LAYER}attention.dense",
        up=f"{_ALBERT_LAYER}ffn",
        activation=f"{_ALBERT_LAYER}activation",
        down=f"{_ALBERT_LAYER}ffn_output",
        attention_norm=f"{_ALBERT_LAYER}attention.LayerNorm",
        feed_forward_norm=f"{_ALBERT_LAYER}full_layer_layer_norm",
    )
    without_types = without("type_vocab_size", "position_embedding_type")
    of_deberta = {**without("position_embedding_type"), **_DEBERTA_KEYS}
    return (
        row(
            "albert",
            "albert",
            albert,
            keys={
                **counts(vocab_size=30000, embedding_size=128, hidden_size=4096, num_attention_heads=64),
                **counts(intermediate_size=16384, num_hidden_groups=1, inner_group_num=1),
                "hidden_act": ConfigKey(default="gelu_new", choices=ACTIVATIONS),
                **plain(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
            },
            no_number=bert.no_number | frozenset(_ALBERT_UNREAD.split()),
            blocks_path="encoder.albert_layer_groups",
            owner_paths=("embeddings", f"encoder.{ALBERT_PROJECTION}"),
            unfitted=MATRICES,
            dimensions=_albert_dimensions,
            owner_shapes=lambda config: {
                "embeddings.word_embeddings.weight": (config["vocab_size"], config["embedding_size"]),
                **linear(f"encoder.{ALBERT_PROJECTION}", config["embedding_size"], config["hidden_size"]),
            },
            problem=_albert_problem,
        ),
        row("camembert", "roberta", keys=roberta, dimensions=like_roberta),
        row(
            "data2vec-text",
            "data2vec_text",
            keys=roberta,
            dimensions=functools.partial(written_out, after_padding=True),
        ),
        row(
            "deberta",
            "deberta",
            deberta,
            config_keys={**of_deberta, "vocab_size": ConfigKey(default=50265, at_least=1)},
            no_number=bert.no_number | _DEBERTA_UNREAD,
            as_read=_with_joined_kinds,
            shared_paths=("encoder.rel_embeddings",),
            dimensions=_deberta_dimensions,
            shared=_deberta_shared,
            problem=_deberta_problem,
        ),
        row(
            "deberta-v2",
            "deberta",
            deberta_v2,
            config_keys={
                **of_deberta,
                **_DEBERTA_V2_KEYS,
                **counts(vocab_size=128100, hidden_size=1536, num_hidden_layers=24),
                **counts(num_attention_heads=24, intermediate_size=6144),
            },
            refused={**bert.refused, **_CONVOLUTION},
            no_number=bert.no_number | _DEBERTA_UNREAD | {"conv_act", "conv_groups"},
            as_read=_with_joined_kinds,
            shared_paths=("encoder.rel_embeddings", "encoder.LayerNorm"),
            twice=("query", "key"),
            dimensions=_deberta_v2_dimensions,
            shared=_deberta_shared,
            problem=_deberta_problem,
        ),
        row(
            "ernie",
            "ernie",
            keys={"task_type_vocab_size": ConfigKey(default=3), "use_task_id": ConfigKey(default=False)},
            dimensions=written_out,
        ),
        row(
            "megatron-bert",
            "bert",
            dataclasses.replace(norm_first, attention_norm="attention.ln", feed_forward_norm="ln"),
            keys=counts(
                vocab_size=29056, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
            ),
            norm="encoder.ln",
            dimensions=written_out,
        ),
        row(
            "modernbert",
            "model",
            modernbert,
            config_keys=_MODERNBERT_KEYS,
            no_number=frozenset(_MODERNBERT_UNREAD.split()),
            as_read=_with_period,
            aliases={"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"},
            blocks_path="layers",
            embeddings_path="embeddings.tok_embeddings",
            norm="final_norm",
            unused_paths=(),
            first_token=(),
            dimensions=_modernbert_dimensions,
        ),
        row(
            "mpnet",
            "mpnet",
            mpnet,
            config_keys={
                **without_types,
                "vocab_size": ConfigKey(default=30527, at_least=1),
                "pad_token_id": ConfigKey(default=1),
                "relative_attention_num_buckets": ConfigKey(default=32, at_least=32),
            },
            shared_paths=("encoder.relative_attention_bias",),
            shared=_mpnet_shared,
            dimensions=_mpnet_dimensions,
        ),
        row(
            "xlm-roberta-xl",
            "roberta",
            dataclasses.replace(
                norm_first, attention_norm="attention.self_attn_layer_norm", feed_forward_norm="LayerNorm"
            ),
            keys={
                **counts(vocab_size=250880, hidden_size=2560, num_hidden_layers=36),
                **counts(num_attention_heads=32, intermediate_size=10240),
                **counts(max_position_embeddings=514, type_vocab_size=1),
                **plain(layer_norm_eps=1e-5, pad_token_id=1),
            },
            norm="encoder.LayerNorm",
            dimensions=like_roberta,
        ),
    )
