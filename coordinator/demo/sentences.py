"""Split the demo's sentences into those to train on and those held out.

The package has no test split. A sentence's place follows from the hash of (seed, text) alone: the same on every
machine and Python version, whatever the order of the file.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ringtune.errors import DataError

SOURCE = "rotten_tomatoes"
CLASS_NAMES = {"0": "negative", "1": "positive"}
NUM_HELD_OUT = 1066
SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """One labelled sentence."""

    text: str
    label: str


def read_sentences(path: Path) -> tuple[Sentence, ...]:
    """Read the Rotten Tomatoes sentences of the package's file, in the file's order.

    Raises:
        DataError: the file is not the one that the demo knows.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if not {"text", "label", "source"} <= set(rows.fieldnames or ()):
            raise DataError(f"{path} has the columns {rows.fieldnames}, the demo needs text, label and source")
        return tuple(
            Sentence(text=row["text"], label=CLASS_NAMES[row["label"]]) for row in rows if row["source"] == SOURCE
        )


def split(
    sentences: Iterable[Sentence], *, num_held_out: int = NUM_HELD_OUT
) -> tuple[tuple[Sentence, ...], tuple[Sentence, ...]]:
    """Split the sentences into those to train on and those held out; no text is in both.

    Raises:
        DataError: there are not enough sentences.
    """
    unique = {sentence.text: sentence for sentence in sentences}
    if len(unique) <= num_held_out:
        raise DataError(f"{len(unique)} sentences are too few to hold {num_held_out} out and train on the rest")
    order = sorted(unique.values(), key=lambda sentence: _key(sentence.text))
    return tuple(order[num_held_out:]), tuple(order[:num_held_out])


def write_csv(path: Path, sentences: Iterable[Sentence]) -> None:
    """Write ``text,label`` rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["text", "label"])
        writer.writerows((sentence.text, sentence.label) for sentence in sentences)


def _key(text: str) -> bytes:
    return hashlib.sha256(f"{SPLIT_SEED}\0{text}".encode()).digest()
