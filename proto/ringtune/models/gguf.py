"""Models in GGUF files: names and forms of tensors, config and tokenizer as transformers has them, and their folder.

A GGUF file has everything in one: this module makes of it a *folder* as any other model's, in a cache, with
``config.json``, ``tokenizer.json``, ``tokenizer_config.json`` and a link to the file. Weights are never copied or
converted: a tensor's type says how its bytes are read (``ringtune.storage.gguf``). Files of a tokenizer beside the GGUF
file take the place of those that are made from it.

A key of the model's architecture that is not known is refused, unless it is empty: it may change numbers. Rope factors
of Llama 3 are a tensor in GGUF; the settings that give them are found again, and compared with it.

Source: the GGUF specification; llama.cpp's loaders (``llama-model.cpp``, ``llama-vocab.cpp``); transformers 4.57,
``convert_slow_tokenizer`` (merges from the scores of pieces).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from platformdirs import user_cache_path

from ringtune.errors import ModelError
from ringtune.models.tokenizer import SETTINGS_FILE, TEMPLATE_FILE, WHOLE_FILE
from ringtune.storage.durable import make_folder, storage_errors, write_durably
from ringtune.storage.gguf import SUFFIX, GgufHeader, GgufType, is_gguf, read_gguf_header
from ringtune.storage.strict import json_digest
from ringtune.storage.tensor_files import TensorInfo
from ringtune.texts import shown

INTERLEAVED: Final = ("llama", "mistral", "smollm3", "granite")
"""``model_type`` of models of which llama.cpp has the halves of each head of query and key interleaved."""
ADDS_ONE: Final = ("gemma", "gemma2", "gemma3_text")
"""``model_type`` of models to whose norms llama.cpp adds 1."""
LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3_text": 62}
"""Blocks of the model of 27 billion parameters, whose scores llama.cpp scales by hidden width over heads."""

_MODEL_TYPES: Final = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
}
"""``general.architecture`` -> ``model_type``; Mistral's is llama."""

_FOUR_NORMS: Final = ("gemma2", "gemma3_text")
_OUTSIDE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_INSIDE_FOUR_NORMS: Final = _INSIDE | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_BLOCK: Final = re.compile(r"blk\.(?P<block>0|[1-9][0-9]{0,4})\.(?P<name>[a-z_]+)\.(?P<end>weight|bias)")


def only_gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder; None without one; raises ``ModelError``."""
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("mmproj"))
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:4])
        raise ModelError(f"{folder} has {len(files)} GGUF files ({names}); name one of them as model.path")
    return files[0] if files else None


def gguf_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a GGUF file by their names in transformers; types are texts of ``GgufType``."""
    status = path.stat() if path.exists() else None
    return dict(_tensors_of(path, status.st_mtime_ns if status else 0, status.st_size if status else 0))


@functools.lru_cache(maxsize=4)
def _tensors_of(path: Path, changed_ns: int, size_bytes: int) -> Mapping[str, TensorInfo]:
    header = read_gguf_header(path)
    model_type = _model_type(path, header)
    infos: dict[str, TensorInfo] = {}
    for name, tensor in header.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        key = _name_of(path, name, model_type)
        part = next((part for part in ("q", "k") if f".self_attn.{part}_proj." in key), "")
        heads = 0
        if model_type in INTERLEAVED and part:
            count_key = "attention.head_count" + ("_kv" if part == "k" else "")
            heads = _value(path, header, count_key, int, _value(path, header, "attention.head_count", int))
        added = model_type in ADDS_ONE and key.endswith("norm.weight")
        kind = GgufType(tensor.kind, heads, added)
        if kind.nbytes(tensor.shape) is None:
            raise ModelError(f"{path}: tensor {name} of shape {tensor.shape} can't have {heads} heads")
        infos[key] = TensorInfo(str(kind), tensor.shape, tensor.nbytes, tensor.offset)
    return infos


def _name_of(path: Path, name: str, model_type: str) -> str:
    inside = _INSIDE_FOUR_NORMS if model_type in _FOUR_NORMS else _INSIDE
    if (match := _BLOCK.fullmatch(name)) and match["name"] in inside:
        return f"model.layers.{match['block']}.{inside[match['name']]}.{match['end']}"
    stem, _, end = name.rpartition(".")
    if stem in _OUTSIDE and end == "weight":
        return f"{_OUTSIDE[stem]}.weight"
    raise ModelError(f"{path}: tensor {shown(name)} has no place in a {model_type}; take a file of a plain text model")


def _model_type(path: Path, header: GgufHeader) -> str:
    if (count := header.values.get("split.count", 1)) not in (0, 1):
        raise ModelError(f"{path} is one of {shown(str(count))} parts; make one file with llama-gguf-split --merge")
    name = header.values.get("general.architecture")
    if not isinstance(name, str) or name not in _MODEL_TYPES:
        what = shown(str(name))
        raise ModelError(
            f"{path} is a model of the architecture {what}; as GGUF files {', '.join(_MODEL_TYPES)} can be trained, "
            "others as a folder with config.json and model.safetensors"
        )
    return _MODEL_TYPES[name]


_FACTS: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
_FLOATS: Final = ("rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping", "rope_theta")
_READ: Final = (
    *("rope.dimension_count", "attention.value_length", "vocab_size", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.finetuned"),
)
_YARN: Final = {
    "rope.scaling.original_context_length": ("original_max_position_embeddings", int),
    "rope.scaling.yarn_beta_fast": ("beta_fast", float),
    "rope.scaling.yarn_beta_slow": ("beta_slow", float),
}
_NO_ATTENTION_FACTOR: Final = ("rope.scaling.attn_factor", 1.0)
"""llama.cpp multiplies YaRN's own factor by it, transformers takes another one in its place."""
_LLAMA_3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA_3_FACTORS: Final = (8.0, 32.0)
_TOLERANCE: Final = 1e-4


def gguf_config(path: Path) -> dict[str, Any]:
    """Return the content of ``config.json`` for a GGUF file; ``ringtune.models.folder.read_config`` checks it."""
    header = read_gguf_header(path)
    model_type, values, tensors = _model_type(path, header), header.values, header.tensors
    prefix = f"{values['general.architecture']}."
    facts = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    if unknown := sorted(
        key
        for key, value in facts.items()
        if key not in (*_FACTS, *_READ) and value not in (0, "", []) and (key, value) != _NO_ATTENTION_FACTOR
    ):
        raise ModelError(
            f"{path}: {', '.join(shown(prefix + key) for key in unknown[:8])}: not known, and may change numbers; take "
            "a file of a plain text model"
        )
    config: dict[str, Any] = {"model_type": model_type}
    for key, name in _FACTS.items():
        kind = float if name in _FLOATS else int
        if key in facts:
            value = _value(path, header, key, kind)
            config[name] = float(f"{value:.7g}") if kind is float else value  # of float32: 1e-05, not 9.99999974e-06
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{path} has no tensor token_embd.weight with a row for each token; take another file")
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    for required in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"):
        if required not in config:
            key = next(key for key, name in _FACTS.items() if name == required)
            raise ModelError(f"{path} has no {prefix}{key}, which a model needs; take another file")
    heads = config["num_attention_heads"]
    if heads < 1:
        raise ModelError(f"{path} has {heads} heads; take another file")
    config.setdefault("num_key_value_heads", heads)
    width = config.get("head_dim", config["hidden_size"] // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if facts.get(key, width) != width:
            raise ModelError(f"{path}: {prefix}{key} is {facts[key]}, only {width}, the width of a head, is supported")
    if config.get("head_dim", 0) * heads == config["hidden_size"] and model_type in ("llama", "qwen2", "smollm3"):
        del config["head_dim"]
    if model_type in LARGEST_GEMMA:
        largest = config["num_hidden_layers"] == LARGEST_GEMMA[model_type]
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if largest else config.get("head_dim", 256)
    if scaling := _rope_scaling(path, header, config, facts):
        config["rope_scaling"] = scaling
    config["pad_token_id"] = None
    for name in ("bos", "eos", "padding"):
        number = values.get(f"tokenizer.ggml.{name}_token_id")
        if type(number) is int and 0 <= number < config["vocab_size"]:
            config[f"{'pad' if name == 'padding' else name}_token_id"] = number
    return config


def _value(path: Path, header: GgufHeader, key: str, kind: type, default: Any = None) -> Any:
    full = f"{header.values['general.architecture']}.{key}"
    value = header.values.get(full, default)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        text = "a list" if value is None and full in header.values else shown(str(value))
        raise ModelError(f"{path}: {full} has to be one {kind.__name__}, but is {text}; take another file")
    return value


def _rope_scaling(
    path: Path, header: GgufHeader, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    kind = facts.get("rope.scaling.type", "linear")  # llama.cpp's where only a factor is named
    if _ROPE_FACTORS in header.tensors:
        return _scaling_of_factors(path, header, config)
    if kind not in ("none", "", "linear", "yarn"):
        raise ModelError(
            f"{path}: rope.scaling.type is {shown(str(kind))}; known are linear and yarn; take another file"
        )
    factor = _value(path, header, "rope.scaling.factor", float, 1.0)
    if kind in ("none", "") or factor in (0, 1):
        return {}
    if factor < 0:
        raise ModelError(f"{path}: rope.scaling.factor is {factor:g}, it has to be above 0; take another file")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {name: _value(path, header, key, type_) for key, (name, type_) in _YARN.items() if key in facts}
    return scaling


def _scaling_of_factors(path: Path, header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the settings of Llama 3's scaling that give the factors in the file."""
    tensor = header.tensors[_ROPE_FACTORS]
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise ModelError(f"{path}: tensor {_ROPE_FACTORS} is no vector of float32; take another file")
    with path.open("rb") as file:
        file.seek(tensor.offset)
        factors = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.nbytes))
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = config.get("rope_theta", 10000.0)
    can_be = base > 0 and len(range(0, width, 2)) == len(factors) and all(0 < factor < math.inf for factor in factors)
    for factor in (float(f"{max(factors):.7g}"), *_LLAMA_3_FACTORS) if can_be else ():
        scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA_3}
        expected = rope_factors(scaling, width=width, base=base)
        if all(math.isclose(*pair, rel_tol=_TOLERANCE) for pair in zip(expected, factors, strict=True)):
            return scaling
    raise ModelError(f"{path}: tensor {_ROPE_FACTORS} is not that of a Llama 3; take the model as safetensors")


def rope_factors(scaling: Mapping[str, Any], *, width: int, base: float) -> list[float]:
    """Divisors of the frequencies in Llama 3's scaling: 1 for short waves, ``factor`` for long ones."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    trained, factors = scaling["original_max_position_embeddings"], []
    for pair in range(0, width, 2):
        turns = trained / (2 * math.pi * base ** (pair / width))
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - share) / factor + share))
    return factors


# ---- tokenizer -----------------------------------------------------------------------------------

GPT2_SPLIT: Final = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
_LATER_SPLIT: Final = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_TEKKEN_SPLIT: Final = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
SPLITS: Final[Mapping[tuple[tuple[str, ...], bool], str]] = {
    ((GPT2_SPLIT,), False): "gpt-2",
    (("\\p{N}", GPT2_SPLIT), False): "smollm",
    ((_LATER_SPLIT % "{1,3}",), True): "llama-bpe",
    ((_LATER_SPLIT % "{1,3}",), False): "dbrx",
    ((_LATER_SPLIT % "",), False): "qwen2",
    ((_TEKKEN_SPLIT,), True): "tekken",
}
"""Expressions that split a text into words, and whether a word that is a token is not merged -> llama.cpp's name."""

_BEGINS: Final = ("llama-bpe", "tekken")
_LISTS: Final = ("tokens", "scores", "token_type", "merges")
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_BLANK: Final = "\u2581"


def gguf_tokenizer(path: Path) -> dict[str, dict[str, Any]]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` of a GGUF file, by file name."""
    header = read_gguf_header(path, lists=[f"tokenizer.ggml.{name}" for name in _LISTS])
    prefix = "tokenizer.ggml."
    facts = {key.removeprefix(prefix): value for key, value in header.values.items() if key.startswith(prefix)}
    tokens, kinds = facts.get("tokens"), facts.get("token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise _no_tokenizer(path, "it has no list of tokens")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [1] * len(tokens)
    is_pieces = facts.get("model") == "llama"
    if not is_pieces and facts.get("model") != "gpt2":
        raise _no_tokenizer(path, f"it is of the kind {shown(str(facts.get('model')))}; known are llama and gpt2")
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if kinds[index] != _UNUSED:
            vocab.setdefault(token, index)
    ids: dict[str, Any] = {name: facts.get(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    named = {name: tokens[index] for name, index in ids.items() if _is_token(index, tokens, vocab)}
    special = {*named.values(), *(token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL)}
    added: list[dict[str, Any]] = [
        {
            "id": index,
            "content": token,
            "special": token in special,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for token, index in vocab.items()
        if token in special or kinds[index] in (_UNKNOWN, _USER_DEFINED)
    ]
    split = str(facts.get("pre", "default"))
    whole = _pieces(path, facts, vocab) if is_pieces else _words(path, facts, vocab, split)
    begins = facts.get("add_bos_token", is_pieces or split in _BEGINS) is True and "bos" in named
    ends = facts.get("add_eos_token", False) is True and "eos" in named
    whole |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "post_processor": _around(named["bos"] if begins else "", named["eos"] if ends else "", vocab),
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{name}_token": named[name] for name in ("bos", "eos") if name in named}
    settings |= {"unk_token": named["unknown"]} if "unknown" in named else {}
    settings |= {"pad_token": named["padding"]} if "padding" in named else {}
    templates = {
        key.rpartition(".")[2]: text
        for key, text in header.values.items()
        if key.startswith("tokenizer.chat_template") and isinstance(text, str)
    }
    if "chat_template" in templates:
        templates["default"] = templates.pop("chat_template")
    if templates:
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        settings["chat_template"] = templates["default"] if list(templates) == ["default"] else listed
    return {WHOLE_FILE: whole, SETTINGS_FILE: settings}


def _words(path: Path, facts: Mapping[str, Any], vocab: dict[str, int], split: str) -> dict[str, Any]:
    """Make normalizer, divider, model and decoder of a byte-level tokenizer."""
    known = {name: (expressions, whole) for (expressions, whole), name in SPLITS.items()}
    if split not in known:
        raise _no_tokenizer(path, f"it divides texts as {shown(split)}; known are {', '.join(known)}")
    if not isinstance(facts.get("merges"), list):
        raise _no_tokenizer(path, "it has no list of merges")
    expressions, is_whole = known[split]
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": is_whole}
    return {
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "model": {**model, "vocab": vocab, "merges": facts["merges"]},
        "decoder": byte_level,
    }


def _pieces(path: Path, facts: Mapping[str, Any], vocab: dict[str, int]) -> dict[str, Any]:
    """Make normalizer, divider, model and decoder of a tokenizer of pieces with scores."""
    scores = facts.get("scores")
    if not isinstance(scores, list) or len(scores) < len(facts["tokens"]):
        raise _no_tokenizer(path, "it has no scores of its pieces")
    index = facts.get("unknown_token_id", 0)
    unknown = facts["tokens"][index] if _is_token(index, facts["tokens"], vocab) else None
    has_blank = facts.get("add_space_prefix", True) is not False
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _BLANK}] if has_blank else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _BLANK})
    model = {"type": "BPE", "dropout": None, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
    ]
    back += [{"type": "Fuse"}, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_blank else [])]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "model": {**model, "vocab": vocab, "merges": [list(pair) for pair in _merges(path, vocab, scores)]},
        "decoder": {"type": "Sequence", "decoders": back},
    }


def _is_token(index: Any, tokens: list[str], vocab: Mapping[str, int]) -> bool:
    return type(index) is int and 0 <= index < len(tokens) and tokens[index] in vocab


def _merges(path: Path, vocab: Mapping[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of pieces that make a piece, those of the highest score first."""
    merges: list[tuple[float, str, str]] = []
    for piece, index in vocab.items():
        pairs = [
            (piece[:at], piece[at:])
            for at in range(1, min(len(piece), _MAX_PIECE))
            if piece[:at] in vocab and piece[at:] in vocab
        ]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[index], *pair) for pair in pairs]
        if len(merges) > _MAX_MERGES:
            raise _no_tokenizer(path, f"its pieces are made of others in more than {_MAX_MERGES:,} ways")
    merges.sort(key=lambda entry: (entry[0], len(entry[1]), len(entry[2])), reverse=True)
    return ((first, second) for _, first, second in merges)


_MAX_PIECE: Final = 256
_MAX_MERGES: Final = 1 << 22
"""Seven times those of Gemma's 262,144 pieces."""


def _around(begin: str, end: str, vocab: Mapping[str, int]) -> dict[str, Any] | None:
    if not (begin or end):
        return None
    first = [{"SpecialToken": {"id": begin, "type_id": 0}}] if begin else []
    last = [{"SpecialToken": {"id": end, "type_id": 0}}] if end else []

    def text(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    return {
        "type": "TemplateProcessing",
        "single": [*first, text("A", 0), *last],
        "pair": [*first, text("A", 0), *last, *first, text("B", 1), *last],
        "special_tokens": {
            token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in (begin, end) if token
        },
    }


def _no_tokenizer(path: Path, what: str) -> ModelError:
    return ModelError(f"{path}: its tokenizer can't be read: {what}; put the model's {WHOLE_FILE} beside the file")


# ---- folder --------------------------------------------------------------------------------------

_CONFIG_FILE: Final = "config.json"
_MODEL_LINK: Final = "model.gguf"
_TOKENIZER: Final = (WHOLE_FILE, SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE)
_VERSION: Final = 1


def folder_of_gguf(path: Path, cache: Path | None = None) -> Path:
    """Return the folder of a model for ``path``: itself unless it is a GGUF file, or a folder with nothing else."""
    is_folder = path.is_dir()
    if is_folder and (path / _CONFIG_FILE).exists():
        return path
    is_file = path.is_file() and (path.suffix == SUFFIX or is_gguf(path))
    file = only_gguf_file(path) if is_folder else path if is_file else None
    if file is None or any(path.glob("*.safetensors")):
        return path
    file = file.resolve()
    beside = [file.with_name(name) for name in _TOKENIZER] if file.with_name(WHOLE_FILE).is_file() else []
    sources = [source for source in (file, *beside) if source.is_file()]
    states = [(str(source), source.stat().st_mtime_ns, source.stat().st_size) for source in sources]
    name = path.resolve().name if is_folder else file.stem
    target = (cache or user_cache_path("ringtune")) / "gguf" / json_digest([_VERSION, states])[:32] / name
    with storage_errors(target):
        if (target / _CONFIG_FILE).is_file():  # written last
            return target
        contents = {source.name: source.read_bytes() for source in sources[1:]}
        config, made = gguf_config(file), {} if beside else gguf_tokenizer(file)
        for file_name, content in {**made, _CONFIG_FILE: config}.items():
            contents[file_name] = (json.dumps(content, ensure_ascii=False) + "\n").encode()
        make_folder(target)
        with contextlib.suppress(FileExistsError):
            (target / _MODEL_LINK).symlink_to(file)
        for file_name, data in contents.items():
            write_durably(target / file_name, data)
    return target
