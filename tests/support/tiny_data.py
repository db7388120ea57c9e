"""Tiny data for every task: labelled texts, texts to continue, questions with long contexts, images."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import numpy as np

from ringtune.models.family import CLASS_TASKS
from tests.support import tiny
from tests.support.chat_models import plain_pairs, write_conversations
from tests.support.tiny_families import IMAGE_SIZE

SUFFIXES = {
    "sequence-classification": "csv",
    "regression": "csv",
    "token-classification": "jsonl",
    "causal-lm": "jsonl",
    "chat": "jsonl",
    "question-answering": "jsonl",
    "image-classification": "npz",
}


def write_task_rows(folder: Path, task: str, name: str, num_rows: int, *, seed: int) -> Path:
    """Write rows of a task."""
    path = folder / f"{name}.{SUFFIXES[task]}"
    if task == "image-classification":
        return write_images(path, num_rows, seed=seed)
    if task == "regression":
        return write_numbered(path, num_rows, seed=seed)
    if task == "token-classification":
        return write_tagged(path, num_rows, seed=seed)
    if task == "chat":
        return write_conversations(path, plain_pairs(num_rows, seed=seed))
    if task == "question-answering":
        return write_questions(path, num_rows, seed=seed)
    return tiny.write_rows(path, num_rows, seed=seed)


def make_questions(num_rows: int, *, seed: int) -> list[dict[str, object]]:
    """Questions of a few words; contexts of 4 to 40 words, the answer somewhere in them."""
    rng = random.Random(f"questions/{seed}")
    rows: list[dict[str, object]] = []
    for _ in range(num_rows):
        context = [rng.choice(tiny.words()) for _ in range(rng.randint(4, 40))]
        first = rng.randrange(len(context) - 1)
        answer = " ".join(context[first : first + rng.randint(1, 2)])
        start = len(" ".join(context[:first])) + (1 if first else 0)
        rows.append(
            {
                "question": " ".join(rng.choice(tiny.words()) for _ in range(rng.randint(1, 3))),
                "context": " ".join(context),
                "answer": {"text": [answer], "answer_start": [start]},
            }
        )
    return rows


def write_questions(path: Path, num_rows: int, *, seed: int) -> Path:
    """Write ``make_questions`` as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in make_questions(num_rows, seed=seed)), encoding="utf-8")
    return path


def write_numbered(path: Path, num_rows: int, *, seed: int) -> Path:
    """Write the texts of ``tiny`` with a number between -1 and 1: how many more words are even than odd, as a share."""
    rng = random.Random(f"numbered/{seed}")
    rows = []
    for text, _ in tiny.make_rows(num_rows, seed=seed):
        words = [int(word[1:]) for word in text.split()]
        rows.append((text, sum(1 - 2 * (word % 2) for word in words) / len(words) + rng.gauss(0, 0.01)))
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


TAGS = ("B-ODD", "I-ODD", "O")
"""Tags of ``make_tagged``, sorted."""


def make_tagged(num_rows: int, *, seed: int) -> list[dict[str, list[str]]]:
    """Texts of 1 to 12 words; runs of odd words are entities, a third of the words has two tokens."""
    rng = random.Random(f"tagged/{seed}")
    rows: list[dict[str, list[str]]] = []
    for _ in range(num_rows):
        indices = [rng.randrange(len(tiny.words())) for _ in range(rng.randint(1, 12))]
        tags = [
            "O" if not index % 2 else "I-ODD" if place and indices[place - 1] % 2 else "B-ODD"
            for place, index in enumerate(indices)
        ]
        rows.append({"words": [tiny.words()[index] + rng.choice(["", "", "s"]) for index in indices], "tags": tags})
    return rows


def write_tagged(path: Path, num_rows: int, *, seed: int) -> Path:
    """Write ``make_tagged`` as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in make_tagged(num_rows, seed=seed)), encoding="utf-8")
    return path


def labels_of(task: str) -> tuple[str, ...]:
    """The names of the classes or tags that the rows of a task have."""
    return TAGS if task == "token-classification" else tiny.LABELS if task in CLASS_TASKS else ()


def make_images(num_rows: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Grey images whose brighter half says which class they are of."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, num_rows)
    images = rng.integers(0, 120, (num_rows, IMAGE_SIZE, IMAGE_SIZE))
    half = IMAGE_SIZE // 2
    for image, label in zip(images, labels, strict=True):
        image[label * half : (label + 1) * half] += 100
    return images.astype(np.uint8), np.array(tiny.LABELS)[labels]


def write_images(path: Path, num_rows: int, *, seed: int) -> Path:
    """Write ``make_images`` as an npz file."""
    images, labels = make_images(num_rows, seed=seed)
    np.savez(path, image=images, label=labels)
    return path


def shuffle_rows(path: Path) -> None:
    """Put the rows of a csv file into another order."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = list(csv.reader(file))
    random.Random(5).shuffle(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])
