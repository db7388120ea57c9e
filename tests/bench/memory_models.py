"""Random models and images of real shapes: memory depends on shapes alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from docs.examples.fashion.prepare import CLASS_NAMES, OTHER_CLASSES
from docs.examples.fashion.pretrain import Recipe, config_of
from tests.support.tiny_families import write_tokenizer

BLOCKS, WIDTH, INNER, WORDS, HEADS, KEY_HEADS = 22, 2048, 5632, 32_000, 32, 4


def write_vit(folder: Path) -> Path:
    """Write the model of the image example with random weights."""
    from transformers import ViTForImageClassification

    config = config_of(Recipe(), num_labels=len(OTHER_CLASSES))
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


def write_images(path: Path, num_rows: int) -> Path:
    """Write random images of the example's size and classes."""
    drawn, side = np.random.default_rng(num_rows), Recipe().side
    labels = np.array(CLASS_NAMES)[np.array(OTHER_CLASSES)[np.arange(num_rows) % len(OTHER_CLASSES)]]
    np.savez(path, image=drawn.integers(0, 256, (num_rows, side, side), dtype=np.uint8), label=labels)
    return path


def _llama_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a Llama with a decoder of its own."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, WIDTH)}
    keys = WIDTH // HEADS * KEY_HEADS
    inside = {
        **{f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qo"},
        **{f"self_attn.{name}_proj.weight": (keys, WIDTH) for name in "kv"},
        **{f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")},
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    for block in range(BLOCKS):
        found |= {f"model.layers.{block}.{name}": shape for name, shape in inside.items()}
    return found | {"model.norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH)}


def write_llama(folder: Path, *, shard_bytes: int = 400 << 20) -> Path:
    """Write a random Llama of 1.1 billion parameters (bfloat16) in several files, one shard in memory at a time."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, str] = {}
    for name, shape in _llama_shapes().items():
        if sum(tensor.nbytes for tensor in files[-1].values()) > shard_bytes:
            save_file(files[-1], folder / f"model-{len(files):05}.safetensors", metadata={"format": "pt"})
            files[-1].clear()
            files.append({})
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
        files[-1][name] = (1 + 0.1 * drawn if len(shape) == 1 else drawn * 0.02).to(torch.bfloat16)
        places[name] = f"model-{len(files):05}.safetensors"
    save_file(files[-1], folder / f"model-{len(files):05}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    write_tokenizer(folder, padding_side="right", with_types=False)
    return folder
