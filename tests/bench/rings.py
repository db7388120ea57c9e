"""Run the real ring for a benchmark, as a user would, and read what it cost from its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_DEADLINE_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRun:
    """One finished run, in its folder."""

    folder: Path

    @property
    def accuracy(self) -> float:
        """On the held-out sentences."""
        return float(self.report["eval"]["accuracy"])

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all nodes together, every thread of them, since the run was prepared there."""
        return sum(float(totals["cpu_s"]) for totals in self.report["nodes"].values())

    def wall_s(self, first_step: int, last_step: int) -> float:
        """Seconds of the steps ``[first_step, last_step)``: from the end of the step before to the end of the last.

        A step ends with the last action that any node did for it, backward and updates included.
        """
        ends_s = self._step_ends_s()
        return ends_s[last_step - 1] - ends_s[first_step - 1]

    def step_s(self, first_step: int, last_step: int) -> list[float]:
        """Seconds of each of the steps ``[first_step, last_step)``, from end to end."""
        ends_s = self._step_ends_s()
        return [ends_s[step] - ends_s[step - 1] for step in range(first_step, last_step)]

    @property
    def report(self) -> dict[str, Any]:
        """What the run amounts to."""
        return dict(json.loads((self.folder / "report.json").read_text(encoding="utf-8")))

    def _step_ends_s(self) -> dict[int, float]:
        trace = json.loads((self.folder / "trace.json").read_text(encoding="utf-8"))
        ends_s: dict[int, float] = {}
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and "item" in event["args"]:
                item = int(event["args"]["item"])
                ends_s[item] = max(ends_s.get(item, 0.0), (event["ts"] + event["dur"]) / 1e6)
        return ends_s


def run_ring(job: Path, out: Path, *, nodes: int) -> RingRun:
    """Run ``ringtune train JOB --local N``.

    Raises:
        RuntimeError: the run failed; has the end of its output.
    """
    command = [sys.executable, "-m", "ringtune.cli", "train", str(job), "--local", str(nodes), "--out", str(out)]
    text = run([*command, "--replace"])
    if not (out / "report.json").exists():
        raise RuntimeError(f"the run wrote no report:\n{text[-2000:]}")
    return RingRun(folder=out)


def run_plain(run_folder: Path, *, first_step: int = 0, method: str = "", seed: int | None = None) -> dict[str, Any]:
    """Run ``tests.bench.plain`` on the job and plan of a run, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.plain", str(run_folder), "--first-step", str(first_step)]
    command += ["--method", method] if method else []
    command += ["--seed", str(seed)] if seed is not None else []
    return dict(json.loads(run(command).splitlines()[-1]))


def run(command: list[str]) -> str:
    """Run a command to its end, in a session of its own: the scheduler shares the cores out by session.

    Returns:
        Its standard output.

    Raises:
        RuntimeError: it failed; has the end of what it said.
    """
    done = subprocess.run(  # noqa: S603
        command,
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[1:4])} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout
