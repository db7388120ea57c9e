"""Decoders: GPT-2, Llama, Mistral, and those without a model class in AdapterHub: Qwen2, Qwen3, Gemma 1 to 3, SmolLM3.

Attention is causal; the head of a language model is the token table. A family without a class is a Llama with a few
declared differences. Its description (``interface_of``) for AdapterHub's plug-in interface is saved beside the
adapters, so that the library alone can load the result. SmolLM and SmolLM2 have ``model_type`` llama.

Source: the configurations and modules of transformers 4.57; ``adapters.interface`` 1.3.0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from ringtune.models.family import (
    ACTIVATIONS,
    CAUSAL_LM,
    CLASSIFICATION,
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
    indivisible,
    kept_by,
    layer_norm,
    plain,
    plain_dimensions,
)

_TASKS = (CLASSIFICATION, REGRESSION, TAGGING, QUESTION_ANSWERING, CAUSAL_LM)
NULL_INT = ConfigKey(default=None, nullable=int)


def _gpt2_owner(config: Config) -> Shapes:
    hidden = config["n_embd"]
    return {
        "wte.weight": (config["vocab_size"], hidden),
        "wpe.weight": (config["n_positions"], hidden),
        **layer_norm("ln_f", hidden),
    }


GPT2 = Family(
    model_type="gpt2",
    tasks=_TASKS,
    config_keys={
        **counts(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
        "n_inner": ConfigKey(default=None, nullable=int, at_least=1),
        "activation_function": ConfigKey(default="gelu_new", choices=ACTIVATIONS),
        **plain(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, layer_norm_epsilon=1e-5, initializer_range=0.02),
        # the fused attention of transformers leaves these out
        "scale_attn_weights": ConfigKey(default=True, choices=(True,)),
        "scale_attn_by_inverse_layer_idx": ConfigKey(default=False, choices=(False,)),
        "reorder_and_upcast_attn": ConfigKey(default=False, choices=(False,)),
        "tie_word_embeddings": ConfigKey(default=True),
        "pad_token_id": NULL_INT,
    },
    refused={"add_cross_attention": "cross-attention has a second input", "pruned_heads": "its blocks differ in shape"},
    no_number=frozenset({"is_decoder", "n_ctx"}),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    prefix="transformer.",
    blocks_path="h",
    owner_paths=("wte", "wpe", "ln_f"),
    head_paths=("ln_f",),
    dimensions=functools.partial(
        plain_dimensions,
        blocks="n_layer",
        hidden="n_embd",
        inner="n_inner",
        heads="n_head",
        longest="n_positions",
        activation="activation_function",
    ),
    layout=BlockLayout(
        attention="attn",
        query="attn.c_attn",
        key="attn.c_attn",
        value="attn.c_attn",
        attention_out="attn.c_proj",
        up="mlp.c_fc",
        activation="mlp.act",
        down="mlp.c_proj",
        attention_norm="ln_1",
        feed_forward_norm="ln_2",
        attention_adapter="attention_adapters",
        feed_forward_adapter="output_adapters",
        norm_first=True,
        inputs_first=True,
        attention_dropout="attn.resid_dropout",
        feed_forward_dropout="mlp.dropout",
    ),
    owner_shapes=_gpt2_owner,
    problem=lambda config: indivisible(config["n_embd"], config["n_head"]),
)


def head_width(config: Config) -> int:
    """Width of one head: ``head_dim``, else the hidden width divided by the number of heads."""
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width


def groups(config: Config) -> int:
    """Number of key-value heads."""
    count: int = config["num_key_value_heads"] or config["num_attention_heads"]
    return count


def llama_dimensions(config: Config) -> Dimensions:
    """Dimensions of a Llama config."""
    return Dimensions(
        num_blocks=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        vocab=config["vocab_size"],
        longest=config["max_position_embeddings"],
        inner_kept=2 + kept_by(config.get("hidden_act") or config["hidden_activation"]),  # up, and the activated gate
        kv_heads=groups(config),
        attention=config["num_attention_heads"] * head_width(config),
    )


def _llama_biased(config: Config) -> tuple[str, ...]:
    attention = ("query", "key", "value", "attention_out") if config.get("attention_bias") else ()
    return (*attention, *(("up", "gate", "down") if config.get("mlp_bias") else ()))


def _llama_owner(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    return {"embed_tokens.weight": (config["vocab_size"], hidden), "norm.weight": (hidden,)}


def rope_type(config: Config) -> str:
    """Type of ``rope_scaling``, a key of ``ROPES``; ``default`` without scaling."""
    scaling = config.get("rope_scaling") or {}
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def llama_problem(config: Config) -> str:
    """Say why the values of a Llama config are inconsistent; empty if they are not."""
    heads, shared = config["num_attention_heads"], groups(config)
    if heads % shared:
        return f"{heads} heads can't share {shared} key-value heads evenly"
    scaling = config.get("rope_scaling") or {}
    kind = rope_type(config)
    if kind not in ROPES:
        return f"rope_scaling of type {kind!r} is not supported; supported: {', '.join(ROPES)}"
    known = ROPES[kind]
    if unknown := sorted(scaling.keys() - {"type", "rope_type", *known}):
        return f"rope_scaling of type {kind!r} has {', '.join(unknown)}, which is not known; known: {', '.join(known)}"
    return "" if config.get("head_dim") else indivisible(config["hidden_size"], heads)


_YARN = "factor attention_factor beta_fast beta_slow mscale mscale_all_dim original_max_position_embeddings truncate"
ROPES = {  # type of scaling -> its keys; other types depend on the longest text seen so far
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": tuple(_YARN.split()),
}
LLAMA_KEYS = {
    **counts(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32),
    **counts(max_position_embeddings=2048),
    "num_key_value_heads": ConfigKey(default=None, nullable=int, at_least=1),
    "head_dim": ConfigKey(default=None, nullable=int, at_least=1),
    "hidden_act": ConfigKey(default="silu", choices=ACTIVATIONS),
    **plain(initializer_range=0.02, rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False, attention_dropout=0.0),
    **plain(mlp_bias=False, tie_word_embeddings=False),
    "rope_scaling": ConfigKey(default=None, nullable=dict),
    "partial_rotary_factor": ConfigKey(default=1.0, choices=(1.0,)),
    "pad_token_id": NULL_INT,
}

LLAMA = Family(
    model_type="llama",
    tasks=_TASKS,
    config_keys=LLAMA_KEYS,
    refused=dict.fromkeys(("pruned_heads", "per_layer_config"), "its blocks differ in shape"),
    no_number=frozenset({"is_decoder", "add_cross_attention", "is_llama_config"}),
    prefix="model.",
    blocks_path="layers",
    owner_paths=("embed_tokens", "norm"),
    head_paths=("norm",),
    dimensions=llama_dimensions,
    layout=BlockLayout(
        attention="self_attn",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.o_proj",
        up="mlp.up_proj",
        gate="mlp.gate_proj",
        activation="mlp.act_fn",
        down="mlp.down_proj",
        attention_norm="input_layernorm",
        feed_forward_norm="post_attention_layernorm",
        attention_adapter="attention_adapters",
        feed_forward_adapter="output_adapters",
        norm_first=True,
        swaps_lora=True,
        norms_have_bias=False,
    ),
    biased=_llama_biased,
    owner_shapes=_llama_owner,
    problem=llama_problem,
)

MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    config_keys={
        key: spec for key, spec in LLAMA_KEYS.items() if key not in ("attention_bias", "mlp_bias", "rope_scaling")
    }
    | {
        **counts(intermediate_size=14336, max_position_embeddings=4096 * 32),
        "num_key_value_heads": ConfigKey(default=8, nullable=int, at_least=1),
        "sliding_window": ConfigKey(default=4096, nullable=int, at_least=1),
    },
    refused={**LLAMA.refused, "rope_scaling": "Mistral has plain rotary positions"},
)

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
_MIXES_WINDOWS: Final = ("sliding_window_pattern", "query_pre_attn_scalar", "max_window_layers")
"""Keys of models in which only some blocks have a window: Cohere 2 and Gemma 3, Gemma 2, Qwen."""
LAYER_TYPES: Final = (FULL, SLIDING)
METHODS: Final = ("bottleneck", "lora", "reft")
"""Kinds of adapters of these families; the plug-in interface of each names no invertible ones."""
WRITTEN_OUT: Final = ("doge", "gemma2", "vaultgemma")
"""``model_type`` of models that need eager attention: fused attention has no cap on scores, nor all masks of Doge."""

_WINDOW: Final = ConfigKey(default=4096, nullable=int, at_least=1)
_LIST: Final = ConfigKey(default=None, nullable=list)
_MIN_CAP: Final = 1e-3
_KEEPS_QUERY: Final = ("qwen3", "gemma3_text")
_FOUR_NORMS: Final = ("gemma2", "gemma3_text")
_CAPPED_SCORES_KEPT: Final = 2


def interface_of(family: Family) -> dict[str, Any]:
    """Return the fields of AdapterHub's ``AdapterModelInterface`` for a plugged family.

    No norm is named: the library would use the last block's norm in every block, and that is on another node. Of three
    names of one matrix the library takes the last, that of the values.
    """
    layout, inside = family.layout, len(family.layout.attention) + 1
    value = layout.value[inside:]
    return {
        "adapter_methods": list(family.methods),
        "model_embeddings": family.embeddings_path,
        "model_layers": family.blocks_path,
        "layer_self_attn": layout.attention,
        "layer_cross_attn": None,
        "attn_q_proj": layout.query[inside:] or value,
        "attn_k_proj": layout.key[inside:] or value,
        "attn_v_proj": value,
        "attn_o_proj": layout.attention_out[inside:],
        "layer_intermediate_proj": layout.up or None,
        "layer_output_proj": layout.down or None,
        # modules whose inputs are the residuals of bottlenecks
        "layer_pre_self_attn": layout.attention_norm if METHODS[0] in family.methods else None,
        "layer_pre_ffn": layout.feed_forward_norm if METHODS[0] in family.methods else None,
        "base_model": family.prefix.rstrip("."),
    }


def _plugged_dimensions(model_type: str) -> Callable[[Config], Dimensions]:
    """Make config -> dimensions: those of a Llama, plus the values that further norms and scores keep."""

    def dimensions(config: Config) -> Dimensions:
        plain = dataclasses.replace(llama_dimensions(config), more_masks=masks_of_windows(config))
        heads = plain.num_heads + plain.kv_heads if model_type in _KEEPS_QUERY else 0
        norms = 2 * plain.hidden if model_type in _FOUR_NORMS else 0
        more = heads * head_width(config) + norms
        if not config.get("attn_logit_softcapping"):
            return dataclasses.replace(plain, more_kept=more)
        # eager attention keeps scores, but not its output
        return dataclasses.replace(plain, more_kept=max(0, more - plain.attention), kept_scores=_CAPPED_SCORES_KEPT)

    return dimensions


def _plugged_problem(config: Config) -> str:
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if types is not None and (len(types) != count or any(kind not in LAYER_TYPES for kind in types)):
        return f"layer_types has to name {count} layers, each {' or '.join(LAYER_TYPES)}"
    if SLIDING in (types or ()) and not sliding_window(config):
        return f"layer_types has {SLIDING}, but there is no sliding_window"
    turned = config.get("no_rope_layers")
    if turned is not None and (len(turned) != count or any(value not in (0, 1) for value in turned)):
        return f"no_rope_layers has to have {count} values, each 0 or 1"
    return llama_problem(config)


def masks_of_windows(config: Config) -> int:
    """Return the number of masks besides the first one: 1 where blocks with a window are among others.

    A config without ``layer_types`` tells it by its pattern, if the model has one.
    """
    types = config.get("layer_types")
    if isinstance(types, list):
        return max(0, len({str(kind) for kind in types if str(kind).endswith("attention")} - {"linear_attention"}) - 1)
    first = config.get("max_window_layers")  # of Qwen; 0 = all have a window
    if not sliding_window(config) or (first is not None and not 0 < first < config["num_hidden_layers"]):
        return 0
    return int(any(config.get(key) for key in _MIXES_WINDOWS))


def sliding_window(config: Config) -> int:
    """Number of tokens in the window of a sliding layer; 0 without a window."""
    return int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0


def _windowed_problem(config: Config) -> str:
    """As ``_plugged_problem``, for a family that always has sliding layers."""
    return _plugged_problem(config) if config["sliding_window"] else "sliding_window can't be null"


_QWEN_KEYS: Final[Mapping[str, ConfigKey]] = {
    **{key: spec for key, spec in LLAMA_KEYS.items() if key not in ("head_dim", "mlp_bias", "attention_bias")},
    **counts(vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768),
    "num_key_value_heads": ConfigKey(default=32, nullable=int, at_least=1),
    **plain(use_sliding_window=False, max_window_layers=28),
    "sliding_window": _WINDOW,
    "layer_types": _LIST,
}
_GEMMA_KEYS: Final[Mapping[str, ConfigKey]] = {
    **{key: spec for key, spec in LLAMA_KEYS.items() if key not in ("mlp_bias", "rope_scaling")},
    **counts(vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28),
    **counts(num_attention_heads=16, num_key_value_heads=16, head_dim=256, max_position_embeddings=8192),
    "hidden_act": ConfigKey(default="gelu_pytorch_tanh", choices=ACTIVATIONS),
    "tie_word_embeddings": ConfigKey(default=True),
    "pad_token_id": ConfigKey(default=0, nullable=int),
}
_GEMMA2_KEYS: Final[Mapping[str, ConfigKey]] = {
    **{key: spec for key, spec in _GEMMA_KEYS.items() if key != "hidden_act"},
    **counts(hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8),
    **counts(num_key_value_heads=4, query_pre_attn_scalar=256),
    "hidden_activation": ConfigKey(default="gelu_pytorch_tanh", choices=ACTIVATIONS),
    "sliding_window": _WINDOW,
    "layer_types": _LIST,
    "final_logit_softcapping": ConfigKey(default=30.0, nullable=float, at_least=_MIN_CAP),
    "attn_logit_softcapping": ConfigKey(default=50.0, nullable=float, at_least=_MIN_CAP),
}
_SMOLLM3_KEYS: Final[Mapping[str, ConfigKey]] = {
    **{key: spec for key, spec in LLAMA_KEYS.items() if key != "head_dim"},
    **counts(vocab_size=128256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16),
    **counts(max_position_embeddings=32768, no_rope_layer_interval=4),
    "num_key_value_heads": ConfigKey(default=4, nullable=int, at_least=1),
    **plain(rope_theta=2000000.0, use_sliding_window=False, tie_word_embeddings=True),
    "sliding_window": ConfigKey(default=None, nullable=int, at_least=1),
    "no_rope_layers": _LIST,
    "layer_types": _LIST,
    "pad_token_id": ConfigKey(default=128004, nullable=int),
}


_PLUGGED: Final = dataclasses.replace(LLAMA.layout, swaps_lora=False, adds_residual=True)
_QWEN3: Final = dataclasses.replace(_PLUGGED, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_GEMMA2: Final = dataclasses.replace(
    _PLUGGED,
    attention_last_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_last_norm="post_feedforward_layernorm",
)
_GEMMA3: Final = dataclasses.replace(_GEMMA2, query_norm=_QWEN3.query_norm, key_norm=_QWEN3.key_norm)


def _plugged_family(model_type: str, keys: Mapping[str, ConfigKey], **changes: Any) -> Family:
    """Derive a family from Llama, with other config keys."""
    replaced: dict[str, Any] = {"problem": _plugged_problem, "layout": _PLUGGED} | changes
    return dataclasses.replace(
        LLAMA,
        model_type=model_type,
        tasks=(CLASSIFICATION, REGRESSION, CAUSAL_LM),
        config_keys=keys,
        dimensions=_plugged_dimensions(model_type),
        plugged=True,
        **replaced,
    )


_BOTH_WAYS: Final = {"use_bidirectional_attention": "a decoder's tokens attend backwards only"}
_PLAIN_ROPE: Final = {**LLAMA.refused, **_BOTH_WAYS, "rope_scaling": "this Gemma has plain rotary positions"}
QWEN2: Final = _plugged_family("qwen2", _QWEN_KEYS, biased=lambda config: ("query", "key", "value"))
QWEN3: Final = _plugged_family(
    "qwen3",
    {**_QWEN_KEYS, "head_dim": ConfigKey(default=128, at_least=1), "attention_bias": ConfigKey(default=False)},
    layout=_QWEN3,
)
GEMMA: Final = _plugged_family(
    "gemma", _GEMMA_KEYS, refused=_PLAIN_ROPE, no_number=LLAMA.no_number | {"hidden_activation"}
)
GEMMA2: Final = _plugged_family("gemma2", _GEMMA2_KEYS, layout=_GEMMA2, problem=_windowed_problem, refused=_PLAIN_ROPE)
GEMMA3: Final = _plugged_family(
    "gemma3_text",
    {
        **{key: spec for key, spec in _GEMMA2_KEYS.items() if key != "attn_logit_softcapping"},
        **counts(vocab_size=262208, max_position_embeddings=131072, sliding_window_pattern=6),
        "final_logit_softcapping": ConfigKey(default=None, nullable=float, at_least=_MIN_CAP),
        **plain(rope_theta=1000000.0, rope_local_base_freq=10000.0),
        "rope_scaling": ConfigKey(default=None, nullable=dict),
    },
    layout=_GEMMA3,
    problem=_windowed_problem,
    no_number=LLAMA.no_number | {"_sliding_window_pattern"},  # its effect is in layer_types
    refused={**LLAMA.refused, **_BOTH_WAYS, "attn_logit_softcapping": "transformers does not apply it in Gemma 3"},
)
SMOLLM3: Final = _plugged_family("smollm3", _SMOLLM3_KEYS)
