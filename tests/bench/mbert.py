"""A random model of mBERT's shape and rows of one length, for timings only: what it says means nothing.

12 blocks of width 768, feed-forward 3072, 12 heads, 119,547 words: 178 million parameters, 0.7 GB on the disk.
"""

from __future__ import annotations

from pathlib import Path

TOKENS = 128
ROWS = 640
_VOCABULARY = 119_547
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = 4000


def write_model(folder: Path, *, vocabulary: int = _VOCABULARY, **shape: int) -> Path:
    """Write config, random weights and a tokenizer of so many words, unless they are there; ``shape`` of its config."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = BertConfig(vocab_size=vocabulary, architectures=["BertModel"], **shape)
    torch.manual_seed(0)
    model = BertModel(config)
    words = [*_SPECIAL, *(f"w{index}" for index in range(vocabulary - len(_SPECIAL)))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    config.save_pretrained(folder)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_rows(path: Path, *, rows: int = ROWS, tokens: int = TOKENS) -> Path:
    """Write labelled rows that are all longer than ``tokens``: every batch has the full length."""
    lines = ["text,label"]
    for row in range(rows):
        words = " ".join(f"w{(row * 31 + place * 7) % _WORDS}" for place in range(tokens))
        lines.append(f"{words},{'good' if row % 2 else 'bad'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
