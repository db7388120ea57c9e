"""What a page costs a run: ``python -m tests.bench.page``, written to build/bench/page.json.

The same short job trains on two local nodes, in alternation without a page and with one that a browser has open (a
reader of its stream). Compared are the seconds of all steps and the processor seconds of all processes of the run;
asked for is at most 2 % more. The page's own thread says its processor seconds besides, which other work on the
machine does not change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import tiny

OUT = Path("build/bench/page").resolve()
ASKED_SHARE = 0.02
JOB = """
[model]
path = "model"
[data]
train = "train.csv"
[train]
batch_size = 16
microbatches = 2
max_length = 32
local_iterations = 5
max_steps = {steps}
checkpoint_every = 0
[unfreeze]
every_steps = 10
[runtime]
lease_s = 120.0
wait_s = 300.0
"""
# the page's thread as the last line of a run's standard error
_TOLD = "page thread: "
_TRAIN = f"""
import sys, time
from coordinator.web import server
run = server.PageServer._run
def timed(self):
    run(self)
    sys.stderr.write("{_TOLD}" + str(time.thread_time()) + "\\n")
server.PageServer._run = timed
from ringtune.cli import main
main()
"""


class Cost(NamedTuple):
    """One run.

    Attributes:
        steps_s: of all its steps.
        cpu_s: of all its processes.
        page_s: processor seconds of the page's thread; 0 without one.
        frames: that the reader got.
    """

    steps_s: float
    cpu_s: float
    page_s: float
    frames: int


class _Reader(threading.Thread):
    """Reads a stream of frames as a browser does, without drawing."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.frames = 0

    def run(self) -> None:
        """Count frames until the stream ends."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}api/stream") as stream:  # noqa: S310
            for line in stream:
                self.frames += line.startswith(b"data: {")


def train(folder: Path, *, with_page: bool) -> Cost:
    """Train once; return what it cost."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    words = ["train", str(folder / "job.toml"), "--local", "2", "--out", str(out)]
    words += ["--web", "127.0.0.1:0"] if with_page else []
    command = [sys.executable, "-c", _TRAIN, *words]
    with (folder / "errors.log").open("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)  # noqa: S603
        readers = list(_followed(process))
        _, status, used = os.wait4(process.pid, 0)
        errors.seek(0)
        said = errors.read()
    if status:
        raise SystemExit(f"a run failed: {said[-2000:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    page_s = sum(float(line.removeprefix(_TOLD)) for line in said.splitlines() if line.startswith(_TOLD))
    steps_s = sum(line["seconds"] for line in lines if line["kind"] == "train")
    return Cost(steps_s, used.ru_utime + used.ru_stime, page_s, sum(reader.frames for reader in readers))


def _followed(process: subprocess.Popen[str]) -> Iterator[_Reader]:
    """Read what a run prints to its end; open the page that it tells of."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("page: "):
            reader = _Reader(line.removeprefix("page: ").strip())
            reader.start()
            yield reader


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and the lowest and highest value."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    """Measure pairs of runs and write what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    tiny.write_model(OUT / "model", num_blocks=8, hidden_size=256)
    tiny.write_rows(OUT / "train.csv", 400, seed=1)
    (OUT / "job.toml").write_text(JOB.format(steps=given.steps), encoding="utf-8")
    pairs = []
    for index in range(given.pairs):
        order = (False, True) if index % 2 == 0 else (True, False)
        found = {with_page: train(OUT, with_page=with_page) for with_page in order}
        pairs.append((found[False], found[True]))
        sys.stdout.write(f"without {found[False]}\nwith    {found[True]}\n")
        sys.stdout.flush()
    result = {
        "pairs": len(pairs),
        "steps_ratio": spread([page.steps_s / plain.steps_s for plain, page in pairs]),
        "cpu_ratio": spread([page.cpu_s / plain.cpu_s for plain, page in pairs]),
        "page_thread_share_of_cpu": spread([page.page_s / page.cpu_s for _, page in pairs]),
        "page_thread_share_of_steps": spread([page.page_s / page.steps_s for _, page in pairs]),
        "asked_share": ASKED_SHARE,
        "frames": sum(page.frames for _, page in pairs),
    }
    OUT.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
