"""Tiny inputs for tests: a random BERT folder with its tokenizer, and labelled sentences as csv or jsonl.

Everything is a pure function of its arguments, so that two processes that write the same folder get the
same bytes. The weights are larger than usual, so that a wrong mask or a wrong block is seen.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

LABELS = ("bad", "good")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NUM_WORDS = 180


def words() -> tuple[str, ...]:
    """The words that the tiny tokenizer knows, without the special tokens and the label words."""
    return tuple(f"w{index}" for index in range(_NUM_WORDS))


def vocabulary() -> tuple[str, ...]:
    """The whole vocabulary, in the order of token ids."""
    return (*_SPECIAL, *LABELS, "##s", *words())


def write_model(
    folder: Path, *, num_blocks: int = 4, hidden_size: int = 32, num_heads: int = 4, prefix: bool = False
) -> Path:
    """Write a random BERT (config, safetensors, tokenizer) that ``AutoModel`` and ``AutoTokenizer`` load."""
    write_bert(
        folder,
        vocab_size=len(vocabulary()),
        hidden_size=hidden_size,
        num_blocks=num_blocks,
        num_heads=num_heads,
        intermediate_size=2 * hidden_size,
        prefix="bert." if prefix else "",
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    write_tokenizer(folder, model_max_length=64)
    return folder


def write_tokenizer(folder: Path, **settings: Any) -> None:
    """Write the word-piece tokenizer of ``vocabulary`` in place of that of the folder; ``settings`` of its class."""
    from transformers import BertTokenizerFast

    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
    BertTokenizerFast.from_pretrained(str(folder), **settings).save_pretrained(folder)


def write_bert(
    folder: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    num_blocks: int,
    num_heads: int,
    intermediate_size: int,
    seed: int = 0,
    prefix: str = "",
    **config: Any,
) -> Path:
    """Write config and random safetensors weights of a BERT of any size, without a tokenizer."""
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True, exist_ok=True)
    values = BertConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_blocks,
        num_attention_heads=num_heads,
        intermediate_size=intermediate_size,
        architectures=["BertModel"],
        **config,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = {prefix + name: tensor.contiguous() for name, tensor in BertModel(values).state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    values.save_pretrained(folder)
    return folder


def write_at(folder: Path, tensors: Mapping[str, torch.Tensor], at: int) -> Path:
    """Write the weights of a folder, with data that begin ``at`` bytes after a multiple of 64; return the file."""
    path, content = folder / "model.safetensors", save(dict(tensors))
    start = 8 + int.from_bytes(content[:8], "little")
    text = content[8:start].rstrip(b" ")
    text += b" " * ((at - 8 - len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    return path


def make_rows(
    num_rows: int, *, seed: int = 0, labels: Sequence[str] = LABELS, longest: int = 14
) -> list[tuple[str, str]]:
    """Make (text, label) pairs of different lengths whose words depend on the label."""
    rng = random.Random(f"rows/{seed}")
    known = words()
    rows = []
    for _ in range(num_rows):
        label = rng.randrange(len(labels))
        share = known[label :: len(labels)]
        length = rng.randint(2, longest)
        picked = [rng.choice(share if rng.random() < 0.7 else known) for _ in range(length)]
        rows.append((" ".join(picked), labels[label]))
    return rows


def write_rows(path: Path, num_rows: int, *, seed: int = 0, labels: Sequence[str] = LABELS, longest: int = 14) -> Path:
    """Write ``make_rows`` to a ``.csv`` or ``.jsonl`` file with the columns ``text`` and ``label``."""
    rows = make_rows(num_rows, seed=seed, labels=labels, longest=longest)
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        else:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows(rows)
    return path
