"""Decoders: GPT-2, Llama, Mistral. Attention is causal; the head of a language model is the token table."""

from __future__ import annotations

import dataclasses

from ringtune.models.family import (
    ACTIVATIONS,
    CAUSAL_LM,
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

_TASKS = (CLASSIFICATION, REGRESSION, TAGGING, QUESTION_ANSWERING, CAUSAL_LM)
NULL_INT = ConfigKey(default=None, nullable=int)


def _gpt2_inner(config: Config) -> int:
    inner: int = config["n_inner"] or 4 * config["n_embd"]
    return inner


def _gpt2_dimensions(config: Config) -> Dimensions:
    return Dimensions(
        num_blocks=config["n_layer"],
        hidden=config["n_embd"],
        inner=_gpt2_inner(config),
        num_heads=config["n_head"],
        vocab=config["vocab_size"],
        longest=config["n_positions"],
        inner_kept=kept_by(config["activation_function"]),
        keeps_down_input=keeps_result(config["activation_function"]),
    )


def _gpt2_block(config: Config) -> Shapes:
    """Shapes of a GPT-2 block's tensors; matrices are (inputs, outputs)."""
    hidden, inner = config["n_embd"], _gpt2_inner(config)
    matrices = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    weights: Shapes = {f"{name}.weight": shape for name, shape in matrices.items()}
    biases: Shapes = {f"{name}.bias": shape[1:] for name, shape in matrices.items()}
    return {**weights, **biases, **layer_norm("ln_1", hidden), **layer_norm("ln_2", hidden)}


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
        "vocab_size": ConfigKey(default=50257, at_least=1),
        "n_positions": ConfigKey(default=1024, at_least=1),
        "n_embd": ConfigKey(default=768, at_least=1),
        "n_layer": ConfigKey(default=12, at_least=1),
        "n_head": ConfigKey(default=12, at_least=1),
        "n_inner": ConfigKey(default=None, nullable=int, at_least=1),
        "activation_function": ConfigKey(default="gelu_new", choices=ACTIVATIONS),
        "resid_pdrop": ConfigKey(default=0.1),
        "embd_pdrop": ConfigKey(default=0.1),
        "attn_pdrop": ConfigKey(default=0.1),
        "layer_norm_epsilon": ConfigKey(default=1e-5),
        "initializer_range": ConfigKey(default=0.02),
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
    dimensions=_gpt2_dimensions,
    widths=lambda config: Widths.plain(config["n_embd"], _gpt2_inner(config), merged=True),
    block_shapes=_gpt2_block,
    owner_shapes=_gpt2_owner,
    subnet_weights=divided(into=("attn.c_attn", "mlp.c_fc"), out=("attn.c_proj", "mlp.c_proj")),
    problem=lambda config: indivisible(config["n_embd"], config["n_head"]),
)


def head_width(config: Config) -> int:
    """Width of one head: ``head_dim``, else the hidden width divided by the number of heads."""
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width


def groups(config: Config) -> int:
    """Number of key-value heads."""
    found: int = config["num_key_value_heads"] or config["num_attention_heads"]
    return found


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


def llama_widths(config: Config) -> Widths:
    """Matrices that LoRA wraps in a Llama block.

    The library calls the down projection ``intermediate`` and the up projection ``output``.
    """
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], head_width(config)
    shared = (hidden, groups(config) * width)
    return Widths(
        query=(hidden, config["num_attention_heads"] * width),
        key=shared,
        value=shared,
        intermediate=(inner, hidden),
        output=(hidden, inner),
        swapped=True,
    )


def llama_block(config: Config, *, biased: str = "") -> Shapes:
    """Shapes of a Llama block's tensors; ``biased`` has letters of attention matrices with a bias."""
    widths, hidden, inner = llama_widths(config), config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {}
    attention = {"q": widths.query, "k": widths.key, "v": widths.value, "o": widths.query[::-1]}
    for name, (inputs, outputs) in attention.items():
        bias = bool(config.get("attention_bias")) or name in biased
        shapes |= linear(f"self_attn.{name}_proj", inputs, outputs, bias=bias)
    for name, (inputs, outputs) in {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}.items():
        shapes |= linear(f"mlp.{name}_proj", inputs, outputs, bias=bool(config.get("mlp_bias")))
    norms: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes | norms


def _llama_owner(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    return {"embed_tokens.weight": (config["vocab_size"], hidden), "norm.weight": (hidden,)}


def llama_problem(config: Config) -> str:
    """Say why the values of a Llama config are inconsistent; empty if they are not."""
    heads, shared = config["num_attention_heads"], groups(config)
    if heads % shared:
        return f"{heads} heads can't share {shared} key-value heads evenly"
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
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
    "vocab_size": ConfigKey(default=32000, at_least=1),
    "hidden_size": ConfigKey(default=4096, at_least=1),
    "intermediate_size": ConfigKey(default=11008, at_least=1),
    "num_hidden_layers": ConfigKey(default=32, at_least=1),
    "num_attention_heads": ConfigKey(default=32, at_least=1),
    "num_key_value_heads": ConfigKey(default=None, nullable=int, at_least=1),
    "head_dim": ConfigKey(default=None, nullable=int, at_least=1),
    "hidden_act": ConfigKey(default="silu", choices=ACTIVATIONS),
    "max_position_embeddings": ConfigKey(default=2048, at_least=1),
    "initializer_range": ConfigKey(default=0.02),
    "rms_norm_eps": ConfigKey(default=1e-6),
    "rope_theta": ConfigKey(default=10000.0),
    "rope_scaling": ConfigKey(default=None, nullable=dict),
    "partial_rotary_factor": ConfigKey(default=1.0, choices=(1.0,)),
    "attention_bias": ConfigKey(default=False),
    "attention_dropout": ConfigKey(default=0.0),
    "mlp_bias": ConfigKey(default=False),
    "tie_word_embeddings": ConfigKey(default=False),
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
    widths=llama_widths,
    block_shapes=llama_block,
    owner_shapes=_llama_owner,
    subnet_weights=divided(
        into=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        out=("self_attn.o_proj", "mlp.down_proj"),
    ),
    problem=llama_problem,
)

MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    config_keys={
        key: spec for key, spec in LLAMA_KEYS.items() if key not in ("attention_bias", "mlp_bias", "rope_scaling")
    }
    | {
        "intermediate_size": ConfigKey(default=14336, at_least=1),
        "num_key_value_heads": ConfigKey(default=8, nullable=int, at_least=1),
        "max_position_embeddings": ConfigKey(default=4096 * 32, at_least=1),
        "sliding_window": ConfigKey(default=4096, nullable=int, at_least=1),
    },
    refused={**LLAMA.refused, "rope_scaling": "Mistral has plain rotary positions"},
)
