"""Real local runs that are killed at a chosen or random moment and then resumed, for tests and ``tests.bench.kill``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from coordinator.client.checkpoints import RunCheckpoints
from coordinator.run.run_text import is_step
from tests.support import measured, tiny
from tests.support.cluster import TEMPLATE
from tests.support.failpoints import VARIABLE
from tests.support.processes import RUN_S, agents_below, source_environment
from tests.support.typed import run_here

NODES = ("node-0", "node-1", "node-2")
LAUNCHER = "launcher"
STEPS = 36
JOB = f"""
[model]
path = "model"
dtype = "float64"
[data]
train = "train.csv"
eval = "eval.csv"
owners = 2
[train]
batch_size = 8
microbatches = 2
max_length = 16
local_iterations = 2
max_steps = {STEPS}
checkpoint_every = 6
eval_every = 12
learning_rate = 1e-2
dropout = 0.1
[unfreeze]
every_steps = 7
[wire]
dtype = "float64"
[runtime]
threads = 1
lease_s = 30.0
[recovery]
copies = "none"
"""


def write_inputs(folder: Path) -> Path:
    """A tiny model, its rows and the job; gives the job's path."""
    tiny.write_model(folder / "model")
    tiny.write_rows(folder / "train.csv", 48, seed=1)
    tiny.write_rows(folder / "eval.csv", 20, seed=2)
    job = folder / "job.toml"
    job.write_text(JOB)
    return job


class LocalRun:
    """``ringtune train --local 3`` as a process; ``orders`` is the folder of the launcher's failpoints."""

    def __init__(self, job: Path, out: Path, *options: str, orders: Path | None = None) -> None:
        out.mkdir(exist_ok=True)
        self._out, self._states = out, measured.recall_in(out, NODES)
        module = "tests.support.failing_command" if orders else "ringtune.cli"
        command = [sys.executable, "-m", module, "train", str(job), "--local", str(len(NODES))]
        self._errors = (out.parent / f"{out.name}.err").open("w+")
        self.process = subprocess.Popen(  # noqa: S603 - our own module
            [*command, "--out", str(out), "--json", *options],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=source_environment(**({VARIABLE: str(orders)} if orders else {})),
        )
        self.events: list[dict[str, Any]] = []

    def agents(self) -> dict[str, psutil.Process]:
        """Its agents by name."""
        return agents_below(self.process.pid)

    def until_steps(self, count: int) -> None:
        """Read events until so many items are through."""
        assert self.process.stdout is not None
        while sum(event["event"] == "step" for event in self.events) < count:
            line = self.process.stdout.readline()
            assert line, f"the run ended before {count} steps: {self.errors()}"
            self.events.append(json.loads(line))

    def until_saved(self, step: int) -> None:
        """Read events until there is a checkpoint of a later step."""
        while max(RunCheckpoints(self._out).steps(), default=0) <= step:
            self.until_steps(1 + sum(event["event"] == "step" for event in self.events))

    def until_stopped(self) -> None:
        """Wait until a failpoint has made the launcher stand still."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert ended is not None and ended.si_code == os.CLD_STOPPED, self.errors()

    def kill(self, victim: str) -> str:
        """Kill -9 one process; the launcher if the agent is not there. Says which."""
        agent = self.agents().get(victim)
        if agent is None:
            self.process.kill()
            return LAUNCHER
        agent.kill()
        return victim

    def wait(self) -> int:
        """Wait for its end; gives the exit code."""
        output, _ = self.process.communicate(timeout=RUN_S)
        self.events += [json.loads(line) for line in output.splitlines() if line.endswith("}")]
        self._errors.close()
        measured.keep(self._states)
        return self.process.returncode

    def errors(self) -> str:
        """What it wrote to the standard error."""
        return Path(self._errors.name).read_text()

    def notes(self) -> list[str]:
        """The lines that it had for the user."""
        return [event["text"] for event in self.events if event["event"] == "note"]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run of ``LocalRun``'s command that was typed in this process, where nobody kills or interrupts it."""

    code: int
    errors: str
    notes: list[str]


def run_whole(job: Path, out: Path, *options: str) -> Ended:
    """Train with three local nodes, forked from the template of the tests, to the end of the run."""
    out.mkdir(exist_ok=True)
    states = measured.recall_in(out, NODES)
    command = ("train", job, "--local", len(NODES), "--out", out, "--json", *options)
    done = run_here(TEMPLATE.get, *command)
    measured.keep(states)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("}")]
    notes = [event["text"] for event in events if event["event"] == "note"]
    return Ended(code=done.returncode, errors=done.stderr, notes=notes)


def steps_of_metrics(out: Path) -> list[int]:
    """The steps that have a line in metrics.jsonl, in order."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if is_step(line)]
