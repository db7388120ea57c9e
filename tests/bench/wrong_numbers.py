"""Runs of real processes in which a host scales its gradients by 1.001 in drawn turns: after how many it is caught.

``python -m tests.bench.wrong_numbers [--runs 5] [--turns 100]``. Two owners and the host c, which is hostile: in each
turn it draws whether it scales, with probability 0.05, as it does in the steps of its turn; nobody else knows when. The
job has ``audit.share = 0.02``, which is one micro-batch of each host in a turn. A line of JSON a run says in which
turns c was wrong and in which it was taken out, from 0, and how far the result is from one process that trains the same
turns. Exit code 1 if c was taken out in a turn in which it was right, was not in one in which it was wrong, or a result
is more than 1e-9 away.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ringtune.job.job import Job
from ringtune.schedule.plan import Plan
from tests.bench.trust import say
from tests.support.cluster import RING, START_S, TEMPLATE, Cluster
from tests.support.failpoints import DONE_SUFFIX
from tests.support.results import largest_difference, reference_of, trained

HOSTILE = "c"
ORDER = "backward 1 scale-turns 0.05"
TURN_STEPS = 2


class Caught(NamedTuple):
    """A run: the turns in which the host was wrong, and that after which it was taken out; None = it was not."""

    wrong: list[int]
    at: int | None
    lost: list[list[str]]
    difference: float

    @property
    def is_good(self) -> bool:
        """Whether the first wrong turn was the one in which the host, and nobody else, was taken out."""
        named = self.lost == ([[HOSTILE]] if self.wrong else [])
        return self.difference <= 1e-9 and named and self.at == (self.wrong[0] if self.wrong else None)


def caught(cluster: Cluster, orders: Path, job: Job, plan: Plan) -> Caught:
    """Carry a run out; the hostile process is another one in the next run."""
    (orders / HOSTILE).write_text(ORDER)
    done = orders / f"{HOSTILE}{DONE_SUFFIX}"
    done.unlink(missing_ok=True)
    outcome = cluster.follow(job, plan=plan).wait()
    assert outcome.is_done, outcome.message
    recoveries = outcome.of_kind("recovery")
    wanted = reference_of(cluster, job, outcome)
    cluster.signal(HOSTILE, signal.SIGKILL)
    cluster.agents[HOSTILE].wait(START_S)
    cluster.revive()
    return Caught(
        wrong=[int(line.split()[1]) for line in done.read_text().splitlines()[1:]],
        at=recoveries[0]["step"] // TURN_STEPS if recoveries else None,
        lost=[line["lost"] for line in recoveries],
        difference=largest_difference(trained(outcome), wanted.adapter() | wanted.head()),
    )


def main() -> int:
    """Read the command line, carry the runs out, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=100, help="of a run")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="ringtune-wrong-") as folder:
        orders = Path(folder) / "orders"
        orders.mkdir()
        cluster = Cluster(Path(folder), owners=["a", "b"], hosts=[HOSTILE], failpoints=orders)
        with cluster.listening():
            job = cluster.job(
                train__method="all",
                train__max_steps=TURN_STEPS * options.turns,
                train__local_iterations=TURN_STEPS,
                recovery__copies="next",
                audit__share=0.02,
            )
            plan = cluster.plan_on(job, RING)
            for _ in range(options.runs):
                found.append(caught(cluster, orders, job, plan))
                say(json.dumps({"good": found[-1].is_good, **found[-1]._asdict()}))
    TEMPLATE.close()
    return 0 if all(one.is_good for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
