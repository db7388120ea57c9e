"""Part ``speedup`` of ``make bench-cola``: a weak board with an idle strong one, which helps it or does not.

Three boards of the testbed: an owner that hosts the top block of BERT-base's width, a weak board (0.3 cores) with the
two blocks below, and a strong one that hosts nothing. Every link has 1 Gbit/s. With ``linear`` adapters beside all
matrices one plan is carried out without and with the strong board as the weak one's helper, in turns; the weights are
the same. The figure is the median step without help over that with help; the spread is that of pairs of runs.

======================= ===================================================================== =======
offload_step_speedup    median step of a run without help over one with help; median of pairs >= 1.1
======================= ===================================================================== =======
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from coordinator.planner.given_plan import read_given_plan
from coordinator.records.step_lines import is_step
from deploy.testbed.agents import AgentSetup
from deploy.testbed.boards import Board, Layout
from deploy.testbed.testbed import Testbed
from ringtune.schedule.helped import helped
from tests.bench.mbert import write_model, write_rows
from tests.support.plans import changed

LEAST: Final = 1.1
PAIRS: Final = 2
RUN_S: Final = 600.0
CORES: Final = {"owner": 0.7, "weak": 0.3, "strong": 0.9}
FIRST: Final = 1
"""Steps at the beginning that are not counted: links and allocators warm up."""

Figures = dict[str, Any]

JOB: Final = """
[model]
path = "{model}"
[adapter]
config = "{adapter}"
[train]
method = "all"
optimizer = "adamw"
max_steps = 6
batch_size = 4
microbatches = 2
max_length = 128
local_iterations = 6
eval_every = 0
[offload]
mode = {mode}
[runtime]
threads = 1
lease_s = 60
wait_s = 300
"""
ADAPTERS: Final = {
    "linear": "linear[attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]",
}


def layout(train: Path, held_out: Path) -> Layout:
    """The three boards."""
    return Layout(
        boards=tuple(
            Board(
                name=name,
                cpu_cores=cores,
                memory_bytes=4 << 30,
                up_bytes_per_s=125e6,
                down_bytes_per_s=125e6,
                data=train if name == "owner" else None,
                eval_data=held_out if name == "owner" else None,
            )
            for name, cores in CORES.items()
        ),
        name="rtcola",
        cpu_period_s=0.02,
    )


def write_job(folder: Path, model: Path, name: str, *, is_helped: bool) -> Path:
    """The job of one adapter, with the helper or without."""
    path = folder / f"{name}-{'helped' if is_helped else 'alone'}.toml"
    mode = '{weak = "strong"}' if is_helped else '"off"'
    path.write_text(JOB.format(model=model, adapter=ADAPTERS[name], mode=mode), encoding="utf-8")
    return path


def command(*words: str) -> list[str]:
    """A command line that asks the testbed's coordinator."""
    return [sys.executable, "-P", "-m", "ringtune.cli", *words, "--coordinator", "{coordinator}", "--insecure"]


def plans(bed: Testbed, folder: Path, alone: Path) -> dict[bool, Path]:
    """The plan without and with help, with all blocks but the top one on the weak board."""
    drawn = folder / "drawn.json"
    if code := bed.run(command("plan", str(alone), "--save", str(drawn)), timeout_s=RUN_S):
        raise RuntimeError(f"planning ended with exit code {code}")
    plan = read_given_plan(drawn).plan
    top = plan.course.num_blocks
    plan = changed(plan, slices=[("weak", 0, top - 1), ("owner", top - 1, top), ("strong", top, top)])
    written = {}
    for is_helped in (False, True):
        path = written[is_helped] = folder / f"plan-{is_helped}.json"
        found = helped(plan, {"weak": "strong"} if is_helped else {})
        path.write_text(json.dumps(found.to_json()), encoding="utf-8")
    return written


def step_s(bed: Testbed, job: Path, plan: Path, out: Path) -> float:
    """Seconds of the median step of a run."""
    words = ["train", str(job), "--plan", str(plan), "--out", str(out), "--replace"]
    if code := bed.run(command(*words), timeout_s=RUN_S):
        raise RuntimeError(f"a run ended with exit code {code}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [float(line["seconds"]) for line in lines if is_step(line)]
    return statistics.median(steps[FIRST:])


def measure(folder: Path) -> Figures:
    """Run in turns, without and with help."""
    model = write_model(folder / "model", vocabulary=2000, num_hidden_layers=3)
    train = write_rows(folder / "train.csv", rows=64, tokens=128)
    held_out = write_rows(folder / "eval.csv", rows=4, tokens=128)
    found: Figures = {"cores": CORES, "adapters": {}}
    with Testbed(layout(train, held_out), folder=folder / "bed") as bed:
        bed.start_coordinator(lease_s=60.0)
        bed.start_agents(AgentSetup(budgets={}))
        for name in ADAPTERS:
            jobs = {is_helped: write_job(folder, model, name, is_helped=is_helped) for is_helped in (False, True)}
            given = plans(bed, folder, jobs[False])
            pairs = []
            for at in range(PAIRS):
                alone_s, helped_s = (
                    step_s(bed, jobs[way], given[way], folder / f"run-{name}-{at}-{way}") for way in (False, True)
                )
                pairs.append({"alone_s": alone_s, "helped_s": helped_s, "speedup": alone_s / helped_s})
                print(f"{name} pair {at}: {alone_s:.3f} s alone, {helped_s:.3f} s helped", flush=True)  # noqa: T201
            found["adapters"][name] = pairs
    speedups = [pair["speedup"] for pair in found["adapters"]["linear"]]
    found["figures"] = {
        "offload_step_speedup": statistics.median(speedups),
        "least_speedup": min(speedups),
        "most_speedup": max(speedups),
    }
    return found


def missed(found: Figures) -> list[str]:
    """What misses its bound."""
    speedup = found["figures"]["offload_step_speedup"]
    return [f"offload_step_speedup is {speedup:.2f}, it has to be at least {LEAST}"] if speedup < LEAST else []
