"""Models in GGUF files, written with the package ``gguf``, and the same values as safetensors, widened by that package.

Nothing of the code that reads them is used here: names, order of rows and numbers are the package's or done by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from ringtune.models.folder import with_old_rope

Array = np.ndarray[Any, Any]
ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
K_TYPES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Types that the package can't make, with the offsets of a block's float16 scales."""
SPREAD = 0.3


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Array:
    """Bytes of valid blocks with numbers of about ``SPREAD``, (rows, bytes of a row)."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (rows * columns // numbers, nbytes), dtype=np.uint8)
    for at in K_TYPES[kind]:
        scales = (SPREAD / 500 * rng.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def turned(values: Array, heads: int) -> Array:
    """Rows as llama.cpp has them: the two halves of each head take turns."""
    width = len(values) // heads
    pairs = [(head, pair) for head in range(heads) for pair in range(width // 2)]
    return values[[head * width + half * (width // 2) + pair for head, pair in pairs for half in (0, 1)]]


def turned_back(values: Array, heads: int) -> Array:
    """The rows in the order before ``turned``."""
    found = np.empty_like(values)
    found[turned(np.arange(len(values)), heads)] = values
    return found


def facts_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keys of the metadata that llama.cpp needs."""
    config = with_old_rope(config)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
    }
    if name in ("gemma2", "gemma3_text"):
        found["attention.sliding_window"] = config["sliding_window"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            found[key] = float(config[key])
    return found


def write_gguf(
    folder: Path, target: Path, kind_of: Callable[[str], str], *, more: Callable[[gguf.GGUFWriter], None] | None = None
) -> dict[str, torch.Tensor]:
    """Write a model folder as one GGUF file."""
    config, rng = json.loads((folder / "config.json").read_text()), np.random.default_rng(0)
    model_type = config["model_type"]
    architecture = ARCHITECTURES.get(model_type, model_type)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(target, architecture)
    for key, value in facts_of(config, model_type).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    if more is not None:
        more(writer)
    found: dict[str, torch.Tensor] = {}
    is_turned, adds_one = model_type in ("llama", "mistral", "smollm3"), model_type.startswith("gemma")
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key.startswith("lm_head.") and config["tie_word_embeddings"]:
            continue
        full = key if key.startswith(("model.", "lm_head.")) else f"model.{key}"
        name, values = names.get_name(full, try_suffixes=(".weight", ".bias")) or "", tensor.float().numpy()
        part = next((part for part in ("q", "k") if f".{part}_proj." in key), "") if is_turned else ""
        heads = config["num_attention_heads" if part == "q" else "num_key_value_heads"]
        values = turned(values, heads) if part else values
        values = values + 1 if adds_one and key.endswith("norm.weight") else values
        kind = kind_of(name) if values.ndim == 2 else "F32"
        kind = "F16" if values.shape[-1] % gguf.GGML_QUANT_SIZES[Kind[kind]][0] else kind
        if kind in K_TYPES:
            data = random_blocks(kind, values.shape[0], values.shape[1], rng)
        else:
            data = quantize(np.ascontiguousarray(values), Kind[kind])
        writer.add_tensor(name, data, raw_dtype=Kind[kind])
        meant = dequantize(data, Kind[kind]).reshape(values.shape)
        meant = meant - 1 if adds_one and key.endswith("norm.weight") else meant
        found[key] = torch.from_numpy(np.ascontiguousarray(turned_back(meant, heads) if part else meant))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def write_base(folder: Path, target: Path, kind_of: Callable[[str], str]) -> tuple[Path, Path]:
    """Write a folder with one GGUF file beside config and tokenizer, and one with the same values in float32."""
    blocks, plain = target / "blocks", target / "plain"
    for made in (blocks, plain):
        shutil.copytree(folder, made)
    (blocks / "model.safetensors").unlink()
    tensors = write_gguf(folder, blocks / "model.gguf", kind_of)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return blocks, plain


def add_tokenizer(writer: gguf.GGUFWriter, *, model: str, tokens: list[str], kinds: list[int], **more: Any) -> None:
    """Add a tokenizer; ``more`` are its further keys."""
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    adders: dict[str, Callable[[Any], None]] = {
        "merges": writer.add_token_merges,
        "scores": writer.add_token_scores,
        "pre": writer.add_tokenizer_pre,
    }
    for key, value in more.items():
        adders[key](value)
