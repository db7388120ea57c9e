"""``python -m tests.bench.schemes``: RingAda's Figure 3 in small: answers by Single, PipeAdapter and RingAda.

Trains the job of ``docs/examples/squad`` (MiniLM, SQuAD's development set by article, four local nodes of equal slices,
``seq_bn``) by each method with each seed on the very same batches, and evaluates ``HELD_OUT`` questions of other
articles every ``EVAL_EVERY`` steps. Seconds are predicted, as four processes share this machine's cores: the simulator
runs each plan on four equal boards of ``SPEED`` of this machine's core, joined by ``RATE_BYTES_PER_S``. Single's time
is that of one such board that has all rows and waits for no link.

Every run keeps its result in ``build/bench/schemes/runs``; one that has one is not repeated: remove the folder after a
change of the code. Writes ``build/bench/schemes.json``, ``.md`` and ``.svg``, losses over steps and over seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from coordinator.api.output import Plot
from coordinator.run.run_text import is_step
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.job.job import load_job
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.versions import depth
from ringtune.storage.durable import write_durably
from sim.prediction import predict
from tests.bench.kept_results import conclude, kept_result, results_of
from tests.bench.rings import run, run_ring
from tests.support.plans import changed

OUT = Path("build/bench/schemes")
EXAMPLE, PREPARED = Path("docs/examples/squad/job.toml"), Path("build/examples/squad")
METHODS = {"single": "tab:grey", "pipeadapter": "tab:orange", "ringada": "tab:blue"}
NODES = tuple(f"node-{number}" for number in range(4))
STEPS, EVERY_STEPS, EVAL_EVERY, WINDOW, HELD_OUT = 240, 20, 60, 20, 300
SPEED, RATE_BYTES_PER_S, LATENCY_S = 0.1, 12.5e6, 1e-3


def write_job(path: Path, method: str, seed: int) -> Path:
    """Write the job of one run: that of the example, longer, with evaluations of fewer questions."""
    held_out = OUT / "held_out.jsonl"
    with (PREPARED / held_out.name).open(encoding="utf-8") as file:
        write_durably(held_out, "".join(islice(file, HELD_OUT)).encode())
    keys: dict[str, object] = {
        "data.eval": str(held_out.resolve()),
        "train.method": method,
        "train.max_steps": STEPS,
        "train.eval_every": EVAL_EVERY,
        "train.checkpoint_every": 0,
        "train.seed": seed,
        "runtime.threads": 1,
        "recovery.copies": "none",
    }
    if method == "ringada":
        keys["unfreeze.every_steps"] = EVERY_STEPS
    write_durably(path, load_job(EXAMPLE).with_overrides(keys).to_toml().encode())
    return path


def train(method: str, seed: int) -> dict[str, Any]:
    """Train with four local nodes; returns the loss of each step, the evaluations, and the plan."""
    began_s = time.monotonic()
    ring = run_ring(write_job(OUT / f"{method}-{seed}.toml", method, seed), OUT / f"{method}-{seed}", nodes=len(NODES))
    lines = (json.loads(line) for line in (ring.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = {int(line["step"]): float(line["loss"]) for line in lines if is_step(line)}
    return {
        "method": method,
        "seed": seed,
        "losses": [losses[step] for step in sorted(losses)],
        "evaluations": ring.report["evaluations"],
        "f1": ring.report["eval"]["f1"],
        "exact_match": ring.report["eval"]["exact_match"],
        "accuracy": ring.report["eval"]["f1"],
        "plan": json.loads((ring.folder / "plan.json").read_text(encoding="utf-8")),
        "seconds": time.monotonic() - began_s,
    }


def measured_node() -> NodeFacts:
    """One node of this machine, measured once."""
    out = OUT / "profile.json"
    if not out.exists():
        job = write_job(OUT / "measure.toml", "ringada", 0)
        run([sys.executable, "-m", "ringtune.cli", "measure", str(job), "--local", "1", "--fresh", "--save", str(out)])
    return Profile.from_json(json.loads(out.read_text(encoding="utf-8"))).nodes[0]


def step_ends_s(plan: Plan, node: NodeFacts) -> list[float]:
    """Predict the seconds from the start to the end of each step on four equal boards, without evaluations."""
    owners = tuple(dataclasses.replace(owner, eval_rows=0) for owner in plan.course.owners)
    if plan.course.method.name == "single":
        board = plan.nodes[0]
        owners = (Owner(node=board, train_rows=sum(owner.train_rows for owner in owners), eval_rows=0),)
        plan = changed(plan, slices=((board, 0, plan.course.num_blocks),))
    plan = changed(plan, eval_every=0, owners=owners)
    rows = {owner.node: owner.train_rows for owner in owners}
    boards = [
        dataclasses.replace(node.at_pace(1 / SPEED), node=name, train_rows=rows.get(name, 0)) for name in plan.nodes
    ]
    links = [
        LinkFacts(source=source, target=target, rate_bytes_per_s=RATE_BYTES_PER_S, latency_s=LATENCY_S)
        for source in plan.nodes
        for target in plan.nodes
        if source != target
    ]
    predicted = predict(plan, Profile(nodes=tuple(boards), links=tuple(links)))
    step_s = {each.depth: each.step_s for each in predicted.depths}
    passed_s, ends_s = 0.0, []
    for step in range(plan.course.num_steps):
        passed_s += step_s[depth(plan.course, step)]
        ends_s.append(passed_s)
    return ends_s


def smooth(losses: Sequence[float]) -> list[float]:
    """Mean of the last ``WINDOW`` steps, or of as many as there are."""
    return [statistics.fmean(losses[max(0, at + 1 - WINDOW) : at + 1]) for at in range(len(losses))]


def rows_of_table(runs: Sequence[Mapping[str, Any]], ends_s: Mapping[str, Sequence[float]]) -> Iterator[list[str]]:
    """For each method: F1, exact match, loss at the end, and when it has the loss that the worst one ends with."""
    yield [
        "method",
        "F1",
        "exact match",
        "loss, last 20 steps",
        "steps to the worst one's loss",
        "seconds to it",
        "all",
    ]
    yield ["---"] * 7
    worst = {seed: max(smooth(run["losses"])[-1] for run in runs if run["seed"] == seed) for seed in seeds_of(runs)}
    for method in METHODS:
        own = [run for run in runs if run["method"] == method]
        reached = [
            next(at for at, loss in enumerate(smooth(run["losses"])) if at + 1 >= WINDOW and loss <= worst[run["seed"]])
            for run in own
        ]
        yield [
            method,
            ", ".join(f"{100 * run['f1']:.1f} %" for run in own),
            ", ".join(f"{100 * run['exact_match']:.1f} %" for run in own),
            ", ".join(f"{smooth(run['losses'])[-1]:.2f}" for run in own),
            ", ".join(str(at + 1) for at in reached),
            ", ".join(f"{ends_s[method][at]:.0f}" for at in reached),
            f"{ends_s[method][-1]:.0f}",
        ]


def seeds_of(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    """The seeds with which every method was trained."""
    return sorted(set.intersection(*({run["seed"] for run in runs if run["method"] == name} for name in METHODS)))


def plot(runs: Sequence[Mapping[str, Any]], ends_s: Mapping[str, Sequence[float]]) -> Plot:
    """Draw loss and F1 over steps and over predicted seconds, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    for each in runs:
        method, steps = each["method"], [evaluation["step"] for evaluation in each["evaluations"]]
        scores = [100 * evaluation["f1"] for evaluation in each["evaluations"]]
        label = method if each["seed"] == runs[0]["seed"] else None
        numbers = range(1, len(each["losses"]) + 1)
        for column, x_of in enumerate((numbers, ends_s[method])):
            axes[0][column].plot(x_of, smooth(each["losses"]), color=METHODS[method], label=label, linewidth=1)
            at = [x_of[step - 1] for step in steps]
            axes[1][column].plot(at, scores, "o-", color=METHODS[method], linewidth=1, markersize=3)
    axes[0][0].set(ylabel=f"training loss, mean of {WINDOW} steps")
    axes[1][0].set(ylabel="F1 of held-out questions (%)", xlabel="steps")
    axes[1][1].set(xlabel="predicted seconds on four boards")
    axes[0][0].legend()
    return Plot(figure, "schemes")


def main() -> int:
    """Train what has no result yet; predict, compare and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    if not (PREPARED / "held_out.jsonl").exists():
        run([sys.executable, "-m", "docs.examples.squad.prepare", "--to", str(PREPARED)])
    OUT.mkdir(parents=True, exist_ok=True)
    node = measured_node()
    for seed in options.seeds:
        for method in METHODS:
            kept_result(OUT / "runs" / f"{method}-{seed}.json", functools.partial(train, method, seed))
    runs = [each for each in results_of(OUT / "runs") if each["seed"] in options.seeds]
    ends_s = {each["method"]: step_ends_s(Plan.from_json(each["plan"]), node) for each in runs}
    picture = OUT.with_suffix(".svg")
    plot(runs, ends_s).save(picture)
    table = "".join("| " + " | ".join(row) + " |\n" for row in rows_of_table(runs, ends_s))
    return conclude(
        OUT, [{**each, "step_ends_s": ends_s[each["method"]]} for each in runs], table, [], is_tried_out=False
    )


if __name__ == "__main__":
    sys.exit(main())
