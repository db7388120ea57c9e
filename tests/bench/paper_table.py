"""RingAda's Table I on the virtual clock: Single, PipeAdapter and RingAda on four equal boards, per depth and in total.

Parts ``paper`` and ``stages`` of ``make bench-sim``. One node with a model of mBERT's shape is measured, four such
boards at ``SPEED`` of this machine's core are joined by links of ``RATE``, and 700 steps of 16 rows of 128 tokens are
predicted, one more block every 40 steps. No number comes from the paper or is fitted to it.

The paper gives seconds to convergence, and for that different numbers of epochs; per epoch its ratios are others.
Steps are equal here, so what compares is its time per epoch: 3.32x over Single and 1.48x over PipeAdapter.

Memory is compared at equal numbers of micro-batches, because Single with more of them holds fewer activations too.
PipeAdapter fills and drains its pipeline in every turn of ``LOCAL_ITERATIONS`` steps, as rounds ask for; the run
``pipeadapter-undrained`` has one owner and one turn, which is the most that a stale pipeline can be worth.

In ``stages`` the planner places RingAda's 700 steps on these boards twice: with memory for everything, and with 5 %
less than any board needs that hosts all blocks. The first one runs again with rows that come twice, with and without a
cache of hidden states. All methods have their best number of micro-batches up to 16, with the costs of small ones as
measured. The ideal stale pipeline is the work of the busiest board alone: it never waits for a tensor and is never
drained.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.planner import make_plan as planner
from coordinator.planner.limits import Effort
from coordinator.planner.planned import Planned
from coordinator.planner.replicas import layout_text
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.job.job import Job, load_job
from ringtune.schedule.methods import RingAda
from ringtune.schedule.placement import CREDITS, ActivationCacheSettings, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.versions import depth
from sim.prediction import Prediction, predict
from tests.bench.rings import BATCH_SIZE, ROWS, TOKENS, run, write_job, write_model, write_rows
from tests.support.plans import changed, make_plan

OUT = Path("build/bench/paper")
BOARDS = ("board-0", "board-1", "board-2", "board-3")
SPEED = 0.4
RATE_BYTES_PER_S = 125e6
LATENCY_S = 5e-4
STEPS, EVERY_STEPS, LOCAL_ITERATIONS, NUM_BLOCKS = 700, 40, 10, 12
MICROBATCHES = (1, 4, 8, 16)
UNDRAINED = "pipeadapter-undrained"
# Distinct word pieces of the SQuAD v1.1 development set (BERT's English vocabulary): of all 48 articles, and of the
# fullest of four quarters of them. Only these rows of the table are ever read.
TOUCHED_BY_ALL, TOUCHED_BY_A_QUARTER = 18_264, 10_646
TABLE_I = {
    "single": {"memory_mb": 1035.04, "convergence_s": 5103.60, "epochs": 600, "f1": 80.08},
    "pipeadapter": {"memory_mb": 432.576, "convergence_s": 2428.72, "epochs": 640, "f1": 78.61},
    "ringada": {"memory_mb": 373.056, "convergence_s": 1793.18, "epochs": 700, "f1": 77.34},
}
SHOWN = (
    "even_speedup_over_single",
    "even_speedup_over_pipeadapter",
    "pipeadapter_over_single",
    "undrained_pipeadapter_over_single",
    "speedup_over_undrained_pipeadapter",
    *(f"memory_over_single{kind}_{count}" for kind in ("", "_resident") for count in MICROBATCHES),
)


@functools.cache
def measure(folder: Path = OUT) -> NodeFacts:
    """Measure one node of this machine with each number of micro-batches; all points in one record."""
    model, train = write_model(folder / "model"), write_rows(folder / "train.csv")
    found: list[NodeFacts] = []
    for microbatches in MICROBATCHES:
        job = write_job(
            folder / f"measure-{microbatches}.toml",
            model=model,
            train=train,
            steps=STEPS,
            microbatches=microbatches,
            tokens=TOKENS,
            more={"data.owners": 1, "train.local_iterations": LOCAL_ITERATIONS, "unfreeze.every_steps": EVERY_STEPS},
        )
        out = folder / f"profile-{microbatches}.json"
        run([sys.executable, "-m", "ringtune.cli", "measure", str(job), "--local", "1", "--fresh", "--save", str(out)])
        found.append(Profile.from_json(json.loads(out.read_text(encoding="utf-8"))).nodes[0])
    points = {(time.work, time.rows, time.tokens): time for node in found for time in node.work_times}
    return dataclasses.replace(found[0], work_times=tuple(points.values()))


def four_boards(node: NodeFacts) -> Profile:
    """Four boards like the measured node, at ``SPEED`` of it."""
    boards = tuple(
        dataclasses.replace(node.at_pace(1 / SPEED), node=name, train_rows=ROWS // len(BOARDS)) for name in BOARDS
    )
    links = tuple(
        LinkFacts(source=source, target=target, rate_bytes_per_s=RATE_BYTES_PER_S, latency_s=LATENCY_S)
        for source in BOARDS
        for target in BOARDS
        if source != target
    )
    return Profile(nodes=boards, links=links)


def plan_of(
    method: str, microbatches: int, *, hosts: int = 4, owners: int = 4, local_iterations: int = LOCAL_ITERATIONS
) -> Plan:
    """The plan of a run: even slices; all rows belong to the first ``owners`` boards."""
    each = NUM_BLOCKS // hosts
    return make_plan(
        [(BOARDS[at], at * each, (at + 1) * each) for at in range(hosts)],
        BOARDS[:owners],
        method=method,
        num_blocks=NUM_BLOCKS,
        train_rows=ROWS // owners,
        eval_rows=0,
        num_steps=STEPS,
        local_iterations=local_iterations,
        every_steps=EVERY_STEPS,
        batch_size=BATCH_SIZE,
        microbatches=microbatches,
        max_length=TOKENS,
        hidden_size=768,
        labels=("bad", "good"),
        credits_per_channel=CREDITS,
    )


def seconds_by_ringada_depth(prediction: Prediction, plan: Plan) -> dict[int, float]:
    """A run's seconds over the steps in which RingAda has each depth; methods without depths are even."""
    if plan.course.method.name == "ringada":
        return {each.depth: each.wall_s for each in prediction.depths}
    view = dataclasses.replace(plan.course, method=RingAda(every_steps=EVERY_STEPS))
    step_s = prediction.train_s / plan.course.num_steps
    found: dict[int, float] = {}
    for step in range(plan.course.num_steps):
        found[depth(view, step)] = found.get(depth(view, step), 0.0) + step_s
    return found


def table(node: NodeFacts) -> dict[str, Any]:
    """All methods: seconds per depth and in total, memory of the fullest node in two ways of counting."""
    profile = four_boards(node)
    row_bytes = node.model.hidden_size * 4
    runs: dict[str, Any] = {}
    plans = {f"single-{count}": plan_of("single", count, hosts=1, owners=1) for count in MICROBATCHES}
    for method in ("pipeadapter", "ringada"):
        plans |= {f"{method}-{count}": plan_of(method, count) for count in MICROBATCHES}
    plans[UNDRAINED] = plan_of("pipeadapter", MICROBATCHES[-1], owners=1, local_iterations=STEPS)
    for name, plan in plans.items():
        rows = TOUCHED_BY_A_QUARTER if len(plan.course.owners) > 1 else TOUCHED_BY_ALL
        touched = predict(plan, profile, embedding_bytes=rows * row_bytes)
        resident = predict(plan, profile)
        runs[name] = {
            "total_s": touched.train_s,
            "by_depth_s": seconds_by_ringada_depth(touched, plan),
            "bubble_share": touched.bubble_share,
            "memory_touched_bytes": max(each.peak_memory_bytes for each in touched.nodes),
            "memory_resident_bytes": max(each.peak_memory_bytes for each in resident.nodes),
        }
    best = {
        method: min((f"{method}-{count}" for count in MICROBATCHES), key=lambda name: runs[name]["total_s"])
        for method in TABLE_I
    }
    single, pipe, ringada = (runs[best[method]] for method in TABLE_I)
    return {
        "boards": {"speed": SPEED, "rate_bytes_per_s": RATE_BYTES_PER_S, "tokens": TOKENS, "batch": BATCH_SIZE},
        "touched_embedding_rows": {"single": TOUCHED_BY_ALL, "a board of four": TOUCHED_BY_A_QUARTER},
        "runs": runs,
        "best": best,
        "even_speedup_over_single": single["total_s"] / ringada["total_s"],
        "even_speedup_over_pipeadapter": pipe["total_s"] / ringada["total_s"],
        "speedup_over_single_by_depth": _ratios(single["by_depth_s"], ringada["by_depth_s"]),
        "speedup_over_pipeadapter_by_depth": _ratios(pipe["by_depth_s"], ringada["by_depth_s"]),
        "pipeadapter_over_single": single["total_s"] / pipe["total_s"],
        "undrained_pipeadapter_over_single": single["total_s"] / runs[UNDRAINED]["total_s"],
        "speedup_over_undrained_pipeadapter": runs[UNDRAINED]["total_s"] / ringada["total_s"],
        **{
            f"memory_over_single{kind}_{count}": runs[f"ringada-{count}"][key] / runs[f"single-{count}"][key]
            for kind, key in (("", "memory_touched_bytes"), ("_resident", "memory_resident_bytes"))
            for count in MICROBATCHES
        },
        "table_i": TABLE_I,
        "table_i_per_epoch_s": {name: row["convergence_s"] / row["epochs"] for name, row in TABLE_I.items()},
    }


def _ratios(over: Mapping[int, float], under: Mapping[int, float]) -> dict[int, float]:
    return {key: over[key] / under[key] for key in sorted(under)}


STAGES_SHOWN = (
    "speedup_over_single",
    "speedup_over_ideal_stale",
    "speedup_over_pipeadapter",
    "tight_speedup_over_single",
    "tight_speedup_over_ideal_stale",
    "cached_speedup_over_ideal_stale",
    "uncached_speedup_over_ideal_stale",
)
_PLAN_S = 120.0


def stages_table(node: NodeFacts, job: Job) -> dict[str, Any]:
    """Seconds of 700 steps of every method, and of RingAda on the planner's stages, with the fullest node's bytes."""
    profile, counts = four_boards(node), MICROBATCHES
    runs: dict[str, dict[str, Any]] = {}
    for count in counts:
        plans = {
            "single": plan_of("single", count, hosts=1, owners=1),
            "pipeadapter": plan_of("pipeadapter", count),
            "undrained": plan_of("pipeadapter", count, owners=1, local_iterations=STEPS),
        }
        runs |= {f"{name}-{count}": _row(predict(plan, profile)) for name, plan in plans.items()}
    best = {name: min(runs[f"{name}-{count}"]["total_s"] for count in counts) for name in ("single", "pipeadapter")}
    ideal_s = min(runs[f"undrained-{count}"]["busiest_s"] for count in counts)
    roomy = planned(job, profile)
    tight = planned(job, with_budget(profile, int(0.95 * min_bytes(profile))))
    found: dict[str, Any] = {"runs": runs, "best_s": best, "ideal_stale_s": ideal_s}
    for name, one in (("planned", roomy), ("tight", tight)):
        row = found[name] = _row(predict(one.plan, profile))
        row |= {"stages": layout_text(one.plan), "microbatches": one.plan.course.microbatches}
    for name, cache in (("uncached", None), ("cached", ActivationCacheSettings())):
        found[name] = _row(predict(twice(roomy.plan, cache), profile))
    planned_s, tight_s = found["planned"]["total_s"], found["tight"]["total_s"]
    return found | {
        "speedup_over_single": best["single"] / planned_s,
        "speedup_over_ideal_stale": ideal_s / planned_s,
        "speedup_over_pipeadapter": best["pipeadapter"] / planned_s,
        "tight_speedup_over_single": best["single"] / tight_s,
        "tight_speedup_over_ideal_stale": ideal_s / tight_s,
        "cached_speedup_over_ideal_stale": ideal_s / found["cached"]["total_s"],
        "uncached_speedup_over_ideal_stale": ideal_s / found["uncached"]["total_s"],
    }


def planned(job: Job, profile: Profile) -> Planned:
    """Let the planner place the job on the boards, with any number of micro-batches of the table."""
    effort = Effort(seconds=_PLAN_S)
    return planner.make_plan(job, profile.by_name, links=profile.links, microbatches=MICROBATCHES, effort=effort)


def twice(plan: Plan, cache: ActivationCacheSettings | None) -> Plan:
    """The plan with so many rows that each comes twice in the 700 steps, with or without a cache of hidden states."""
    course = plan.course
    rows = course.num_steps * course.batch_size // (2 * len(course.owners))
    owners = tuple(dataclasses.replace(owner, train_rows=rows) for owner in course.owners)
    placement = dataclasses.replace(plan.placement, cache=cache)
    return Plan(dataclasses.replace(course, owners=owners), (placement,))


def min_bytes(profile: Profile) -> int:
    """The least that a board needs that hosts all blocks, with any number of micro-batches."""
    found = []
    for count in MICROBATCHES:
        plan = plan_of("ringada", count)
        pieces = tuple(Slice(node=board, start=0, stop=NUM_BLOCKS) for board in BOARDS)
        found.append(min(node.needed_bytes for node in predict(changed(plan, slices=pieces), profile).nodes))
    return min(found)


def with_budget(profile: Profile, memory_bytes: int) -> Profile:
    """The boards with so much memory."""
    nodes = tuple(dataclasses.replace(node, memory_bytes=memory_bytes) for node in profile.nodes)
    return dataclasses.replace(profile, nodes=nodes)


def job_of() -> Job:
    """The job that the boards were measured for."""
    job = load_job(OUT / "measure-1.toml")
    return job.with_overrides({"train.microbatches": 1})


def _row(found: Prediction) -> dict[str, Any]:
    return {
        "total_s": found.train_s,
        "busiest_s": max(node.busy_s for node in found.nodes),
        "bubble_share": found.bubble_share,
        "fullest_bytes": max(node.peak_memory_bytes for node in found.nodes),
        "needed_bytes": max(node.needed_bytes for node in found.nodes),
    }
