"""Write a small random BERT, labelled sentences and a job: ``python tiny_job.py DIR``.

It imports nothing of a checkout, so that whoever has installed RingTune with ``[node]`` can run it.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path
from typing import Final

BLOCKS: Final = 4
STEPS: Final = 4
WIDTH: Final = 32
_LABELS: Final = ("bad", "good")
_WORDS: Final = tuple(f"w{index}" for index in range(60))
_VOCABULARY: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS)
_JOB: Final = f"""\
[model]
path = "model"
task = "sequence-classification"
[data]
train = "train.csv"
eval = "eval.csv"
labels = ["bad", "good"]
[train]
batch_size = 8
microbatches = 2
max_length = 16
local_iterations = 2
max_steps = {STEPS}
[unfreeze]
every_steps = 1
"""


def write_model(folder: Path) -> None:
    """Write config, weights and tokenizer; the same bytes at each call."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = BertConfig(
        vocab_size=len(_VOCABULARY),
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=64,
        initializer_range=0.3,
        architectures=["BertModel"],
    )
    torch.manual_seed(0)
    save_file(BertModel(config).state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(_VOCABULARY) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)


def write_rows(path: Path, num_rows: int, *, seed: int) -> None:
    """Write sentences whose words depend on their label."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(num_rows):
            label = rng.randrange(len(_LABELS))
            known = _WORDS[label :: len(_LABELS)]
            words = [rng.choice(known if rng.random() < 0.7 else _WORDS) for _ in range(rng.randint(2, 12))]
            writer.writerow([" ".join(words), _LABELS[label]])


def write_job(folder: Path) -> Path:
    """Write model, rows and job into a folder; return the path of the job."""
    write_model(folder / "model")
    write_rows(folder / "train.csv", 48, seed=1)
    write_rows(folder / "eval.csv", 16, seed=2)
    (folder / "job.toml").write_text(_JOB, encoding="utf-8")
    return folder / "job.toml"


if __name__ == "__main__":
    write_job(Path(sys.argv[1]))
