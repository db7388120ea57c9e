"""Runs of real processes in which a host scales its gradients by 1.001 in drawn turns: after how many it is caught.

``python -m tests.bench.wrong_numbers [--runs 5] [--turns 100]``. Two owners and the host c, which is hostile: in each
turn it draws whether it scales, with probability 0.05, as it does in the steps of its turn; nobody else knows when. The
job has ``audit.share = 0.02``, which is one micro-batch of each host in a turn. A line of JSON a run says in which
turn c was wrong first, from 0, and how far the result is from one process that trains the same turns. Exit code 1 if c
was taken out in a turn in which it was right, was not in one in which it was wrong, or a result is more than 1e-9 away.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from signal import SIGKILL
from time import monotonic

from tests.bench.trust import Case, carry_out_part, read_options
from tests.support.cluster import RING, START_S, Cluster
from tests.support.failpoints import order_failure
from tests.support.results import largest_difference, reference_of, trained
from tests.support.trials import EQUAL, Trial

HOSTILE = "c"
ORDER = "backward 1 scale-turns 0.05"
TURN_STEPS = 2


class HostileRing:
    """Owners a and b and the hostile host, with a job; the hostile process is another one in each run."""

    def __init__(self, cluster: Cluster, orders: Path, *, turns: int) -> None:
        self._cluster, self._orders = cluster, orders
        self._job = cluster.job(
            train__method="all",
            train__max_steps=TURN_STEPS * turns,
            train__local_iterations=TURN_STEPS,
            recovery__copies="next",
            audit__share=0.02,
        )
        self._plan = cluster.plan_on(self._job, RING)

    def trial(self) -> Trial:
        """Carry a run out: the first wrong turn has to be the one after which the host, and nobody else, is taken out.

        ``turn`` of the figures is that turn, from 0; absent if the host was never wrong.
        """
        began_s, cluster = monotonic(), self._cluster
        done = order_failure(self._orders, HOSTILE, ORDER)
        outcome = cluster.follow(self._job, plan=self._plan).wait()
        assert outcome.is_done, outcome.message
        wanted = reference_of(cluster, self._job, outcome)
        cluster.signal(HOSTILE, SIGKILL)
        cluster.agents[HOSTILE].wait(START_S)
        cluster.revive()
        wrong = [int(line.split()[1]) for line in done.read_text().splitlines()[1:]]
        taken_out = [(line["lost"], line["step"] // TURN_STEPS) for line in outcome.of_kind("recovery")]
        difference = largest_difference(trained(outcome), wanted.adapter() | wanted.head())
        problems = [f"weights differ by {difference:g}"] if difference > EQUAL else []
        if taken_out != [([HOSTILE], turn) for turn in wrong[:1]]:
            problems.append(f"wrong in the turns {wrong}, taken out with the turn: {taken_out}")
        figures = {"difference": difference, **({"turn": wrong[0]} if wrong else {})}
        return Trial(problems=tuple(problems), wall_s=monotonic() - began_s, figures=figures)


@contextmanager
def hostile_ring(folder: Path, _: str, *, turns: int) -> Iterator[HostileRing]:
    """The ring, whose runs have so many turns."""
    orders = folder / "orders"
    orders.mkdir()
    cluster = Cluster(folder, owners=["a", "b"], hosts=[HOSTILE], failpoints=orders)
    with cluster.listening():
        yield HostileRing(cluster, orders, turns=turns)


def main() -> int:
    """Read the command line, carry the runs out."""
    options = read_options(__doc__, runs=(5, "how many"), turns=(100, "of a run"))
    cases = [Case("runs", f"run {number}", HostileRing.trial) for number in range(1, options.runs + 1)]
    return carry_out_part("wrong_numbers", cases, partial(hostile_ring, turns=options.turns), options)


if __name__ == "__main__":
    sys.exit(main())
