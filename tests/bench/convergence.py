"""Loss and accuracy against steps and against time: Single, PipeAdapter and RingAda on real data, three seeds.

``python -m tests.bench.convergence`` trains MiniLM on the demo's sentences with four local nodes, each method with
each seed on the very same batches, and evaluates every ``EVAL_EVERY`` steps. Time is predicted, not taken from the
local run (four processes share this machine's cores): the simulator runs each plan on four equal boards, measured as
one node of this machine and joined by ``RATE_BYTES_PER_S``. Single's time is that of one such board that owns all rows
and waits for no link; ``single_owners_elsewhere`` has its rows where the ring has them. Writes
``build/bench/convergence.json`` and, where matplotlib is installed, ``convergence.svg``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.demo.fetch import demo_cache
from coordinator.demo.workspace import prepare
from coordinator.records.step_lines import is_step
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.schedule.extent import Owner
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.versions import depth
from sim.prediction import predict
from tests.bench.jobs import write_job
from tests.bench.rings import run
from tests.support.plans import changed

OUT = Path("build/bench/convergence")
METHODS = ("single", "pipeadapter", "ringada")
SEEDS = (0, 1, 2)
STEPS, EVERY_STEPS, EVAL_EVERY, WINDOW = 160, 20, 40, 20
RATE_BYTES_PER_S, LATENCY_S = 12.5e6, 5e-4
Figures = dict[str, Any]


def job_file(path: Path, *, model: Path, folder: Path, method: str, seed: int) -> Path:
    """The job of one run."""
    more = {
        "data.eval": str((folder / "held_out.csv").resolve()),
        "train.eval_every": EVAL_EVERY,
        "train.seed": seed,
        "unfreeze.every_steps": EVERY_STEPS,
    }
    return write_job(path, model=model, train=folder / "train.csv", method=method, steps=STEPS, more=more)


def ringtune(*arguments: str) -> str:
    """Run the command line in a process of its own."""
    return run([sys.executable, "-m", "ringtune.cli", *arguments])


def curves(run_folder: Path) -> Figures:
    """Loss of every step, accuracy and loss of every evaluation, from a run's metrics."""
    losses: dict[int, float] = {}
    for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if is_step(entry):
            losses[int(entry["step"])] = float(entry["loss"])
    report = json.loads((run_folder / "report.json").read_text(encoding="utf-8"))
    evaluations = {int(entry["step"]): entry for entry in report["evaluations"]}
    return {"losses": [losses[step] for step in sorted(losses)], "evaluations": evaluations}


def equal_boards(node: NodeFacts, names: Sequence[str], rows: Mapping[str, int]) -> Profile:
    """Boards like the measured node, every one joined with every other."""
    boards = tuple(dataclasses.replace(node, node=name, train_rows=rows[name]) for name in sorted(names))
    links = tuple(
        LinkFacts(source=source, target=target, rate_bytes_per_s=RATE_BYTES_PER_S, latency_s=LATENCY_S)
        for source in names
        for target in names
        if source != target
    )
    return Profile(nodes=boards, links=links)


def seconds_of_steps(plan: Plan, profile: Profile) -> list[float]:
    """Predicted seconds from the start to the end of each step, without evaluations."""
    owners = tuple(dataclasses.replace(owner, eval_rows=0) for owner in plan.course.owners)
    bare = changed(plan, eval_every=0, owners=owners)
    step_s = {each.depth: each.step_s for each in predict(bare, profile).depths}
    passed_s, ends_s = 0.0, []
    for step in range(plan.course.num_steps):
        passed_s += step_s[depth(plan.course, step)]
        ends_s.append(passed_s)
    return ends_s


def on_one_board(plan: Plan) -> Plan:
    """The same steps on one board that owns all rows."""
    board = plan.nodes[0]
    owner = Owner(node=board, train_rows=sum(owner.train_rows for owner in plan.course.owners), eval_rows=0)
    return changed(plan, owners=(owner,), slices=((board, 0, plan.course.num_blocks),))


def smooth(losses: Sequence[float]) -> list[float]:
    """Mean of the last ``WINDOW`` steps."""
    return [statistics.fmean(losses[max(0, at + 1 - WINDOW) : at + 1]) for at in range(len(losses))]


def first_at_most(values: Sequence[float], bound: float) -> int | None:
    """Where a curve first comes down to ``bound``, after the first window."""
    return next((at for at, value in enumerate(values) if at >= WINDOW - 1 and value <= bound), None)


def compare(runs: Mapping[str, Mapping[int, Figures]], step_ends_s: Mapping[str, Sequence[float]]) -> Figures:
    """Where each method stands at the end, and when it has the worst method's final loss."""
    smoothed = {
        method: {seed: smooth(found["losses"]) for seed, found in seeds.items()} for method, seeds in runs.items()
    }
    result: Figures = {}
    for seed in next(iter(runs.values())):
        bound = max(smoothed[method][seed][-1] for method in runs)
        for method in runs:
            at = first_at_most(smoothed[method][seed], bound)
            row = result.setdefault(method, {"steps_to_equal_loss": [], "seconds_to_equal_loss": [], "bounds": []})
            row["bounds"].append(bound)
            row["steps_to_equal_loss"].append(None if at is None else at + 1)
            row["seconds_to_equal_loss"].append(None if at is None else step_ends_s[method][at])
    for method, seeds in runs.items():
        last = [found["evaluations"][max(found["evaluations"])] for found in seeds.values()]
        result[method]["final_loss"] = [smoothed[method][seed][-1] for seed in seeds]
        result[method]["final_accuracy"] = [each["accuracy"] for each in last]
        result[method]["total_s"] = step_ends_s[method][-1]
    return result


def plot(path: Path, runs: Mapping[str, Mapping[int, Figures]], step_ends_s: Mapping[str, Sequence[float]]) -> str:
    """Draw both axes; says what it did."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (extra [plots])"
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, ((left, right), (below_left, below_right)) = pyplot.subplots(2, 2, figsize=(9, 6.5))
    for colour, method in zip(("tab:grey", "tab:orange", "tab:blue"), METHODS, strict=True):
        for seed, found in runs[method].items():
            label = method if seed == SEEDS[0] else None
            losses, ends_s = smooth(found["losses"]), step_ends_s[method]
            left.plot(range(1, len(losses) + 1), losses, color=colour, label=label, linewidth=1)
            right.plot(ends_s, losses, color=colour, linewidth=1)
            steps = sorted(found["evaluations"])
            accuracies = [found["evaluations"][step]["accuracy"] for step in steps]
            below_left.plot(steps, accuracies, color=colour, marker="o", markersize=3, linewidth=1)
            below_right.plot([ends_s[step - 1] for step in steps], accuracies, color=colour, marker="o", markersize=3)
    left.set(ylabel=f"training loss, mean of {WINDOW} steps")
    below_left.set(xlabel="steps", ylabel="held-out accuracy")
    below_right.set(xlabel="predicted seconds on four equal boards")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return f"plot: {path}"


def main() -> None:
    """Train, evaluate, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    workspace = prepare(OUT / "demo", demo_cache())
    folder = workspace.job.parent
    first = job_file(OUT / "measure.toml", model=workspace.model, folder=folder, method="ringada", seed=0)
    ringtune("measure", str(first), "--local", "1", "--fresh", "--save", str(OUT / "profile.json"))
    node = Profile.from_json(json.loads((OUT / "profile.json").read_text(encoding="utf-8"))).nodes[0]
    runs: dict[str, dict[int, Figures]] = {}
    ends: dict[str, list[float]] = {}
    for method in METHODS:
        for seed in SEEDS[: options.seeds]:
            name = f"{method}-{seed}"
            job = job_file(OUT / f"{name}.toml", model=workspace.model, folder=folder, method=method, seed=seed)
            ringtune("train", str(job), "--local", "4", "--out", str(OUT / name), "--replace")
            runs.setdefault(method, {})[seed] = curves(OUT / name)
            accuracies = {step: round(each["accuracy"], 4) for step, each in runs[method][seed]["evaluations"].items()}
            print(f"{name}: accuracy by step {accuracies}", flush=True)  # noqa: T201
        plan = Plan.from_json(json.loads((OUT / f"{method}-{SEEDS[0]}" / "plan.json").read_text(encoding="utf-8")))
        rows = {owner.node: owner.train_rows for owner in plan.course.owners}
        ends[method] = seconds_of_steps(plan, equal_boards(node, plan.nodes, rows))
        if method == "single":
            ends["single_owners_elsewhere"] = ends[method]
            ends[method] = seconds_of_steps(on_one_board(plan), equal_boards(node, plan.nodes, rows))
    elsewhere = compare(runs, ends | {"single": ends["single_owners_elsewhere"]})["single"]
    comparison = compare(runs, ends) | {"single_owners_elsewhere": elsewhere}
    figures = {"comparison": comparison, "step_ends_s": ends, "runs": runs}
    (OUT.parent / "convergence.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures["comparison"], indent=1))  # noqa: T201
    print(plot(OUT.parent / "convergence.svg", runs, ends))  # noqa: T201


if __name__ == "__main__":
    main()
