"""Tiny models of texts and pictures, in the layouts of tensors that files have, and the text model inside."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support import tiny
from tests.support.tiny_families import GENERIC, HIDDEN, LONGEST, write_tokenizer

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "intermediate_size": 24}
_TEXT: dict[str, Any] = {
    "vocab_size": len(tiny.vocabulary()),
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "tie_word_embeddings": True,
}
_LLAMA4 = {
    **dict.fromkeys(("head_dim", "attention_chunk_size"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step"), 2),
    "intermediate_size_mlp": 40,
}
_MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1e4}
_PICTURE = {"image_token_id": 181, "image_token_index": 181, "video_token_id": 182, "vision_start_token_id": 183}
_IN_5: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3n": ("gemma3n_text", {"sliding_window": 5}, {"hidden_size": 16, "vocab_size": 8, "vocab_offset": 1000}),
    "gemma4": ("gemma4_text", {"sliding_window": 5}, {**_VISION, "num_key_value_heads": 2, "head_dim": 8}),
    **{
        name: (
            f"{name}_text",
            {"tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            {**_QWEN_VISION, "out_hidden_size": HIDDEN},
        )
        for name in ("qwen3_5", "qwen3_5_moe")
    },
}
TOWERS: dict[str, dict[str, Any]] = {
    **{
        name: {
            "text_config": {**_TEXT, "head_dim": 8, **GENERIC[text], **more, "model_type": text},
            "vision_config": vision,
            **({"audio_config": {**vision, "vocab_offset": 1008}} if name == "gemma3n" else {}),
        }
        for name, (text, more, vision) in _IN_5.items()
        if text in GENERIC
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "head_dim": 12,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
        },
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "llama4": {
        "text_config": {**_TEXT, **_LLAMA4, "model_type": "llama4_text", "tie_word_embeddings": False},
        "vision_config": {**_VISION, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama", "tie_word_embeddings": False},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8},
    },
    **{
        name: {
            "text_config": {**_TEXT, "model_type": f"{name}_text", **_MROPE},
            "vision_config": {**_QWEN_VISION, size: HIDDEN},
        }
        for name, size in (
            ("qwen2_vl", "hidden_size"),
            ("qwen2_5_vl", "out_hidden_size"),
            ("qwen3_vl", "out_hidden_size"),
        )
    },
}
"""``model_type`` -> config of a tiny model."""
LAYOUTS = ("before", "since")
"""Names of tensors in files: of transformers before 4.52, and since."""


def whole_model(model_type: str, **text: Any) -> Any:
    """A random model of texts and pictures."""
    library: Any = importlib.import_module("transformers")
    given = TOWERS[model_type]
    config = library.CONFIG_MAPPING[model_type](
        **{**given, "text_config": {**given["text_config"], **text}},
        tie_word_embeddings=given["text_config"]["tie_word_embeddings"],
        **_PICTURE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with _text_towers_alone(model_type):
            model = library.AutoModelForImageTextToText.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "language_model" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar") and "language_model" in name:
                buffer *= 0.9
    return model.eval()


@contextlib.contextmanager
def _text_towers_alone(model_type: str) -> Iterator[None]:
    """Leave out Gemma 3n's towers of pictures and sounds, which need a package of their own; no text reads them."""
    if model_type != "gemma3n":
        yield
        return
    module: Any = importlib.import_module("transformers.models.gemma3n.modeling_gemma3n")
    real = module.AutoModel

    def from_config(config: Any) -> nn.Module:
        made: nn.Module = real.from_config(config) if config.model_type == "gemma3n_text" else nn.Module()
        return made

    module.AutoModel = SimpleNamespace(from_config=from_config)
    try:
        yield
    finally:
        module.AutoModel = real


def write_tower(folder: Path, model_type: str, layout: str = "since", **text: Any) -> Any:
    """Write a random model of texts and pictures, and return it."""
    model = whole_model(model_type, **text)
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    is_tied = model.config.get_text_config().tie_word_embeddings
    tensors = {
        stored_name(name, model_type, layout): value.contiguous()
        for name, value in model.state_dict().items()
        if not (is_tied and name == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, padding_side="right", with_types=False)
    if layout == "before" and model_type in ("qwen2_vl", "qwen2_5_vl"):
        path = folder / "config.json"
        values = json.loads(path.read_text())
        text = values.pop("text_config")
        path.write_text(json.dumps({**text, **values}))
    return model


def stored_name(name: str, model_type: str, layout: str) -> str:
    """The name of a tensor of the class in a file of a layout."""
    if layout == "since" or model_type == "llama4":
        return name
    inside = name.removeprefix("model.")
    if model_type in ("qwen2_vl", "qwen2_5_vl"):
        return inside.replace("language_model.", "model.", 1)
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return inside.replace("language_model.", "language_model.model.", 1)
