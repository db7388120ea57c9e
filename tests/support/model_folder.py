"""Writes tiny model folders by bytes, so that reading them is tested without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtune.models.families import FAMILIES
from ringtune.models.folder import read_config

WIDTHS = {"F32": 4, "F16": 2, "I64": 8, "U8": 1}
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 20,
    "max_position_embeddings": 32,
}
BLOCK_WEIGHTS = 4 * (8 * 8 + 8) + 2 * (8 + 8) + (16 * 8 + 16) + (8 * 16 + 8)
OWNER_WEIGHTS = (20 + 32 + 2) * 8 + 16 + (8 * 8 + 8)


def bert_shapes(
    *, prefix: str = "", pooler: bool = True, config: Mapping[str, int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a BERT file that fits ``CONFIG`` with these changes, independently of the code under test."""
    values = {**CONFIG, **(config or {})}
    width, inner = values["hidden_size"], values["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (values["vocab_size"], width),
        "embeddings.position_embeddings.weight": (values["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
    }
    for block in range(values["num_hidden_layers"]):
        at = f"encoder.layer.{block}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{at}.{name}.weight": (width, width), f"{at}.{name}.bias": (width,)}
        shapes |= {f"{at}.intermediate.dense.weight": (inner, width), f"{at}.intermediate.dense.bias": (inner,)}
        shapes |= {f"{at}.output.dense.weight": (width, inner), f"{at}.output.dense.bias": (width,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{at}.{name}.weight": (width,), f"{at}.{name}.bias": (width,)}
    if pooler:
        shapes |= {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def safetensors_bytes(shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "F32", fill: int = 0) -> bytes:
    """A valid file of constant tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return with_header(header, bytes([fill]) * at)


def with_header(header: Any, data: bytes) -> bytes:
    """A file from any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_model(folder: Path, *, config: Mapping[str, Any] | None = None, weights: bytes | None = None) -> Path:
    """A model folder with this config beside ``CONFIG``'s values, and these weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(bert_shapes()) if weights is None else weights)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def write_any_family(folder: Path, values: Mapping[str, Any]) -> Path:
    """A model folder of any family with these values of ``config.json``, and weights that fit them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text("{}")
    config = read_config(folder)
    family = FAMILIES[config["model_type"]]
    blocks = range(family.dimensions(config).num_blocks)
    inside = family.block_shapes(config)
    shapes = {f"{family.block_prefix}{block}.{name}": shape for block in blocks for name, shape in inside.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(family.owner_shapes(config) | shapes))
    return folder
