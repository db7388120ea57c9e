"""What losing a host costs a run that goes on without it: ``python -m tests.bench.recovery``.

Writes the part *kills* of ``build/bench/trust.json``: small rings of which a host is killed at a random step (SIGKILL),
with a lease of 2 s and with that of a job that says nothing. What the copies cost is ``tests.bench.overheads``'s.

=================== ======================================================================== =========
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
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.records.step_lines import is_step
from ringtune.jobs.sections import Runtime
from ringtune.rounds import rounds as rd
from tests.bench.trust_figures import spread, write_part
from tests.support.cluster import TEMPLATE, Cluster

LEASES_S = (2.0, Runtime().lease_s)
TRIAL_STEPS, TRIAL_TURN = 60, 5
_LOOK_S = 0.01


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
    parser.add_argument("--kills", type=int, default=10, help="for each lease")
    options = parser.parse_args(arguments)
    kills = kills_cost(options.kills)
    write_part("kills", {"leases": kills})
    print(json.dumps(kills, indent=2))  # noqa: T201
    return int(any(one["steps_lost"] for one in kills))


if __name__ == "__main__":
    sys.exit(main())
