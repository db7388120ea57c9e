"""What it costs to be able to lose a host, and what losing one costs: ``python -m tests.bench.recovery``.

Writes parts of ``build/bench/trust.json``. *copies*: the demo's MiniLM on one ring of four real nodes, with copies of
each turn's end and without, one run after the other in pairs. *kills*: small rings of which a host is killed at a
random step (SIGKILL), with a lease of 2 s and with that of a job that says nothing.

=================== ======================================================================== =========
copies_run_ratio    seconds of all steps with copies over those without, median of the pairs  <= 1.03
copies_turn_ratio   the same of each turn beside its own counterpart, median                  <= 1.03
detection           seconds from the signal until the coordinator goes back                   reported
recovery            seconds from the signal until the first turn is granted again             reported
steps_lost          steps that are missing in the books, or there twice, over all runs        0
steps_repeated      steps that were done and not committed, most of one run                   one turn
=================== ======================================================================== =========
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.demo.fetch import demo_cache
from coordinator.demo.workspace import prepare
from coordinator.records.step_lines import is_step
from ringtune.jobs.sections import Runtime
from ringtune.rounds import rounds as rd
from tests.bench.encryption import NODES, Ring, standing
from tests.bench.jobs import write_job
from tests.bench.rings import RingRun
from tests.bench.trust_figures import spread, write_part
from tests.support.cluster import TEMPLATE, Cluster

OUT = Path("build/bench").resolve()
STEPS, FIRST, TURN = 60, 10, 10
LEASES_S = (2.0, Runtime().lease_s)
TRIAL_STEPS, TRIAL_TURN = 60, 5
_LOOK_S = 0.01


def copies_cost(pairs: int) -> dict[str, object]:
    """Measure so many pairs."""
    workspace = prepare(OUT / "recovery", demo_cache())
    folder, data = OUT / "recovery", workspace.job.with_name("train.csv").resolve()

    def job(copies: str) -> Path:
        more = {"unfreeze.every_steps": 5, "train.local_iterations": TURN, "recovery.copies": copies}
        path = folder / f"{copies}.toml"
        return write_job(path, model=workspace.model.resolve(), train=data, steps=STEPS, more=more)

    jobs, plan = {copies: job(copies) for copies in ("none", "next")}, folder / "plan.json"
    turns: dict[str, list[float]] = {name: [] for name in jobs}
    runs: dict[str, list[float]] = {name: [] for name in jobs}
    cpus: dict[str, list[float]] = {name: [] for name in jobs}

    def run(ring: Ring, name: str) -> None:
        out = folder / f"run-{name}"
        ring.run("train", jobs[name], "--nodes", NODES, "--plan", plan, "--out", out, "--replace")
        found = RingRun(folder=out)
        runs[name].append(found.wall_s(FIRST, STEPS))
        cpus[name].append(found.cpu_s)
        turns[name] += [found.wall_s(first, first + TURN) for first in range(FIRST, STEPS, TURN)]
        print(name, round(runs[name][-1], 3), round(cpus[name][-1], 3), flush=True)  # noqa: T201

    with standing(folder / "ring", 7491, data, encrypted=False) as ring:
        ring.run("plan", jobs["none"], "--nodes", NODES, "--save", plan)
        for pair in range(pairs):
            for name in jobs if pair % 2 else reversed(jobs):
                run(ring, name)
    return {
        "copies_run_ratio": statistics.median(_ratios(runs)),
        "copies_run_ratios": [round(one, 4) for one in _ratios(runs)],
        "copies_turn_ratio": statistics.median(_ratios(turns)),
        "copies_turn_quartiles": [round(one, 4) for one in statistics.quantiles(_ratios(turns), n=4)],
        "copies_cpu_ratio": statistics.median(_ratios(cpus)),
        "run_s": runs,
        "pairs": pairs,
        "nodes": NODES,
        "steps": STEPS - FIRST,
    }


def _ratios(found: dict[str, list[float]]) -> list[float]:
    return [with_s / without_s for with_s, without_s in zip(found["next"], found["none"], strict=True)]


class Trial:
    """One run of which a host is killed.

    Attributes:
        detection_s: from the signal until the coordinator goes back.
        recovery_s: until the first turn is granted again.
        lost: steps that are missing in the books, or there twice.
        repeated: most steps that were done and not committed from the signal on.
    """

    def __init__(self, cluster: Cluster, victim: str, step: int, lease_s: float) -> None:
        job = cluster.job(
            train__max_steps=TRIAL_STEPS,
            train__local_iterations=TRIAL_TURN,
            runtime__lease_s=lease_s,
            recovery__copies="next",
        )
        follower = cluster.follow(job)
        follower.wait_for_steps(step)
        at_unix_s = time.time()
        cluster.signal(victim, signal.SIGKILL)
        self.repeated = 0
        while "recovery" not in follower.seen_unix_s and follower.is_alive:
            held = list(getattr(follower.driver._rounds, "_held", ()))
            self.repeated = max(self.repeated, sum(isinstance(each, rd.LogStep) for each in held))
            time.sleep(_LOOK_S)
        outcome = follower.wait()
        cluster.wait_exit(victim)
        if not outcome.is_done:
            raise RuntimeError(outcome.message)
        steps = [line["step"] for line in outcome.metrics if is_step(line)]
        self.lost = len(set(range(1, TRIAL_STEPS + 1)) ^ set(steps)) + len(steps) - len(set(steps))
        lines = [line for line in outcome.metrics if line.get("kind") == "recovery"]
        self.recovery_s = follower.seen_unix_s["recovery"] - at_unix_s
        self.detection_s = self.recovery_s - lines[-1]["seconds"]


def killed(cluster: Cluster, kills: int, lease_s: float, rng: random.Random) -> dict[str, object]:
    """Kill hosts at random steps; each is started again before the next run."""
    trials: list[Trial] = []
    for _ in range(kills):
        victim = rng.choice(["c", "d"])
        trials.append(Trial(cluster, victim, rng.randint(1, TRIAL_STEPS - 3 * TRIAL_TURN), lease_s))
        cluster.start(victim)
        cluster.wait_idle(*cluster.names)
        print(lease_s, vars(trials[-1]), flush=True)  # noqa: T201
    return {
        "lease_s": lease_s,
        "detection": spread([trial.detection_s for trial in trials]),
        "recovery": spread([trial.recovery_s for trial in trials]),
        "steps_lost": sum(trial.lost for trial in trials),
        "steps_repeated": max(trial.repeated for trial in trials),
        "steps_a_turn": TRIAL_TURN,
    }


def kills_cost(kills: int) -> list[dict[str, object]]:
    """Measure so many kills for each lease."""
    rng, found = random.Random(0), []
    for lease_s in LEASES_S:
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(Path(folder), owners=["a", "b"], hosts=["c", "d"], lease_s=lease_s)
            with cluster.listening():
                found.append(killed(cluster, kills, lease_s, rng))
    TEMPLATE.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="runs with and without copies; 0 = none")
    parser.add_argument("--kills", type=int, default=10, help="for each lease; 0 = none")
    options = parser.parse_args(arguments)
    is_good = True
    if options.kills:
        kills = kills_cost(options.kills)
        write_part("kills", {"leases": kills})
        print(json.dumps(kills, indent=2))  # noqa: T201
        is_good = not any(one["steps_lost"] for one in kills)
    if options.pairs:
        copies = copies_cost(options.pairs)
        write_part("copies", copies)
        print(json.dumps(copies, indent=2))  # noqa: T201
        is_good = is_good and float(str(copies["copies_turn_ratio"])) <= 1.03
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
