"""Measure the planner: how long it takes, how far its plans are from a longer search, and what they gain.

Rings are drawn with fixed seeds from the classes of ``tests.support.planner_rings`` (laptop, Jetson, Pi).

* ``few``: processor seconds of the search on 8 nodes and 24 blocks, and its predicted time over that of ten times as
  many rings;
* ``small``: processor seconds of a plan for four Pis and six blocks with a free number of micro-batches, two rings;
* ``large``: seconds of a plan for 64 nodes and 96 blocks, and its predicted time over that of a search of ``--long-s``;
* ``over_even``: of ten rings of five nodes and 12 blocks, the simulated time of the even split in name order over that
  of the planner's ring (geometric mean). Where the even split does not fit, the most even one that does is taken;
* ``stages``: of rings of four nodes and 8 blocks, the simulated time of the planner's stages over that of the best of
  the first ``--layouts`` layouts by the rough formula, all of them simulated;
* ``formula``: the formula's step time over the simulator's for random rings, depths and numbers of micro-batches.

Run as ``python -m tests.bench.planner [--only PART] [--long-s 600]``; writes ``build/bench/planner.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.planner.draft import Draft
from coordinator.planner.judge import simulated_step_s, simulated_steps_s
from coordinator.planner.limits import Effort
from coordinator.planner.local_search import Budget, search_local
from coordinator.planner.make_plan import make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.replicas import choose_replicas, ranked_layouts, slices_of_layout
from coordinator.planner.ring_costs import ring_costs
from coordinator.planner.search import choose_plan, plan_of, split_blocks
from coordinator.planner.step_time import Ring, step_times
from ringtune.costs.profile import Profile
from ringtune.job.job import parse_job
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Units
from sim.prediction import predict
from tests.bench.rings import conclude, say
from tests.support.planner_rings import class_ring, draft_for, random_counts, random_kinds

OUT = Path("build/bench/planner.json")
Figures = dict[str, Any]
EVEN_RINGS = (
    ("laptop", "laptop", "jetson", "pi", "pi"),
    ("jetson", "jetson", "pi", "pi", "pi"),
    ("laptop", "jetson", "laptop", "jetson", "laptop"),
    ("pi", "pi", "pi", "pi", "jetson"),
    ("laptop", "laptop", "laptop", "laptop", "pi"),
    ("jetson", "laptop", "pi", "laptop", "jetson"),
    ("laptop", "laptop", "laptop", "laptop", "laptop"),
    ("pi", "pi", "pi", "pi", "pi"),
    ("jetson", "jetson", "jetson", "jetson", "laptop"),
    ("pi", "laptop", "pi", "jetson", "pi"),
)

STAGED_RINGS = (
    ("laptop", "laptop", "laptop", "laptop"),
    ("laptop", "jetson", "pi", "laptop"),
    ("jetson", "jetson", "laptop", "laptop"),
    ("pi", "pi", "pi", "laptop"),
)


def few(options: argparse.Namespace) -> Figures:
    """Ten rings of 8 nodes, and two of 8 laptops without links, which differ least."""
    seconds, gaps = [], []
    for seed in range(12):
        rng = random.Random(seed)
        kinds = ["laptop"] * 8 if seed >= 10 else random_kinds(rng, 8)
        micro, with_links = rng.choice([1, 4, 8]), seed < 10 and rng.random() < 0.7
        profile = class_ring(rng, kinds, num_blocks=24, with_links=with_links)
        draft = draft_for(profile, microbatches=4 if seed >= 10 else micro, num_steps=rng.choice([300, 1200]))
        effort = Effort(judged_actions=0)
        began_s = time.process_time()
        chosen = choose_plan([draft], profile, effort=effort)
        seconds.append(round(time.process_time() - began_s, 2))
        if chosen is None:
            raise RuntimeError(f"nothing fits ring {seed}")
        longer = dataclasses.replace(effort, evaluations=10 * effort.evaluations, seed=1)
        best = choose_plan([draft], profile, effort=longer)
        gaps.append(round(chosen.best.job_s / min(best.best.job_s, chosen.best.job_s) - 1, 4) if best else 0.0)
        say(f"8 x 24, seed {seed}: {seconds[-1]} processor seconds, {gaps[-1]:.2%} above a search of ten times as long")
    return {
        "plan_8x24_median_s": statistics.median(seconds),
        "plan_8x24_worst_s": max(seconds),
        "plan_8x24_s": seconds,
        "plan_8x24_gap": gaps,
    }


def small(options: argparse.Namespace) -> Figures:
    """Four equal boards and six blocks, ``train.microbatches = "auto"``: all that a plan with a profile takes."""
    text = '[model]\npath = "none"\n[data]\nlabels = ["neg", "pos"]\n[train]\nbatch_size = 8\nmicrobatches = "auto"\n'
    job = parse_job(f"{text}max_length = 64\nmax_steps = 320\n[unfreeze]\nevery_steps = 20\n", source="the benchmark")
    seconds = []
    for seed in (0, 3):
        profile = class_ring(random.Random(seed), ["pi"] * 4, num_blocks=6)
        began_s = time.process_time()
        planned = make_plan(job, profile.by_name, links=profile.links)
        seconds.append(round(time.process_time() - began_s, 2))
        say(f"4 x 6, seed {seed}: {seconds[-1]} processor seconds, {planned.effort_line}")
    return {"plan_4x6_processor_s": seconds}


def large(options: argparse.Namespace) -> Figures:
    """64 nodes and 96 blocks: the planner's own effort, then a search of ``--long-s`` from its result on."""
    figures: Figures = {"plan_64x96_s": [], "plan_64x96_gap": [], "long_s": options.long_s}
    for seed in range(options.rings):
        rng = random.Random(seed)
        profile = class_ring(rng, random_kinds(rng, 64), num_blocks=96)
        draft = draft_for(profile, num_steps=96 * 50)
        began_s = time.perf_counter()
        chosen = choose_plan([draft], profile, effort=Effort())
        passed_s = time.perf_counter() - began_s
        if chosen is None:
            raise RuntimeError("nothing fits a ring of 64 nodes")
        costs, caps = chosen.costs, chosen.caps

        def lacking(node: int, *where: int, names: tuple[str, ...] = costs.names, caps: MemoryCaps = caps) -> int:
            return caps.lacking(names[node], *where)

        budget = Budget(evaluations=10**9, seconds=options.long_s, now_s=time.monotonic)
        longer = search_local(costs, lacking, budget, seed=1, known=(chosen.best.ring,))
        gap = chosen.best.job_s / min(longer.pool[0][0], chosen.best.job_s) - 1
        figures["plan_64x96_s"].append(round(passed_s, 2))
        figures["plan_64x96_gap"].append(round(gap, 4))
        say(f"64 x 96, seed {seed}: {passed_s:.2f} s, {gap:.2%} above a search of {options.long_s:g} s")
    return figures


def over_even(options: argparse.Namespace) -> Figures:
    """What the planner gains over even slices in name order, by the simulator, ring by ring."""
    ratios = [even_over_planned(seed) for seed in range(len(EVEN_RINGS))]
    for kinds, ratio in zip(EVEN_RINGS, ratios, strict=True):
        say(f"even over planned, {', '.join(kinds)}: {ratio:.2f}")
    mean = math.exp(statistics.mean(math.log(ratio) for ratio in ratios))
    return {"over_even_geometric_mean": round(mean, 3), "over_even": [round(ratio, 3) for ratio in ratios]}


def even_over_planned(seed: int) -> float:
    """The simulated training time of the even split over that of the planner's ring."""
    profile = class_ring(random.Random(seed), EVEN_RINGS[seed], num_blocks=12)
    draft = draft_for(profile, num_steps=240, every_steps=15)
    chosen = choose_plan([draft], profile, effort=Effort())
    if chosen is None:
        raise RuntimeError(f"nothing fits ring {seed}")
    planned = plan_of(chosen.best.draft, chosen.costs, chosen.best.ring)
    return trained_s(even_plan(draft, profile), profile) / trained_s(planned, profile)


def even_plan(draft: Draft, profile: Profile) -> Plan:
    """Equal slices in the order of the names, as far as memory allows."""
    costs = ring_costs(draft, profile)
    caps = MemoryCaps(draft, profile.by_name)
    last = costs.num_nodes - 1

    def longest(index: int, first: int) -> int:
        ends = range(first + 1, costs.stop + 1)
        above = (0 if end == costs.stop else min(max(1, last - index), costs.stop - end) for end in ends)
        return max(
            (
                end
                for end, hosts in zip(ends, above, strict=True)
                if not caps.lacking(costs.names[index], first, end, hosts)
            ),
            default=first,
        )

    counts = split_blocks([1.0] * costs.num_nodes, start=costs.first, stop=costs.stop, longest=longest)
    if counts is None:
        raise RuntimeError("no even split fits")
    hosts = [node for node, count in enumerate(counts) if count]
    return plan_of(draft, costs, Ring(nodes=tuple(hosts), counts=tuple(counts[node] for node in hosts)))


def trained_s(plan: Plan, profile: Profile) -> float:
    """Seconds of all steps, hand-overs included, on the virtual clock."""
    return predict(plan, profile).train_s


def stages(options: argparse.Namespace) -> Figures:
    """How far the planner's stages are from a long search: of each ring very many layouts are simulated."""
    gaps, taken = [], []
    for seed, kinds in enumerate(STAGED_RINGS):
        profile = class_ring(random.Random(seed), kinds, num_blocks=8)
        draft = draft_for(profile, microbatches=8, num_steps=160, every_steps=20)
        chosen = choose_plan([draft], profile, effort=Effort())
        if chosen is None:
            raise RuntimeError(f"nothing fits ring {seed}")
        ring = plan_of(chosen.best.draft, chosen.costs, chosen.best.ring)
        found, reason = choose_replicas(ring, [draft], profile, is_over=lambda: False)
        planned_s = reason.best_s if reason.best_s is not None else math.inf
        best_s = min(planned_s, *(_simulated_layouts(draft, profile, options.layouts)))
        gaps.append(round(planned_s / best_s - 1, 4))
        taken.append(found is not None)
        say(f"stages of {', '.join(kinds)}: {gaps[-1]:.1%} above the best of {options.layouts} layouts")
    return {"stages_gap": gaps, "stages_gap_worst": max(gaps), "stages_taken": taken}


def _simulated_layouts(draft: Draft, profile: Profile, most: int) -> list[float]:
    costs = ring_costs(draft, profile)
    caps = MemoryCaps(draft, profile.by_name)
    found = []
    for _, layout in ranked_layouts(costs, lambda nodes, blocks: 0.0)[:most]:
        plan = draft.placed(slices_of_layout(costs, layout))
        if all(caps.holds(plan, node) for node in plan.nodes):
            found.append(simulated_steps_s(plan, profile, costs))
    return found


def formula(options: argparse.Namespace) -> Figures:
    """How far the formula is from the simulator's steady state, over 200 random (ring, depth)."""
    rng = random.Random(5)
    errors: list[float] = []
    while len(errors) < 200:
        num_nodes = rng.randint(1, 5)
        num_blocks = rng.randint(max(3, num_nodes), 12)
        profile = class_ring(
            rng, random_kinds(rng, num_nodes), num_blocks=num_blocks, owners=1, with_links=rng.random() < 0.7
        )
        draft = draft_for(profile, microbatches=rng.choice([1, 2, 4, 8]))
        costs = ring_costs(draft, profile)
        hosts = rng.sample(range(num_nodes), rng.randint(1, num_nodes))
        ring = Ring(nodes=tuple(hosts), counts=random_counts(rng, num_blocks, len(hosts)))
        plan = plan_of(draft, costs, ring)
        predicted, micro = step_times(costs, ring), costs.num_micro
        steps = {"burn_in": max(6, 48 // micro), "measured": max(8, 32 // micro)}
        for depth in sorted({1, num_blocks // 2, num_blocks}):
            units, owner = Units.top(num_blocks, depth), plan.course.owners[0].node
            simulated_s = simulated_step_s(plan, profile, units, optimizer="adamw", owner=owner, **steps)
            errors.append(predicted[depth] / simulated_s - 1)
    sizes = sorted(abs(error) for error in errors)
    return {
        "formula_median_error": round(statistics.median(sizes), 5),
        "formula_ninth_decile_error": round(sizes[9 * len(sizes) // 10], 4),
        "formula_worst_error": round(sizes[-1], 4),
        "formula_mean_signed_error": round(statistics.mean(errors), 4),
    }


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "formula": formula,
    "few": few,
    "over_even": over_even,
    "stages": stages,
    "small": small,
    "large": large,
}


def main() -> int:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part; may be repeated")
    parser.add_argument("--long-s", type=float, default=60.0, help="seconds of the longer search")
    parser.add_argument("--rings", type=int, default=1, help="rings of 64 nodes")
    parser.add_argument("--layouts", type=int, default=200, help="layouts of stages that are simulated")
    options = parser.parse_args()
    figures: Figures = {}
    for name in options.only or PARTS:
        figures.update(PARTS[name](options))
    return conclude(OUT, figures)


if __name__ == "__main__":
    sys.exit(main())
