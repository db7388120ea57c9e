"""Time a newcomer's way: a CSV and a model folder, then ``init --yes``, ``train --local 3``, ``predict``, and no edit.

Run ``python -m tests.bench.newcomer``; model and sentences are the demo's, which ``ringtune demo`` fetches once.
It prints the seconds of each command, the accuracy on sentences that nobody trained on, and whether all took less than
the three minutes that are promised for 500 rows on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.demo.fetch import demo_cache, fetch
from coordinator.demo.packages import MODEL_FOLDER, SENTENCES_FILE
from coordinator.demo.sentences import read_sentences, split, write_csv

PROMISED_S: Final = 180.0
ROWS: Final = 500
_DEADLINE_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk the way in an empty folder; return 1 if it took longer than is promised."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.newcomer", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the CSV")
    parser.add_argument("--judged", type=int, default=ROWS, help="other rows, to predict for")
    given = parser.parse_args(arguments)
    cache = demo_cache()
    fetch(cache)
    train, held_out = split(read_sentences(cache / SENTENCES_FILE))
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        folder = Path(name)
        write_csv(folder / "reviews.csv", train[: given.rows])
        write_csv(folder / "new" / "new.csv", held_out[: given.judged])
        shutil.copytree(cache / MODEL_FOLDER, folder / MODEL_FOLDER)
        load = os.getloadavg()[0]
        seconds = {
            words[0]: timed(folder, words)
            for words in (
                ("init", "--yes"),
                ("train", "job.toml", "--local", "3", "--out", "run"),
                ("predict", "run", "--data", "new/new.csv", "--save", "labelled.csv", "--json"),
            )
        }
        report = json.loads((folder / "run/report.json").read_text(encoding="utf-8"))
        summary = json.loads((folder / "predict.log").read_text(encoding="utf-8").splitlines()[-1])
    whole_s = sum(seconds.values())
    print_line(", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items()) + f"; together {whole_s:.1f} s")
    print_line(
        f"{report['steps']} steps; accuracy {report['eval']['accuracy']:.4f} on {report['eval']['count']} held out"
    )
    print_line(f"accuracy {summary['accuracy']:.4f} on {summary['judged']} sentences that nobody had")
    print_line(f"load before: {load:.1f} on {os.cpu_count()} cores; promised: {PROMISED_S:g} s on two free ones")
    return int(whole_s > PROMISED_S)


def timed(folder: Path, words: Sequence[str]) -> float:
    """Run a command of RingTune in a folder; return its seconds.

    Raises:
        SystemExit: it failed; with what it printed.
    """
    started_s = time.perf_counter()
    with (folder / f"{words[0]}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-P", "-m", "ringtune.cli", *words],
            cwd=folder,
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"ringtune {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - started_s


def print_line(text: str) -> None:
    """Print a line at once, for whoever waits."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
