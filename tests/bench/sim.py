"""``make bench-sim``: what the simulator and the planner are worth. Writes ``build/bench/sim.json`` anew.

============================= ============================================================ =============
actions_per_s                 compute actions a second of the simulator on one core        >= 100,000
even_speedup_over_single      RingAda's best number of micro-batches over Single's, equal  >= 2.85
                              steps, whole schedule, four equal boards, mBERT's shape,
                              one ring of even slices
even_speedup_over_pipeadapter the same over PipeAdapter's best                             reported
speedup_over_single           RingAda on the planner's stages over Single                  >= 4.1
speedup_over_ideal_stale      over the busiest board's work in a pipeline never drained    >= 1.05
speedup_over_pipeadapter      over the built PipeAdapter                                   >= 1.15
tight_speedup_over_single     over Single where no board can hold the model                >= 3.9
cached_speedup_over_ideal_... with two visits of each row and the cache of hidden states   >= 1.1
memory_over_single_1, _4, ... fullest node over Single, both with that many micro-batches,  <= 0.36
                              embedding rows as touched; whole tables are reported beside
pipeadapter_over_single       and what an undrained pipeline would be worth                reported
microbatch_speedup_simulated  everything trainable, 4 micro-batches over 1: MiniLM, four   >= 1.8
                              equal boards, 100 Mbit/s
microbatch_speedup_measured   the same on the testbed                                      reported
short_rows_speedup_simulated  the same with mBERT's shape, rows of 32 tokens and 1 Gbit/s, reported
                              where computing bounds a step; and measured
stages_gain_measured          the planner's stages over the best ring of single hosts on  >= 1.15
                              four equal boards of the testbed, mBERT's shape, a short
                              schedule with some steps at depth 1, 6 and 12
stages_gain_error             predicted over measured gain, less one                       <= 0.08
share_of_predicted_gain       a board slows to half in mid-run: measured gain of the steps >= 0.5
                              after the run moved, over the predicted one
slowed_link_share_of_...      the same where the link of a board slows to a fifth            >= 0.5
planner_over_even             an even split's predicted time over the planner's, geometric reported
                              mean over ten heterogeneous rings
plan_64x96_s                  seconds to plan 64 nodes and 96 blocks                       <= 5
============================= ============================================================ =============

Where the testbed can't be built (no root, no namespaces), the reason stands in the place of a figure. The testbed's
part takes some 30 minutes of a quiet machine. Exits with 1 if a target was missed or could not be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.cli.demo_files import demo_cache, prepare
from deploy.testbed.capabilities import MissingCapability
from sim.prediction import predict
from tests.bench import paper_table, planner, testbed_runs
from tests.bench.rings import TOKENS, Figures, machine, missed, write_model, write_rows

OUT = Path("build/bench")
CONFIRMED_DEPTHS = (1, 6, 12)
SHORT_TOKENS = 32
MINILM_TOKENS = 64
TARGETS: dict[str, tuple[str, float]] = {
    "actions_per_s": (">=", 100_000),
    "even_speedup_over_single": (">=", 2.85),
    "speedup_over_single": (">=", 4.1),
    "speedup_over_ideal_stale": (">=", 1.05),
    "speedup_over_pipeadapter": (">=", 1.15),
    "tight_speedup_over_single": (">=", 3.9),
    "cached_speedup_over_ideal_stale": (">=", 1.1),
    "stages_gain_measured": (">=", 1.15),
    "stages_gain_error": ("<=", 0.08),
    "share_of_predicted_gain": (">=", 0.5),
    "slowed_link_share_of_predicted_gain": (">=", 0.5),
    **dict.fromkeys((f"memory_over_single_{count}" for count in paper_table.MICROBATCHES), ("<=", 0.36)),
    "microbatch_speedup_simulated": (">=", 1.8),
    "plan_64x96_s": ("<=", 5.0),
}

Part = Callable[[], Figures]


def actions_per_s() -> Figures:
    """Compute actions a second of a whole prediction of the paper's run, the best of three."""
    profile = paper_table.four_boards(paper_table.measure())
    plan = paper_table.plan_of("ringada", 8)
    rates = []
    for _ in range(3):
        started_s = time.perf_counter()
        prediction = predict(plan, profile)
        rates.append(prediction.num_actions / (time.perf_counter() - started_s))
    return {"actions_per_s": max(rates), "actions_per_s_samples": rates}


def paper() -> Figures:
    """The paper's table on the virtual clock."""
    found = paper_table.table(paper_table.measure())
    return {name: found[name] for name in paper_table.SHOWN} | {"paper_table": found}


def stages() -> Figures:
    """What the planner's stages are worth on the same boards."""
    found = paper_table.stages_table(paper_table.measure(), paper_table.job_of())
    return {name: found[name] for name in paper_table.STAGES_SHOWN} | {"stages_table": found}


def microbatches() -> Figures:
    """4 micro-batches over 1: MiniLM over slow links, and a large model with short rows over fast ones."""
    workspace, folder = prepare(OUT / "testbed" / "demo", demo_cache()), paper_table.OUT
    asked = testbed_runs.microbatch_speedup(
        OUT / "testbed" / "microbatches",
        model=workspace.model,
        train=workspace.job.with_name("train.csv"),
        tokens=MINILM_TOKENS,
        mbit_per_s=100,
        steps=20,
    )
    other = testbed_runs.microbatch_speedup(
        OUT / "testbed" / "short-rows",
        model=write_model(folder / "model"),
        train=write_rows(folder / "train.csv"),
        tokens=SHORT_TOKENS,
        mbit_per_s=1000,
        steps=5,
    )
    kinds = ("simulated", "measured")
    return {
        **{f"microbatch_speedup_{kind}": asked[kind] for kind in kinds},
        **{f"short_rows_speedup_{kind}": other[kind] for kind in kinds},
        "microbatches": {"minilm": asked, "short_rows": other},
    }


def staged_boards() -> Figures:
    """What the planner's stages gain on the testbed, where boards hold the model."""
    folder = paper_table.OUT
    found = testbed_runs.stages_on_boards(
        OUT / "testbed" / "stages",
        model=write_model(folder / "model"),
        train=write_rows(folder / "train.csv"),
        depths=CONFIRMED_DEPTHS,
        steps_each=4,
        tokens=TOKENS,
        microbatches=8,
    )
    return {
        "stages_gain_measured": found["gain_measured"],
        "stages_gain_error": abs(found["gain_error"]),
        "staged_boards": found,
    }


def slowed_board() -> Figures:
    """What replanning gains when a board slows to half in mid-run."""
    workspace = prepare(OUT / "testbed" / "demo", demo_cache())
    train = workspace.job.with_name("train.csv")
    found = testbed_runs.slowed_on_boards(OUT / "testbed" / "slowed", model=workspace.model, train=train)
    return {"share_of_predicted_gain": found["share_of_predicted_gain"], "slowed_board": found}


def slowed_link() -> Figures:
    """What replanning gains when the link of a board slows to a fifth in mid-run."""
    workspace = prepare(OUT / "testbed" / "demo", demo_cache())
    train = workspace.job.with_name("train.csv")
    folder = OUT / "testbed" / "slowed-link"
    found = testbed_runs.slowed_on_boards(folder, model=workspace.model, train=train, steps=120, link=True)
    return {"slowed_link_share_of_predicted_gain": found["share_of_predicted_gain"], "slowed_link": found}


def planning() -> Figures:
    """The planner's figures."""
    options = argparse.Namespace(long_s=60.0, rings=1)
    over_even, large = planner.over_even(options), planner.large(options)
    return {
        "planner_over_even": over_even["over_even_geometric_mean"],
        "plan_64x96_s": max(large["plan_64x96_s"]),
        "planning": over_even | large,
    }


PARTS: dict[str, tuple[Part, tuple[str, ...]]] = {
    "actions": (actions_per_s, ("actions_per_s",)),
    "paper": (paper, paper_table.SHOWN),
    "stages": (stages, paper_table.STAGES_SHOWN),
    "planning": (planning, ("planner_over_even", "plan_64x96_s")),
    "microbatches": (
        microbatches,
        tuple(f"{name}_speedup_{kind}" for name in ("microbatch", "short_rows") for kind in ("simulated", "measured")),
    ),
    "staged": (staged_boards, ("stages_gain_measured", "stages_gain_error")),
    "slowed": (slowed_board, ("share_of_predicted_gain",)),
    "slowed-link": (slowed_link, ("slowed_link_share_of_predicted_gain",)),
}
"""What is measured, by name: how, and the figures that it gives."""


def main() -> int:
    """Measure part by part; 1 if a target was missed, or could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[], choices=PARTS, help="parts")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / ("sim.json" if not options.only else f"sim-{'-'.join(options.only)}.json")
    path.unlink(missing_ok=True)
    figures: Figures = {"machine": machine()}
    for name, (part, keys) in PARTS.items():
        if options.only and name not in options.only:
            continue
        try:
            figures |= part()
        except MissingCapability as why:
            figures |= dict.fromkeys(keys, f"not measured: {why}")
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        for key in keys:
            print(f"{key}: {figures[key]}", flush=True)  # noqa: T201
    figures["missed"] = missed(figures, TARGETS)
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    for line in figures["missed"]:
        print(f"MISSED {line}")  # noqa: T201
    return 1 if figures["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
