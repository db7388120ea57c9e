"""What the planner's choice is worth on four equal boards: stages with several hosts beside the paper's methods.

``python -m tests.bench.stages_table`` takes the boards of ``tests.bench.paper_table`` and lets the planner place
RingAda's 700 steps twice: with memory for everything, and with 5 % less than any board needs that hosts all blocks.
The first one runs again with rows that come twice, with and without a cache of hidden states. All methods have their
best number of micro-batches up to 16, with the costs of small ones as measured.

The ideal stale pipeline is the work of the busiest board alone: it never waits for a tensor and is never drained.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from coordinator.planner.limits import Effort
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned
from coordinator.planner.replicas import layout_text
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.job.job import Job, load_job
from ringtune.schedule.placement import ActivationCacheSettings, Slice
from ringtune.schedule.plan import Plan
from sim.prediction import Prediction, predict
from tests.bench import paper_table
from tests.support.plans import changed

SHOWN = (
    "speedup_over_single",
    "speedup_over_ideal_stale",
    "speedup_over_pipeadapter",
    "tight_speedup_over_single",
    "tight_speedup_over_ideal_stale",
    "cached_speedup_over_ideal_stale",
    "uncached_speedup_over_ideal_stale",
)
_PLAN_S = 120.0


def table(node: NodeFacts, job: Job) -> dict[str, Any]:
    """Seconds of 700 steps of every method, and of RingAda on the planner's stages, with the fullest node's bytes.

    Args:
        node: as ``paper_table.measure`` gives it.
        job: that it was measured for.
    """
    profile, counts = paper_table.four_boards(node), paper_table.MICROBATCHES
    runs: dict[str, dict[str, Any]] = {}
    for count in counts:
        plans = {
            "single": paper_table.plan_of("single", count, hosts=1, owners=1),
            "pipeadapter": paper_table.plan_of("pipeadapter", count),
            "undrained": paper_table.plan_of("pipeadapter", count, owners=1, local_iterations=paper_table.STEPS),
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
    return make_plan(job, profile.by_name, links=profile.links, microbatches=paper_table.MICROBATCHES, effort=effort)


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
    for count in paper_table.MICROBATCHES:
        plan = paper_table.plan_of("ringada", count)
        pieces = tuple(Slice(node=board, start=0, stop=paper_table.NUM_BLOCKS) for board in paper_table.BOARDS)
        found.append(min(node.needed_bytes for node in predict(changed(plan, slices=pieces), profile).nodes))
    return min(found)


def with_budget(profile: Profile, memory_bytes: int) -> Profile:
    """The boards with so much memory."""
    nodes = tuple(dataclasses.replace(node, memory_bytes=memory_bytes) for node in profile.nodes)
    return dataclasses.replace(profile, nodes=nodes)


def job_of() -> Job:
    """The job that the boards were measured for."""
    job = load_job(paper_table.OUT / "measure-1.toml")
    return job.with_overrides({"train.microbatches": 1})


def _row(found: Prediction) -> dict[str, Any]:
    return {
        "total_s": found.train_s,
        "busiest_s": max(node.busy_s for node in found.nodes),
        "bubble_share": found.bubble_share,
        "fullest_bytes": max(node.peak_memory_bytes for node in found.nodes),
        "needed_bytes": max(node.needed_bytes for node in found.nodes),
    }


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The table for people."""
    rows = {**figures["runs"], **{name: figures[name] for name in ("planned", "tight", "uncached", "cached")}}
    text = [f"{'run':<16} total s  busiest s  bubble  fullest MB"]
    for name, row in rows.items():
        text.append(
            f"{name:<16} {row['total_s']:7.0f}  {row['busiest_s']:9.0f}  {row['bubble_share']:6.2f}  "
            f"{row['fullest_bytes'] / 1e6:10.0f}  {row.get('stages', '')}"
        )
    return text


def main() -> None:
    """Measure, predict, print, write ``build/bench/paper/stages.json``."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    node = paper_table.measure()
    figures = table(node, job_of())
    (paper_table.OUT / "stages.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(figures)))  # noqa: T201
    for name in SHOWN:
        print(f"{name}: {figures[name]:.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
