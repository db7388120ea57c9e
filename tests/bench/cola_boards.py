"""Three boards of the testbed on which a helper is timed: an owner, a weak board that it helps, and the strong helper.

The owner hosts the top block of three of BERT-base's width, the weak board (0.3 cores) the two below, and the strong
one nothing. Adapters are ``linear`` beside all matrices. A case is carried out without and with the strong board as the
weak one's helper; what is timed is the median step.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from coordinator.planner.given_plan import read_given_plan
from coordinator.run.run_text import is_step
from deploy.testbed.agents import AgentSetup
from deploy.testbed.boards import Board, Layout
from deploy.testbed.testbed import Testbed
from ringtune.schedule.course import IN_STEP, HelperSettings
from ringtune.schedule.plan import Plan
from ringtune.techniques.offload import helped
from tests.bench.mbert import write_model, write_rows
from tests.support.plans import changed

RUN_S: Final = 600.0
TOKENS: Final = 128
GIGABIT: Final = 125e6
"""Bytes a second of each link, in either direction."""

CORES: Final = {"owner": 0.7, "weak": 0.3, "strong": 0.9}
HELPER: Final = {"weak": "strong"}
FIRST: Final = 1
"""Steps at the beginning that are not counted: links and allocators warm up."""

JOB: Final = """
[model]
path = "{model}"
[adapter]
config = "linear[attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]"
[train]
method = "all"
optimizer = "adamw"
max_steps = {steps}
batch_size = {batch}
microbatches = {microbatches}
max_length = {tokens}
local_iterations = {steps}
eval_every = 0
[offload]
mode = {mode}
{manner}
[runtime]
threads = 1
lease_s = 60
wait_s = 300
"""


class Case(NamedTuple):
    """What is timed without and with a helper.

    Attributes:
        batch: rows of a step.
        microbatches: into which they are cut.
        steps: of a run.
        manner: how the helper fits.
    """

    batch: int
    microbatches: int
    steps: int = 6
    manner: HelperSettings = IN_STEP

    @property
    def name(self) -> str:
        """Rows and tokens of a step, and what of the manner is not exact."""
        words = [f"{self.batch} x {TOKENS}"]
        words += [f"interval {self.manner.interval}"] if self.manner.interval > 1 else []
        words += [self.manner.pairs] if self.manner.pairs != IN_STEP.pairs else []
        return ", ".join(words + (["overlap"] if self.manner.overlap else []))


class Boards:
    """The testbed with its agents.

    Args:
        bed: the testbed.
        layout: of its boards.
        folder: for jobs, plans and runs.
        model: folder of the model.
    """

    def __init__(self, bed: Testbed, layout: Layout, folder: Path, model: Path) -> None:
        self.layout, self.folder = layout, folder
        self._bed, self._model = bed, model
        self._drawn: dict[tuple[int, int, int], Plan] = {}
        self._runs = 0

    def ringtune(self, *words: str) -> None:
        """Carry out a command of the coordinator's clients.

        Raises:
            RuntimeError: it failed.
        """
        asked = [sys.executable, "-P", "-m", "ringtune.cli", *words, "--coordinator", "{coordinator}", "--insecure"]
        if code := self._bed.run(asked, timeout_s=RUN_S):
            raise RuntimeError(f"ringtune {words[0]} ended with exit code {code}")

    def job(self, case: Case, *, is_helped: bool) -> Path:
        """The file of a case's job."""
        manner = case.manner
        lines = [
            f"interval = {manner.interval}",
            f'pairs = "{manner.pairs}"',
            f"overlap = {str(manner.overlap).lower()}",
        ]
        text = JOB.format(
            model=self._model,
            steps=case.steps,
            batch=case.batch,
            microbatches=case.microbatches,
            tokens=TOKENS,
            mode='{weak = "strong"}' if is_helped else '"off"',
            manner="\n".join(lines) if is_helped else "",
        )
        path = self.folder / f"job-{is_helped}.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def plan(self, case: Case, *, is_helped: bool) -> Plan:
        """The plan of a case: all blocks but the top one on the weak board."""
        shape = case[:3]
        if shape not in self._drawn:
            path = self.folder / "drawn.json"
            self.ringtune("plan", str(self.job(case, is_helped=False)), "--save", str(path))
            plan = read_given_plan(path).plan
            top = plan.course.num_blocks
            slices = [("weak", 0, top - 1), ("owner", top - 1, top), ("strong", top, top)]
            self._drawn[shape] = changed(plan, slices=slices)
        return helped(self._drawn[shape], HELPER if is_helped else {}, case.manner)

    def step_s(self, case: Case, *, is_helped: bool) -> float:
        """Seconds of the median step of a run; with an interval the mean, as not every step has an update."""
        plan, self._runs = self.folder / "plan.json", self._runs + 1
        plan.write_text(json.dumps(self.plan(case, is_helped=is_helped).to_json()), encoding="utf-8")
        job, out = self.job(case, is_helped=is_helped), self.folder / f"run-{self._runs}"
        self.ringtune("train", str(job), "--plan", str(plan), "--out", str(out))
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        counted = [float(line["seconds"]) for line in lines if is_step(line)][FIRST:]
        return statistics.median(counted) if case.manner.interval == 1 else statistics.mean(counted)

    def pair(self, case: Case) -> dict[str, float]:
        """Time a step without help and with it, and tell."""
        alone_s, helped_s = (self.step_s(case, is_helped=is_helped) for is_helped in (False, True))
        print(f"{case.name}: {alone_s:.3f} s alone, {helped_s:.3f} s helped", flush=True)  # noqa: T201
        return {"alone_s": alone_s, "helped_s": helped_s, "speedup": alone_s / helped_s}


def layout(train: Path, held_out: Path) -> Layout:
    """The three boards."""
    return Layout(
        boards=tuple(
            Board(
                name=name,
                cpu_cores=cores,
                memory_bytes=4 << 30,
                up_bytes_per_s=GIGABIT,
                down_bytes_per_s=GIGABIT,
                data=train if name == "owner" else None,
                eval_data=held_out if name == "owner" else None,
            )
            for name, cores in CORES.items()
        ),
        name="rtcola",
        cpu_period_s=0.02,
    )


@contextmanager
def on_boards(folder: Path) -> Iterator[Boards]:
    """Start the boards, and give them while the context is open."""
    model = write_model(folder / "model", vocabulary=2000, num_hidden_layers=3)
    train = write_rows(folder / "train.csv", rows=256, tokens=TOKENS)
    held_out = write_rows(folder / "eval.csv", rows=4, tokens=TOKENS)
    which = layout(train, held_out)
    with Testbed(which, folder=folder / "bed") as bed:
        bed.start_coordinator(lease_s=60.0)
        bed.start_agents(AgentSetup(budgets={}))
        yield Boards(bed, which, folder, model)
