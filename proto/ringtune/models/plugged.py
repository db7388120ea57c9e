"""Decoders without a model class in AdapterHub: Qwen2, Qwen3, Gemma 1 to 3 (text), SmolLM3.

Each is a Llama with a few declared differences. Adapters are added by AdapterHub's plug-in interface, and its
description (``interface_of``) is saved beside the adapters, so that the library alone can load the result. SmolLM and
SmolLM2 have ``model_type`` llama.

Source: the configurations and modules of transformers 4.57; ``adapters.interface`` 1.3.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from ringtune.models.decoder import LLAMA, LLAMA_KEYS, head_width, llama_block, llama_dimensions, llama_problem
from ringtune.models.decoder import llama_widths as swapped_widths
from ringtune.models.family import (
    ACTIVATIONS,
    CAUSAL_LM,
    CLASSIFICATION,
    REGRESSION,
    Config,
    ConfigKey,
    Dimensions,
    Family,
    Shapes,
    Widths,
)

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LAYER_TYPES: Final = (FULL, SLIDING)
METHODS: Final = ("bottleneck", "lora", "reft")
"""Kinds of adapters of these families; the plug-in interface of each names no invertible ones."""
WRITTEN_OUT: Final = ("gemma2",)
"""``model_type`` of models with soft-capped scores, which need eager attention."""

_WINDOW: Final = ConfigKey(default=4096, nullable=int, at_least=1)
_LIST: Final = ConfigKey(default=None, nullable=list)
_MIN_CAP: Final = 1e-3
_KEEPS_QUERY: Final = ("qwen3", "gemma3_text")
_FOUR_NORMS: Final = ("gemma2", "gemma3_text")
_AROUND: Final = ("post_attention", "pre_feedforward", "post_feedforward")
_CAPPED_SCORES_KEPT: Final = 2


def interface_of(family: Family) -> dict[str, Any]:
    """Return the fields of AdapterHub's ``AdapterModelInterface`` for a plugged family.

    No norm is named: the library would use the last block's norm in every block, and that is on another node.
    """
    before = "pre_feedforward_layernorm" if family.model_type in _FOUR_NORMS else "post_attention_layernorm"
    return {
        "adapter_methods": list(METHODS),
        "model_embeddings": "embed_tokens",
        "model_layers": "layers",
        "layer_self_attn": "self_attn",
        "layer_cross_attn": None,
        "attn_q_proj": "q_proj",
        "attn_k_proj": "k_proj",
        "attn_v_proj": "v_proj",
        "attn_o_proj": "o_proj",
        "layer_intermediate_proj": "mlp.up_proj",
        "layer_output_proj": "mlp.down_proj",
        "layer_pre_self_attn": "input_layernorm",
        "layer_pre_ffn": before,
        "base_model": "model",
    }


def _dimensions(model_type: str) -> Callable[[Config], Dimensions]:
    """Make config -> dimensions: those of a Llama, plus the values that further norms and scores keep."""

    def dimensions(config: Config) -> Dimensions:
        found = llama_dimensions(config)
        heads = found.num_heads + found.kv_heads if model_type in _KEEPS_QUERY else 0
        norms = 2 * found.hidden if model_type in _FOUR_NORMS else 0
        more = heads * head_width(config) + norms
        if not config.get("attn_logit_softcapping"):
            return dataclasses.replace(found, more_kept=more)
        # eager attention keeps scores, but not its output
        return dataclasses.replace(found, more_kept=max(0, more - found.attention), kept_scores=_CAPPED_SCORES_KEPT)

    return dimensions


def _widths(config: Config) -> Widths:
    """Return a Llama's matrices; here the library calls the down projection ``output``."""
    widths = swapped_widths(config)
    return dataclasses.replace(widths, intermediate=widths.output, output=widths.intermediate, swapped=False)


def _block(model_type: str) -> Callable[[Config], Shapes]:
    """Make config -> shapes of a block's tensors."""

    def shapes(config: Config) -> Shapes:
        found = llama_block(config, biased="qkv" if model_type == "qwen2" else "")
        width = (head_width(config),)
        if model_type in _KEEPS_QUERY:
            found |= {f"self_attn.{name}_norm.weight": width for name in ("q", "k")}
        if model_type in _FOUR_NORMS:
            found |= {f"{name}_layernorm.weight": (config["hidden_size"],) for name in _AROUND}
        return found

    return shapes


def _problem(config: Config) -> str:
    """Say why the values of a config are inconsistent; empty if they are not."""
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if types is not None and (len(types) != count or any(kind not in LAYER_TYPES for kind in types)):
        return f"layer_types has to name {count} layers, each {' or '.join(LAYER_TYPES)}"
    if SLIDING in (types or ()) and not _window(config):
        return f"layer_types has {SLIDING}, but there is no sliding_window"
    turned = config.get("no_rope_layers")
    if turned is not None and (len(turned) != count or any(value not in (0, 1) for value in turned)):
        return f"no_rope_layers has to have {count} values, each 0 or 1"
    return llama_problem(config)


def _window(config: Config) -> int:
    """Number of tokens in the window of a sliding layer; 0 without a window."""
    return int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0


def _windowed_problem(config: Config) -> str:
    """As ``_problem``, for a family that always has sliding layers."""
    return _problem(config) if config["sliding_window"] else "sliding_window can't be null"


_QWEN_KEYS: Final[Mapping[str, ConfigKey]] = {
    **{key: spec for key, spec in LLAMA_KEYS.items() if key not in ("head_dim", "mlp_bias", "attention_bias")},
    "vocab_size": ConfigKey(default=151936, at_least=1),
    "intermediate_size": ConfigKey(default=22016, at_least=1),
    "num_key_value_heads": ConfigKey(default=32, nullable=int, at_least=1),
    "max_position_embeddings": ConfigKey(default=32768, at_least=1),
    "use_sliding_window": ConfigKey(default=False),
    "sliding_window": _WINDOW,
    "max_window_layers": ConfigKey(default=28),
    "layer_types": _LIST,
}
_GEMMA_KEYS: Final[Mapping[str, ConfigKey]] = {
    **{key: spec for key, spec in LLAMA_KEYS.items() if key not in ("mlp_bias", "rope_scaling")},
    "vocab_size": ConfigKey(default=256000, at_least=1),
    "hidden_size": ConfigKey(default=3072, at_least=1),
    "intermediate_size": ConfigKey(default=24576, at_least=1),
    "num_hidden_layers": ConfigKey(default=28, at_least=1),
    "num_attention_heads": ConfigKey(default=16, at_least=1),
    "num_key_value_heads": ConfigKey(default=16, at_least=1),
    "head_dim": ConfigKey(default=256, at_least=1),
    "hidden_act": ConfigKey(default="gelu_pytorch_tanh", choices=ACTIVATIONS),
    "max_position_embeddings": ConfigKey(default=8192, at_least=1),
    "tie_word_embeddings": ConfigKey(default=True),
    "pad_token_id": ConfigKey(default=0, nullable=int),
}
_GEMMA2_KEYS: Final[Mapping[str, ConfigKey]] = {
    **{key: spec for key, spec in _GEMMA_KEYS.items() if key != "hidden_act"},
    "hidden_size": ConfigKey(default=2304, at_least=1),
    "intermediate_size": ConfigKey(default=9216, at_least=1),
    "num_hidden_layers": ConfigKey(default=26, at_least=1),
    "num_attention_heads": ConfigKey(default=8, at_least=1),
    "num_key_value_heads": ConfigKey(default=4, at_least=1),
    "hidden_activation": ConfigKey(default="gelu_pytorch_tanh", choices=ACTIVATIONS),
    "query_pre_attn_scalar": ConfigKey(default=256, at_least=1),
    "sliding_window": _WINDOW,
    "layer_types": _LIST,
    "final_logit_softcapping": ConfigKey(default=30.0, nullable=float, at_least=_MIN_CAP),
    "attn_logit_softcapping": ConfigKey(default=50.0, nullable=float, at_least=_MIN_CAP),
}
_SMOLLM3_KEYS: Final[Mapping[str, ConfigKey]] = {
    **{key: spec for key, spec in LLAMA_KEYS.items() if key != "head_dim"},
    "vocab_size": ConfigKey(default=128256, at_least=1),
    "hidden_size": ConfigKey(default=2048, at_least=1),
    "num_hidden_layers": ConfigKey(default=36, at_least=1),
    "num_attention_heads": ConfigKey(default=16, at_least=1),
    "num_key_value_heads": ConfigKey(default=4, nullable=int, at_least=1),
    "max_position_embeddings": ConfigKey(default=32768, at_least=1),
    "rope_theta": ConfigKey(default=2000000.0),
    "use_sliding_window": ConfigKey(default=False),
    "sliding_window": ConfigKey(default=None, nullable=int, at_least=1),
    "no_rope_layers": _LIST,
    "no_rope_layer_interval": ConfigKey(default=4, at_least=1),
    "layer_types": _LIST,
    "tie_word_embeddings": ConfigKey(default=True),
    "pad_token_id": ConfigKey(default=128004, nullable=int),
}


def _family(model_type: str, keys: Mapping[str, ConfigKey], **changes: Any) -> Family:
    """Derive a family from Llama, with other config keys."""
    own: dict[str, Any] = {"problem": _problem} | changes
    return dataclasses.replace(
        LLAMA,
        model_type=model_type,
        tasks=(CLASSIFICATION, REGRESSION, CAUSAL_LM),
        config_keys=keys,
        dimensions=_dimensions(model_type),
        widths=_widths,
        block_shapes=_block(model_type),
        plugged=True,
        **own,
    )


_BOTH_WAYS: Final = {"use_bidirectional_attention": "a decoder's tokens attend backwards only"}
_PLAIN_ROPE: Final = {**LLAMA.refused, **_BOTH_WAYS, "rope_scaling": "this Gemma has plain rotary positions"}
QWEN2: Final = _family("qwen2", _QWEN_KEYS)
QWEN3: Final = _family(
    "qwen3", {**_QWEN_KEYS, "head_dim": ConfigKey(default=128, at_least=1), "attention_bias": ConfigKey(default=False)}
)
GEMMA: Final = _family("gemma", _GEMMA_KEYS, refused=_PLAIN_ROPE, no_number=LLAMA.no_number | {"hidden_activation"})
GEMMA2: Final = _family("gemma2", _GEMMA2_KEYS, problem=_windowed_problem, refused=_PLAIN_ROPE)
GEMMA3: Final = _family(
    "gemma3_text",
    {
        **{key: spec for key, spec in _GEMMA2_KEYS.items() if key != "attn_logit_softcapping"},
        "vocab_size": ConfigKey(default=262208, at_least=1),
        "max_position_embeddings": ConfigKey(default=131072, at_least=1),
        "final_logit_softcapping": ConfigKey(default=None, nullable=float, at_least=_MIN_CAP),
        "rope_theta": ConfigKey(default=1000000.0),
        "rope_local_base_freq": ConfigKey(default=10000.0),
        "rope_scaling": ConfigKey(default=None, nullable=dict),
        "sliding_window_pattern": ConfigKey(default=6, at_least=1),
    },
    problem=_windowed_problem,
    no_number=LLAMA.no_number | {"_sliding_window_pattern"},  # its effect is in layer_types
    refused={**LLAMA.refused, **_BOTH_WAYS, "attn_logit_softcapping": "transformers does not apply it in Gemma 3"},
)
SMOLLM3: Final = _family("smollm3", _SMOLLM3_KEYS)
