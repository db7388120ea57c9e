"""How soon ``ringtune train --local N`` trains, and what its nodes take: ``python -m tests.bench.local_start``.

A tiny model, so that nearly all of it is starting. Prints one JSON line for each repeat: seconds from the command to
the first logged step, and a second later the memory of all processes below the command, as the sum of their
proportional set sizes (shared pages are shared out) and of their resident set sizes (shared pages count for each).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from ringtune.jobs.job import load_job
from tests.bench.same_results import ComparedRun, command, environment, write_inputs, write_job

LONGEST_S = 90.0
_ENDLESS = {"train.max_steps": 100_000, "train.eval_every": 0, "train.checkpoint_every": 0}


def measure(folder: Path, out: Path, nodes: int) -> dict[str, float]:
    """Start one run, measure it, and end it.

    Raises:
        RuntimeError: no step was logged in time.
    """
    started_s = time.monotonic()
    arguments = command("train", str(folder / "job.toml"), "--local", str(nodes), "--out", str(out))
    with subprocess.Popen(arguments, env=environment(), stdout=subprocess.DEVNULL) as process:  # noqa: S603 - our own
        try:
            metrics = out / "metrics.jsonl"
            while not metrics.is_file() or not metrics.stat().st_size:
                if process.poll() is not None or time.monotonic() - started_s > LONGEST_S:
                    raise RuntimeError(f"no step in {LONGEST_S:g} s; exit code {process.poll()}")
                time.sleep(0.02)
            first_step_s = time.monotonic() - started_s
            time.sleep(1.0)
            pss_bytes = rss_bytes = 0
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    memory = child.memory_full_info()
                    pss_bytes, rss_bytes = pss_bytes + memory.pss, rss_bytes + memory.rss
        finally:
            process.terminate()
            process.wait(LONGEST_S)
    return {"first_step_s": first_step_s, "pss_mib": pss_bytes / 2**20, "rss_mib": rss_bytes / 2**20}


def main() -> None:
    """Measure some runs one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ringtune-bench-") as name:
        folder = Path(name)
        write_inputs(folder)
        job = load_job(write_job(folder, "job", ComparedRun(nodes=3))).with_overrides(_ENDLESS)
        (folder / "job.toml").write_text(job.to_toml())
        for repeat in range(options.repeats):
            found = measure(folder, folder / f"run-{repeat}", options.nodes)
            print(json.dumps({key: round(value, 2) for key, value in found.items()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
