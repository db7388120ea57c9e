"""Decoders without code of their own: names of their modules; sizes come from the usual keys of a config.

The forward of such a model is its architecture's own (``edge.model.families.recorded``), so all keys of its config are
passed on to the library, and shapes are those in the weights. A row here has only the names that differ from Llama's.
Where queries, keys and values are one matrix, it counts as the values': LoRA on ``v`` is beside the whole matrix. The
experts of a mixture stay together in their block, frozen, with their router; LoRA goes to the attention.

Source: the classes of transformers 4.57 (``AutoModelForCausalLM``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ringtune.models.decoders import LLAMA, masks_of_windows, rope_type
from ringtune.models.family import (
    CAUSAL_LM,
    CHUNK,
    GATE_AND_UP,
    BlockLayout,
    Config,
    Dimensions,
    Family,
    Shapes,
    keeps_result,
    kept_by,
)
from ringtune.models.passed_values import (
    PassedValues,
    gemma3n_kinds_problem,
    gemma3n_passed,
    gemma3n_unread,
    gemma4_kinds_problem,
    gemma4_passed,
    gemma4_unread,
)

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "num_blocks": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "vocab": ("vocab_size",),
    "inner": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "block_ff_dim"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "longest": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "head_width": ("head_dim", "qk_head_dim"),
    "activation": ("hidden_act", "activation_function", "hidden_activation", "activation"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "moe_k", "moe_topk", "experts_per_token", "top_k_experts"),
    "expert_inner": ("moe_intermediate_size",),
    "latent": ("kv_lora_rank",),
    "shared": ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert", "num_shared_experts"),
    "shared_inner": ("shared_expert_intermediate_size", "shared_intermediate_size"),
}
"""Size -> its names in the configs of transformers."""
_NEEDED: Final = ("num_blocks", "hidden", "heads", "vocab")
_WITHOUT_LIMIT: Final = 2048
"""Longest text where a config names none, as with ALiBi: that of the trainings of BLOOM and Falcon."""


def _value(config: Config, size: str) -> Any:
    return next((config[key] for key in _KEYS[size] if config.get(key) is not None), None)


def _size(config: Config, size: str, default: int = 0) -> int:
    value = _value(config, size)
    return default if value is None else int(value)


def _kv_heads(config: Config, heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    settings = config.get("attn_config")
    return _size(config, "kv_heads", (settings or {}).get("kv_n_heads", heads) if isinstance(settings, dict) else heads)


def active_experts(config: Config) -> int:
    """Number of experts that compute one token; 0 where blocks have none."""
    return _size(config, "active", 1) if _size(config, "experts") and config.get("is_moe", True) else 0


def _dimensions(layout: BlockLayout, kept: int, scores: int, config: Config) -> Dimensions:
    """Dimensions by the usual keys; of a mixture the experts of one token together are the feed-forward part.

    ``kept`` tensors of the inner width are kept for backward besides those of the activation, gate and ``up``, and
    ``scores`` of attention that is not fused; on a processor torch does not fuse it where values have another width
    than keys. Norms keep three widths more than usual at most. Each expert of a token keeps its input, and its output
    before its factor.
    """
    hidden, heads = _size(config, "hidden"), _size(config, "heads")
    width = _size(config, "head_width") or hidden // heads
    if _size(config, "latent"):
        width = int(config.get("qk_nope_head_dim") or 128) + int(config.get("qk_rope_head_dim") or 64)
    if int(config.get("v_head_dim") or (128 if _size(config, "latent") else width)) != width:
        scores = max(scores, 1)
    inner = _size(config, "inner") or int(config.get("expansion_ratio") or 4) * hidden
    active = active_experts(config)
    if active:
        each = _size(config, "expert_inner", inner)
        together = (active + _size(config, "shared")) * each + _size(config, "shared_inner")
        inner = max(inner, together)  # some blocks may have no experts
    mixer = dict(layout.instead).get("value", "")
    state = _state_values(config, has_triangle=mixer == _QWEN3_NEXT) if mixer.startswith(_DELTA) else 0
    has_gate = active or layout.gate or layout.up.endswith(GATE_AND_UP)
    return Dimensions(
        num_blocks=_size(config, "num_blocks"),
        hidden=hidden,
        inner=inner,
        num_heads=heads,
        vocab=_size(config, "vocab"),
        longest=_size(config, "longest", _WITHOUT_LIMIT),
        inner_kept=(2 if has_gate else 0) + kept_by(str(_value(config, "activation"))) + kept,
        keeps_down_input=not has_gate and keeps_result(str(_value(config, "activation"))),
        kv_heads=_kv_heads(config, heads),
        attention=heads * width,
        more_kept=(3 + 2 * active) * hidden,
        kept_scores=scores,
        chunk_kept=state,
        more_masks=masks_of_windows(config),
    )


_DELTA: Final = "linear_attn."
_QWEN3_NEXT: Final = f"{_DELTA}in_proj_qkvz"
_QWEN3_5: Final = f"{_DELTA}in_proj_qkv"


def _state_values(config: Config, *, has_triangle: bool) -> int:
    """Values per token that a gated delta net keeps for backward without a kernel of its own.

    In transformers 4 (``has_triangle``) each head inverts a triangular matrix of a chunk row by row, and keeps what is
    above each row; in 5 it does not. Measured with heads of 32 to 128 and rows of 64 to 512 tokens: 1 to 15 % less.
    """
    heads = int(config.get("linear_num_value_heads") or 32)
    widths = int(config.get("linear_key_head_dim") or 128) + int(config.get("linear_value_head_dim") or 128)
    return heads * (has_triangle * CHUNK**2 // 3 + 5 * CHUNK + 13 * widths)


_WHOLE: Final = (
    *("word_embed_proj_dim", "expansion_ratio", "kv_n_heads", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)
_FACTORS: Final = ("logit_scale", "logits_scaling", "final_logit_softcapping")
_MAX_EXPERTS: Final = 1 << 17


def _problem_of_kinds(config: Config) -> str:
    """Say which further value that is read here is of a wrong kind; empty if none is."""
    attention = config.get("attn_config")
    values = {**config, **({"kv_n_heads": attention.get("kv_n_heads")} if isinstance(attention, dict) else {})}
    for key in _WHOLE:
        if (value := values.get(key)) is not None and (type(value) is not int or not 0 < value < 1 << 31):
            return f"{key} is {value!r}, it has to be a whole number above 0, below 2^31"
    for key in _FACTORS:
        value = values.get(key)
        is_factor = isinstance(value, int | float) and type(value) is not bool and 0 < value < math.inf
        if value is not None and not is_factor and (key, value) != ("logit_scale", "inv_sqrt_d_model"):
            return f"{key} is {value!r}, it has to be a number above 0"
    for size in _NEEDED:
        aliases = {key: config[key] for key in _KEYS[size] if config.get(key) is not None}
        if any(value != _value(config, size) for value in aliases.values()):
            return f"{' and '.join(f'{key} {value}' for key, value in aliases.items())} are one; make them equal"
    if type(values.get("pad_token_id")) not in (int, type(None)):
        return f"pad_token_id is {values['pad_token_id']!r}, it has to be a whole number"
    if type(values.get("tie_word_embeddings")) is not bool:
        return f"tie_word_embeddings is {values.get('tie_word_embeddings')!r}, it has to be true or false"
    experts = _size(config, "num_blocks") * _size(config, "experts")
    if experts > _MAX_EXPERTS and "is_moe" not in config:  # Doge's are rows of a table
        return f"{experts:,} experts in all blocks are more than {_MAX_EXPERTS:,}"
    return ""


def buffer_bytes(model_type: str, config: Config) -> int:
    """Bytes that a block holds besides its tensors: GPT-Neo's causal mask, a byte for each pair of positions."""
    return _size(config, "longest", _WITHOUT_LIMIT) ** 2 if model_type == "gpt_neo" else 0


def _problem(config: Config) -> str:
    for size in _KEYS:
        value = _value(config, size)
        if size == "activation" or (size == "shared" and value == 0 and type(value) is int):
            continue
        if value is None and size in _NEEDED:
            return f"it has none of {', '.join(_KEYS[size])}"
        if value is not None and (type(value) is not int or not 0 < value < 1 << 31):
            key = next(key for key in _KEYS[size] if config.get(key) is not None)
            return f"{key} is {value!r}, it has to be a whole number above 0, below 2^31"
    if problem := _problem_of_kinds(config):
        return problem
    heads, hidden = _size(config, "heads"), _size(config, "hidden")
    if heads % _kv_heads(config, heads):
        return f"{heads} heads can't share {_kv_heads(config, heads)} key-value heads evenly"
    if not _size(config, "head_width") and hidden % heads:
        return f"a width of {hidden} can't be shared by {heads} heads"
    if (base := config.get("rope_local_base_freq")) is not None:
        return (
            f"rotary positions have two bases, {config.get('rope_theta')} and {base} in blocks with a window; "
            "transformers 4 has one there"
        )
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "alpha" not in scaling and rope_type(config) == "dynamic":
        return "rope_scaling of type 'dynamic' depends on the longest text seen so far"
    return ""


def _gemma4_dimensions(layout: BlockLayout, kept: int, scores: int, config: Config) -> Dimensions:
    """As ``_dimensions``; heads of blocks without a window are wider, and experts are beside a feed-forward part."""
    is_double = config.get("use_double_wide_mlp") and config.get("num_kv_shared_layers")
    inner = _size(config, "inner") * (2 if is_double else 1)
    dimensions, blocks = _dimensions(layout, kept, scores, config), config.get("per_layer_config") or {}
    widths = [block.get("head_dim", 1) for block in blocks.values()] or [config.get("global_head_dim", 512)]
    experts = _size(config, "active") * _size(config, "expert_inner") if config.get("enable_moe_block") else 0
    dimensions = dataclasses.replace(
        dimensions,
        attention=max(dimensions.attention, dimensions.num_heads * max(widths)),
        inner=inner + experts,
        more_kept=dimensions.more_kept + (10 if experts else 2) * dimensions.hidden,  # norms of both parts; measured
    )
    return _with_passed(dimensions, gemma4_passed(config))


def _gemma3n_dimensions(layout: BlockLayout, kept: int, scores: int, config: Config) -> Dimensions:
    """As ``_dimensions`` with the widest feed-forward part, and what a block keeps of several hidden states."""
    dimensions, passed = _dimensions(layout, kept, scores, _with_widest(config)), gemma3n_passed(config)
    return _with_passed(dataclasses.replace(dimensions, more_kept=dimensions.more_kept + 5 * passed.hidden), passed)


def _with_passed(dimensions: Dimensions, passed: PassedValues | None) -> Dimensions:
    """Add what a graph keeps of both of its ends, and a block of its parts of one of them; measured."""
    if passed is None:
        return dimensions
    more = 2 * max(passed.entering) + passed.hidden + 2 * passed.inputs
    return dataclasses.replace(dimensions, more_kept=dimensions.more_kept + more)


def _with_widest(config: Config) -> Config:
    inner = config.get("intermediate_size")
    return {**config, "intermediate_size": max(inner)} if isinstance(inner, list) else config


def _gemma4_problem(config: Config) -> str:
    """As ``_problem``, and of heads of blocks without a window."""
    blocks = config.get("per_layer_config") or {"": {"head_dim": config.get("global_head_dim", 512)}}
    blocks = blocks if isinstance(blocks, dict) else {"": blocks}
    widths = [block.get("head_dim", 1) if isinstance(block, dict) else "" for block in blocks.values()]
    if any(type(width) is not int or not 0 < width < 1 << 31 for width in widths):
        return "per_layer_config or global_head_dim: head_dim has to be a whole number above 0"
    heads = [block.get("num_key_value_heads", 1) for block in blocks.values()]
    if any(type(number) is not int or not 0 < number < 1 << 31 for number in heads):
        return "per_layer_config: num_key_value_heads has to be a whole number above 0"
    if config.get("use_bidirectional_attention") == "all":
        return "use_bidirectional_attention: a decoder's tokens attend backwards only"
    return _problem(config) or gemma4_kinds_problem(config)


def _gemma3n_problem(config: Config) -> str:
    """As ``_problem``; feed-forward parts may have a width each, and both kinds of attention have rotary bases."""
    inner, key = config.get("intermediate_size"), "rope_local_base_freq"
    if isinstance(inner, list):
        if len(inner) != config.get("num_hidden_layers") or any(type(width) is not int for width in inner):
            return f"intermediate_size has to be a whole number, or one for each block, but is {inner}"
        config = {**config, "intermediate_size": min(inner)}
    return _problem({name: config[name] for name in config if name != key}) or gemma3n_kinds_problem(config)


def _gemma_owner_shapes(passed_of: Callable[[Config], PassedValues | None], config: Config) -> Shapes:
    """Return the shapes of the token table, and of what makes the inputs of all blocks."""
    hidden, passed = _size(config, "hidden"), passed_of(config)
    shapes: Shapes = {"embed_tokens.weight": (_size(config, "vocab"), hidden)}
    if passed is None or not passed.inputs:
        return shapes
    rows, together = int(config.get("vocab_size_per_layer_input") or 262144), passed.num_blocks * passed.inputs
    shapes |= {
        "embed_tokens_per_layer.weight": (rows, together),
        "per_layer_model_projection.weight": (together, hidden),
    }
    return shapes


def _llama4_dimensions(layout: BlockLayout, kept: int, scores: int, config: Config) -> Dimensions:
    """As ``_dimensions``; its class lets every expert read every token, besides one that is shared."""
    return _dimensions(layout, kept, scores, {**config, "num_experts_per_tok": _size(config, "experts", 16) + 1})


def _qwen2_moe_dimensions(layout: BlockLayout, kept: int, scores: int, config: Config) -> Dimensions:
    """As ``_dimensions``; every second one of the first ``max_window_layers`` blocks has the window."""
    first = config.get("max_window_layers", 28)
    return _dimensions(layout, kept, scores, {**config, "max_window_layers": min(first, 1)})


_LAYOUT: Final = dataclasses.replace(LLAMA.layout, swaps_lora=False, adds_residual=True)
_PLAIN: Final = dataclasses.replace(_LAYOUT, gate="")
_EXPERTS: Final = dataclasses.replace(_PLAIN, up="", down="", activation="", feed_forward_adapter="")
_GPT: Final[Mapping[str, Any]] = {
    "prefix": "transformer.",
    "blocks_path": "h",
    "owner_paths": ("wte", "wpe", "ln_f"),
    "head_paths": ("ln_f",),
    "embeddings_path": "wte",
}
_LORA: Final = ("lora",)
_BOTH: Final = ("bottleneck", "lora")


def _fused(attention: str, value: str, out: str, up: str, down: str, **changes: Any) -> BlockLayout:
    return dataclasses.replace(
        _PLAIN,
        attention=attention,
        query="",
        key="",
        value=f"{attention}.{value}",
        attention_out=f"{attention}.{out}",
        up=up,
        down=down,
        **changes,
    )


def _named(layout: BlockLayout, attention: str = "self_attn", **names: str) -> BlockLayout:
    """Replace names of a layout; those of query, key, value and attention_out are inside ``attention``."""
    inside = {
        role: f"{attention}.{names.get(role, getattr(layout, role).rpartition('.')[2])}"
        for role in ("query", "key", "value", "attention_out")
    }
    changes: dict[str, Any] = {"attention": attention, **names, **inside}
    return dataclasses.replace(layout, **changes)


def _with_delta(layout: BlockLayout, matrix: str, other: str) -> BlockLayout:
    """Add a gated delta net, which some blocks have instead of attention; ``other`` reads what ``matrix`` does."""
    return dataclasses.replace(layout, instead=(("value", matrix),), shared=((matrix, f"{_DELTA}{other}"),))


def _row(
    model_type: str,
    class_prefix: str,
    layout: BlockLayout = _LAYOUT,
    *,
    methods: tuple[str, ...] = _LORA,
    tied: bool = False,
    norm: str = "norm",
    kept: int = 0,
    problem: Callable[[Config], str] = _problem,
    dimensions: Callable[[BlockLayout, int, int, Config], Dimensions] = _dimensions,
    **changes: Any,
) -> Family:
    """Describe a decoder by what differs from Llama; ``norm`` is the last one, ``tied`` the class's default."""
    embeddings = changes.get("embeddings_path", "embed_tokens")
    replaced: dict[str, Any] = {
        "owner_paths": ("embed_tokens", norm),
        "head_paths": (norm,),
        "owner_shapes": lambda config: {
            f"{embeddings}.weight": (
                _size(config, "vocab"),
                int(config.get("word_embed_proj_dim") or _size(config, "hidden")),
            )
        },
        **changes,
    }
    return dataclasses.replace(
        LLAMA,
        model_type=model_type,
        architecture=f"{class_prefix}ForCausalLM",
        tasks=(CAUSAL_LM,),
        config_keys={},
        generic=True,
        packs=model_type not in _UNPACKED,
        divided=model_type in _DIVIDED,
        plugged=True,
        tied=tied,
        methods=methods,
        layout=layout,
        dimensions=functools.partial(dimensions, layout, kept, _SCORES.get(model_type, 0)),
        problem=problem,
        biased=lambda config: (),
        **replaced,
    )


_NEOX: Final = _fused("attention", "query_key_value", "dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_FALCON: Final = _fused("self_attention", "query_key_value", "dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_LATENT, _LATENT_DENSE = (
    dataclasses.replace(
        _named(layout, query="q_b_proj", key="kv_a_proj_with_mqa", value="kv_b_proj"),
        instead=(("query", "self_attn.q_proj"),),
        shared=(("self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj"),),
    )
    for layout in (_EXPERTS, _LAYOUT)
)
_CONVOLUTION: Final = (("value", "conv.in_proj"),)
_WORDS: Final[Mapping[str, Any]] = {
    "owner_paths": ("word_embeddings", "word_embeddings_layernorm", "ln_f"),
    "embeddings_path": "word_embeddings",
}
_GEMMA_OWNER: Final = (
    *("embed_tokens", "norm", "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
)
_FC: Final = _named(_PLAIN, attention_out="out_proj", up="fc1", down="fc2")
_UNPACKED: Final = (
    *("biogpt", "bloom", "codegen", "doge", "falcon", "gpt_neo", "gpt_oss", "gptj", "granitemoe", "granitemoeshared"),
    *("lfm2", "lfm2_moe", "mpt", "nemotron", "olmoe", "opt", "persimmon", "phimoe", "qwen2_moe", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_next", "stablelm", "xglm"),
)
"""``model_type`` of architectures with masks that do not follow the positions of packed rows."""
_SCORES: Final = {
    **dict.fromkeys(("bloom", "codegen", "diffllama", "doge", "falcon", "gpt_neo", "gpt_oss", "gptj", "mpt"), 1),
    **dict.fromkeys(("vaultgemma", "xglm"), 2),
}
"""``model_type`` -> score tensors that attention keeps where it is not fused; measured."""
NOT_ROUNDED: Final = ("deberta", "deepseek_v3", "dots1", "glm4_moe")
"""``model_type`` whose attention or experts fail where products are rounded to bfloat16."""
_DIVIDED: Final = (
    *("apertus", "arcee", "cohere2", "cwm", "ernie4_5", "exaone4", "granite", "helium", "hunyuan_v1_dense", "jais2"),
    *("ministral", "ministral3", "nanochat", "olmo", "phi", "seed_oss", "starcoder2", "vaultgemma"),
)
"""``model_type`` of architectures that count heads by the width of what matrices give, with norms of single heads."""
GENERIC: Final = (
    _row("apertus", "Apertus", _PLAIN, kept=3),
    _row("arcee", "Arcee", _PLAIN, methods=_BOTH),
    _row("aria_text", "AriaText", _EXPERTS),
    _row(
        "biogpt",
        "BioGpt",
        _FC,
        prefix="biogpt.",
        tied=True,
        owner_paths=("embed_tokens", "embed_positions", "layer_norm"),
        head_paths=("layer_norm",),
        head="output_projection",
    ),
    _row("bitnet", "BitNet", kept=1),
    _row("bloom", "Bloom", _FALCON, tied=True, **{**_GPT, **_WORDS}),
    _row(
        "codegen",
        "CodeGen",
        _fused("attn", "qkv_proj", "out_proj", "mlp.fc_in", "mlp.fc_out"),
        head_bias=True,
        joined=True,
        **_GPT,
    ),
    _row("cohere", "Cohere", tied=True, joined=True),
    _row("cohere2", "Cohere2", tied=True, joined=True),
    _row("cwm", "Cwm", since=5),
    _row("deepseek_v2", "DeepseekV2", _LATENT, apart=True),
    _row("deepseek_v3", "DeepseekV3", _LATENT, apart=True),
    _row("diffllama", "DiffLlama", methods=_BOTH),
    _row("doge", "Doge"),
    _row("dots1", "Dots1", _EXPERTS),
    _row("ernie4_5", "Ernie4_5", methods=_BOTH, tied=True),
    _row("ernie4_5_moe", "Ernie4_5_Moe", _EXPERTS, tied=True),
    _row("exaone4", "Exaone4"),
    _row("exaone_moe", "ExaoneMoe", _EXPERTS, since=5),
    _row("falcon", "Falcon", _FALCON, tied=True, joined=True, **{**_GPT, **_WORDS}),
    _row("flex_olmo", "FlexOlmo", _EXPERTS),
    _row(
        "gemma3n_text",
        "Gemma3n",
        dataclasses.replace(
            _LAYOUT,
            optional=("key", "value"),
            shared=tuple((f"self_attn.{name}_proj", "laurel.linear_left") for name in "qkv"),
        ),
        tied=True,
        since=5,  # transformers 4 shares no keys and values in a forward without a cache, which is another model
        problem=_gemma3n_problem,
        dimensions=_gemma3n_dimensions,
        owner_paths=(*_GEMMA_OWNER, "altup_projections", "altup_unembed_projections"),
        head_paths=("norm", "altup_unembed_projections"),
        owner_shapes=functools.partial(_gemma_owner_shapes, gemma3n_passed),
        passed=gemma3n_passed,
        unread=gemma3n_unread,
    ),
    _row(
        "gemma4_text",
        "Gemma4",
        dataclasses.replace(_LAYOUT, optional=("key", "value")),
        tied=True,
        since=5,
        problem=_gemma4_problem,
        dimensions=_gemma4_dimensions,
        owner_paths=_GEMMA_OWNER,
        owner_shapes=functools.partial(_gemma_owner_shapes, gemma4_passed),
        passed=gemma4_passed,
        unread=gemma4_unread,
        refused={key: reason for key, reason in LLAMA.refused.items() if key != "per_layer_config"},
    ),
    _row("glm", "Glm", _named(_PLAIN, up="mlp.gate_up_proj")),
    _row("glm4", "Glm4", _named(_PLAIN, up="mlp.gate_up_proj")),
    _row("glm4_moe", "Glm4Moe", _EXPERTS),
    _row("glm4_moe_lite", "Glm4MoeLite", _LATENT, apart=True, since=5),
    _row("gpt_bigcode", "GPTBigCode", _fused("attn", "c_attn", "c_proj", "mlp.c_fc", "mlp.c_proj"), tied=True, **_GPT),
    _row(
        "gpt_neo",
        "GPTNeo",
        _named(_PLAIN, "attn.attention", attention_out="out_proj", up="mlp.c_fc", down="mlp.c_proj"),
        tied=True,
        **_GPT,
    ),
    _row(
        "gpt_neox",
        "GPTNeoX",
        _NEOX,
        prefix="gpt_neox.",
        owner_paths=("embed_in", "final_layer_norm"),
        head_paths=("final_layer_norm",),
        embeddings_path="embed_in",
        head="embed_out",
    ),
    _row("gpt_oss", "GptOss", _EXPERTS, kept=3),
    _row(
        "gptj",
        "GPTJ",
        _named(_PLAIN, "attn", attention_out="out_proj", up="mlp.fc_in", down="mlp.fc_out"),
        head_bias=True,
        joined=True,
        **_GPT,
    ),
    _row("granite", "Granite", methods=_BOTH),
    _row("granitemoe", "GraniteMoe", _EXPERTS),
    _row("granitemoeshared", "GraniteMoeShared", _EXPERTS),
    _row("helium", "Helium", methods=_BOTH),
    _row("hunyuan_v1_dense", "HunYuanDenseV1", methods=_BOTH),
    _row("hunyuan_v1_moe", "HunYuanMoEV1", _EXPERTS, kept=3),
    _row("hy_v3", "HYV3", _EXPERTS, since=5),
    _row("jais2", "Jais2", _PLAIN, since=5),
    _row(
        "lfm2",
        "Lfm2",
        dataclasses.replace(
            _named(_LAYOUT, attention_out="out_proj", up="feed_forward.w3", gate="feed_forward.w1"),
            down="feed_forward.w2",
            instead=_CONVOLUTION,
        ),
        tied=True,
        norm="embedding_norm",
    ),
    _row(
        "lfm2_moe",
        "Lfm2Moe",
        dataclasses.replace(_named(_EXPERTS, attention_out="out_proj"), instead=_CONVOLUTION),
        tied=True,
        norm="embedding_norm",
        since=5,
    ),
    _row("llama4_text", "Llama4", _EXPERTS, dimensions=_llama4_dimensions),
    _row("mellum", "Mellum", _EXPERTS, since=5),
    _row("mimo_v2_flash", "MiMoV2Flash", _EXPERTS, since=5),
    _row("minicpm3", "MiniCPM3", _LATENT_DENSE, apart=True, tied=True, since=5),
    _row("minimax_m2", "MiniMaxM2", _EXPERTS, since=5, kept=1),
    _row("ministral", "Ministral", methods=_BOTH),
    _row("ministral3", "Ministral3", since=5),
    _row("mixtral", "Mixtral", _EXPERTS),
    _row(
        "mpt",
        "Mpt",
        _fused("attn", "Wqkv", "out_proj", "ffn.up_proj", "ffn.down_proj"),
        tied=True,
        prefix="transformer.",
        blocks_path="blocks",
        owner_paths=("wte", "norm_f"),
        head_paths=("norm_f",),
        embeddings_path="wte",
    ),
    _row("nanochat", "NanoChat", _named(_PLAIN, up="mlp.fc1", down="mlp.fc2"), since=5),
    _row("nemotron", "Nemotron", _PLAIN, methods=_BOTH),
    _row("olmo", "Olmo", methods=_BOTH),
    _row("olmo2", "Olmo2"),
    _row("olmo3", "Olmo3"),
    _row("olmoe", "Olmoe", _EXPERTS),
    _row(
        "opt",
        "OPT",
        _FC,
        tied=True,
        blocks_path="decoder.layers",
        owner_paths=(
            "decoder.embed_tokens",
            "decoder.embed_positions",
            "decoder.project_in",
            "decoder.final_layer_norm",
            "decoder.project_out",
        ),
        head_paths=("decoder.final_layer_norm", "decoder.project_out"),
        unfitted=("up", "down"),
        embeddings_path="decoder.embed_tokens",
    ),
    _row(
        "persimmon",
        "Persimmon",
        _fused("self_attn", "query_key_value", "dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norm="final_layernorm",
    ),
    _row(
        "phi",
        "Phi",
        _named(_PLAIN, attention_out="dense", up="mlp.fc1", down="mlp.fc2"),
        norm="final_layernorm",
        head_bias=True,
        joined=True,
    ),
    _row("phi3", "Phi3", _fused("self_attn", "qkv_proj", "o_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    _row("phimoe", "Phimoe", _EXPERTS),
    _row("qwen2_moe", "Qwen2Moe", _EXPERTS, dimensions=_qwen2_moe_dimensions),
    _row("qwen3_moe", "Qwen3Moe", _EXPERTS),
    _row("qwen3_5_moe_text", "Qwen3_5Moe", _with_delta(_EXPERTS, _QWEN3_5, "in_proj_z"), since=5),
    _row("qwen3_5_text", "Qwen3_5", _with_delta(_LAYOUT, _QWEN3_5, "in_proj_z"), since=5),
    _row("qwen3_next", "Qwen3Next", _with_delta(_EXPERTS, _QWEN3_NEXT, "in_proj_ba")),
    _row("seed_oss", "SeedOss", methods=_BOTH),
    _row("solar_open", "SolarOpen", _EXPERTS, since=5),
    _row("stablelm", "StableLm", joined=True),
    _row("starcoder2", "Starcoder2", _named(_PLAIN, up="mlp.c_fc", down="mlp.c_proj"), methods=_BOTH, tied=True),
    _row("vaultgemma", "VaultGemma", tied=True),
    _row("xglm", "XGLM", _FC, tied=True, norm="layer_norm"),
    _row("youtu", "Youtu", _LATENT_DENSE, apart=True, tied=True, since=5),
)
"""Families in the order of their ``model_type``."""
