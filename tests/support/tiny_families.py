"""Tiny random model folders of every family, with the tokenizer of ``tiny``.

Like ``tiny.write_model`` a pure function of its arguments; weights are larger than usual, so that a wrong mask,
position or block is seen.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from edge.model.families.stored_names import use_stored_names
from ringtune.models import generic_decoders
from ringtune.models.families import FAMILIES, GENERIC_ENCODERS
from tests.support import tiny

HIDDEN = 32
LONGEST = 64
IMAGE_SIZE = 12
IMAGE_TOKENS = 10  # nine patches of 4 x 4, and the class token

_BERT = {
    "vocab_size": len(tiny.vocabulary()),
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 3}
# model_type -> (class prefix of transformers, key of the number of blocks, configuration)
_SPECS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "num_hidden_layers", _BERT),
    "roberta": ("Roberta", "num_hidden_layers", {**_BERT, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", "num_hidden_layers", {**_BERT, "type_vocab_size": 1}),
    "electra": ("Electra", "num_hidden_layers", {**_BERT, "embedding_size": 16}),
    "distilbert": (
        "DistilBert",
        "n_layers",
        {
            "vocab_size": len(tiny.vocabulary()),
            "dim": HIDDEN,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": LONGEST,
            "initializer_range": 0.3,
        },
    ),
    "gpt2": (
        "GPT2",
        "n_layer",
        {
            "vocab_size": len(tiny.vocabulary()),
            "n_embd": HIDDEN,
            "n_head": 4,
            "n_inner": 48,
            "n_positions": LONGEST,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
    ),
    "llama": ("Llama", "num_hidden_layers", _LLAMA),
    "mistral": ("Mistral", "num_hidden_layers", {**_LLAMA, "sliding_window": 5, "head_dim": 12}),
    "vit": (
        "ViT",
        "num_hidden_layers",
        {
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": IMAGE_SIZE,
            "patch_size": 4,
            "num_channels": 1,
            "initializer_range": 0.3,
        },
    ),
    "qwen2": (
        "Qwen2",
        "num_hidden_layers",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", "num_hidden_layers", {**_LLAMA, "head_dim": 12}),
    "gemma": ("Gemma", "num_hidden_layers", {**_LLAMA, "head_dim": 12}),
    "gemma2": (
        "Gemma2",
        "num_hidden_layers",
        {
            **_LLAMA,
            "head_dim": 12,
            "sliding_window": 5,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        "num_hidden_layers",
        {
            **_LLAMA,
            "head_dim": 12,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 100.0,
        },
    ),
    "smollm3": ("SmolLM3", "num_hidden_layers", {**_LLAMA, "no_rope_layer_interval": 2}),
}
MODEL_TYPES = tuple(_SPECS)
_SIZES = {
    "vocab_size": len(tiny.vocabulary()),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), LONGEST),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_num_shared_experts", "n_shared_experts"), 2),
    "num_shared_experts": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("n_group", "topk_group", "decoder_sparse_step"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "pad_token_id"), 0),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "sliding_window": 5,
    "initializer_range": 0.3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
"""Size of a generic family's tiny model, by each name that transformers has for it."""
IN_FLOAT32 = ("deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "mpt", "xglm")
"""Families whose router or mask transformers can't compute in float64."""

VERSION = int(version("transformers").partition(".")[0])
_LATENT = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "num_key_value_heads"), 4),
}
_DELTA = {
    **dict.fromkeys(("linear_num_key_heads", "full_attention_interval"), 2),
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
}
_SHARING: dict[str, Any] = {
    "vocab_size_per_layer_input": len(tiny.vocabulary()),
    "hidden_size_per_layer_input": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Blocks with inputs of their own, of which the last ones read keys and values of earlier ones."""
GEMMA4_ALONE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block"), True),
    "use_double_wide_mlp": False,
    "num_global_key_value_heads": 1,
    "top_k_experts": 2,
    "num_experts": 4,
    "moe_intermediate_size": 24,
}
"""Gemma 4 with experts, whose blocks pass on the hidden state alone."""
GENERIC: dict[str, dict[str, Any]] = {
    **{family.model_type: {} for family in generic_decoders.GENERIC if family.since <= VERSION},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5},
    "falcon": {"multi_query": True},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.5},
    "olmo": {"clip_qkv": 1.0},
    "mpt": {"logit_scale": None},
    "ernie4_5_moe": {"moe_layer_end_index": 3, "moe_layer_interval": 1},
    "diffllama": {"num_key_value_heads": 4},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    **dict.fromkeys(("glm4_moe_lite", "minicpm3", "youtu"), _LATENT),
    "gemma3n_text": {
        **_SHARING,
        "altup_num_inputs": 3,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.9, 0.0] * 2,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_text": {**_SHARING, "use_double_wide_mlp": True, "global_head_dim": 24},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, "mlp_only_layers": []},
}
GENERIC = {name: GENERIC[name] for name in GENERIC if FAMILIES[name].since <= VERSION}
"""Generic family -> further values of its tiny model."""
ENCODERS: dict[str, dict[str, Any]] = {
    **{family.model_type: {} for family in GENERIC_ENCODERS},
    "albert": {"embedding_size": 16, "num_hidden_groups": 4},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 2},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
    "modernbert": {"local_attention": 6, "global_attn_every_n_layers": 2, "classifier_pooling": "mean"},
    "mpnet": {"pad_token_id": 1},
}
"""Generic encoder -> further values of its tiny model."""
DIVIDED = tuple(name for name in GENERIC if FAMILIES[name].divided)
PLUGGED = ("qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3")
DECODERS = ("gpt2", "llama", "mistral", *PLUGGED)


def write_family(
    folder: Path,
    model_type: str,
    *,
    num_blocks: int = 4,
    padding_side: str = "right",
    with_decoder: bool = False,
    seed: int = 0,
    **config: object,
) -> Path:
    """Write a random model of a family (config, safetensors, tokenizer unless it takes images)."""
    library: Any = importlib.import_module("transformers")
    if model_type in GENERIC or model_type in ENCODERS:
        return _write_generic(folder, model_type, num_blocks, padding_side, seed, config)
    name, configuration = _SPECS[model_type][0], config_of(model_type, num_blocks=num_blocks, **config)
    decoder = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(name, f"{name}ForCausalLM")
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(library, decoder if with_decoder else f"{name}Model")(configuration)
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name.lower() or "ln_" in parameter_name:
                parameter.data += 0.1 * torch.randn_like(parameter)  # biases and norms that differ from 0 and 1
    model.save_pretrained(folder)
    if model_type != "vit":
        write_tokenizer(folder, padding_side=padding_side, with_types=model_type in ("bert", "electra"))
    return folder


def sizes_of(model_type: str) -> dict[str, Any]:
    """The sizes of a generic family's tiny model, by the names that its class has."""
    library: Any = importlib.import_module("transformers")
    defaults = library.CONFIG_MAPPING[model_type]()
    saved = defaults.to_dict()
    sizes = {key: value for key, value in _SIZES.items() if key in saved or hasattr(defaults, key)}
    if getattr(defaults, "sliding_window", None) is None:
        sizes.pop("sliding_window", None)
    for key in ("head_dim", "sliding_window"):
        if isinstance(getattr(type(defaults), key, None), property) or hasattr(defaults, "kv_lora_rank"):
            sizes.pop(key, None)  # computed by the class
    return {**sizes, **(GENERIC | ENCODERS)[model_type]}


def _write_generic(
    folder: Path, model_type: str, num_blocks: int, padding_side: str, seed: int, config: dict[str, Any]
) -> Path:
    """Write a random model of a generic family as the language model that it was pretrained as."""
    library: Any = importlib.import_module("transformers")
    sizes = sizes_of(model_type)
    sizes |= {key: num_blocks for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in sizes}
    if "num_hidden_groups" in sizes:
        sizes |= {"num_hidden_groups": num_blocks, "num_hidden_layers": 2 * num_blocks}
    lists = {key: list(value) for key, value in config.items() if isinstance(value, tuple)}
    configuration = library.CONFIG_MAPPING[model_type](**{**sizes, **config, **lists})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = library.AutoModelForMaskedLM if model_type in ENCODERS else library.AutoModelForCausalLM
        model = kind.from_config(configuration)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "expert" in name or "relative" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
        if model_type == "gemma3n_text":  # the gradient of the mean square of a padding token's zeros is not finite
            model.get_input_embeddings().weight.data[0] += 0.1
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():  # a correction of a router, a factor of a block
                buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    write_tokenizer(folder, padding_side=padding_side, with_types=getattr(configuration, "type_vocab_size", 0) > 1)
    return folder


def config_of(model_type: str, *, num_blocks: int = 4, **config: object) -> Any:
    """The configuration of transformers of a family's tiny model."""
    library: Any = importlib.import_module("transformers")
    name, blocks_key, values = _SPECS[model_type]
    return getattr(library, f"{name}Config")(**{**values, blocks_key: num_blocks, **config})


def base_model(model_type: str, *, num_blocks: int = 4, seed: int = 0, **config: object) -> Any:
    """The random base model of a family in memory, without a folder."""
    library: Any = importlib.import_module("transformers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(library, f"{_SPECS[model_type][0]}Model")
        model = made(config_of(model_type, num_blocks=num_blocks, **config))
        use_stored_names(model, model_type, FAMILIES[model_type].blocks_path)
        return model


def write_tokenizer(folder: Path, *, padding_side: str, with_types: bool) -> None:
    """Write the word-piece tokenizer of ``tiny``."""
    names = ["input_ids", *(["token_type_ids"] if with_types else []), "attention_mask"]
    tiny.write_tokenizer(folder, model_max_length=LONGEST, padding_side=padding_side, model_input_names=names)
