"""Real local runs that are killed at a chosen or random moment and then resumed, for tests and ``tests.bench.kill``."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import load_file

from coordinator.client.checkpoints import RunCheckpoints
from coordinator.run.run_text import is_step
from ringtune.errors import UsageError
from tests.support import measured, tiny
from tests.support.cluster import TEMPLATE
from tests.support.failpoints import VARIABLE
from tests.support.processes import RUN_S, agents_below, source_environment
from tests.support.typed import run_here

NODES = ("node-0", "node-1", "node-2")
LAUNCHER = "launcher"
VICTIMS = (LAUNCHER, *NODES)
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


def trained(out: Path) -> dict[str, torch.Tensor]:
    """Adapter and head of a run, by name."""
    return load_file(out / "adapter/adapter.safetensors") | load_file(out / "adapter/model_head.safetensors")


def difference(out: Path, wanted: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference between what two runs trained."""
    found = trained(out)
    assert found.keys() == wanted.keys()
    return max(float((found[name].double() - wanted[name].double()).abs().max()) for name in found)


def steps_of_metrics(out: Path) -> list[int]:
    """The steps that have a line in metrics.jsonl, in order."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if is_step(line)]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run that was killed once and resumed.

    ``after_s`` counts from the start of the launcher, ``steps`` the items that were seen; ``resumed_at`` is the
    step, -1 = from the beginning. ``was_finished``: it was killed between its report and its exit, so that its resume
    has to be refused.
    """

    victim: str
    after_s: float
    steps: int
    code: int
    resumed_at: int
    resume_code: int
    difference: float
    steps_are_right: bool
    was_finished: bool = False
    errors: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the result is that of the uninterrupted run, and the resume ended as it has to."""
        wanted_code = UsageError.exit_code if self.was_finished else 0
        return self.resume_code == wanted_code and self.difference <= 1e-9 and self.steps_are_right


def kill_and_resume(job: Path, out: Path, wanted: dict[str, torch.Tensor], moment: Moment) -> Trial:
    """Kill one process of a run, resume the run, compare."""
    run = LocalRun(job, out)
    started_s = time.monotonic()
    if moment.steps:
        run.until_steps(moment.steps)
    time.sleep(moment.after_s)
    at_s = time.monotonic() - started_s
    victim = run.kill(moment.victim)
    code = run.wait()
    return resume(job, out, wanted, Killed(victim, at_s, moment.steps, code))


class Killed(NamedTuple):
    """Who was killed, when, after how many items, and the exit code of the run."""

    victim: str
    after_s: float
    steps: int
    code: int


def resume(job: Path, out: Path, wanted: dict[str, torch.Tensor], killed: Killed) -> Trial:
    """Resume a killed run and compare."""
    was_finished = (out / "report.json").is_file()
    again = LocalRun(job, out, "--resume")  # at once: agents of a killed launcher may still be about to end
    resume_code = again.wait()
    is_whole = was_finished or resume_code == 0
    going_on = [note for note in again.notes() if note.startswith("resuming after step ")]
    return Trial(
        **killed._asdict(),
        resumed_at=int(going_on[0].split()[-1]) if going_on else -1,
        resume_code=resume_code,
        difference=difference(out, wanted) if is_whole else float("inf"),
        steps_are_right=is_whole and steps_of_metrics(out) == list(range(1, STEPS + 1)),
        was_finished=was_finished,
        errors=again.errors() if resume_code else "",
    )


class Moment(NamedTuple):
    """Whom to kill, and when: so many seconds after so many items, 0 = after the start of the launcher."""

    victim: str
    after_s: float
    steps: int


def random_moments(count: int, *, start_s: float, num_items: int, seed: int) -> list[Moment]:
    """Victims in turn; a fifth of the moments while the run starts, the others between its first and last item."""
    rng = random.Random(seed)
    moments = []
    for index in range(count):
        while_it_starts = index % (len(VICTIMS) + 1) == len(VICTIMS)
        steps = 0 if while_it_starts else rng.randint(1, num_items)
        after_s = rng.uniform(0.0, start_s if while_it_starts else 0.1)
        moments.append(Moment(VICTIMS[index % len(VICTIMS)], after_s, steps))
    return moments
