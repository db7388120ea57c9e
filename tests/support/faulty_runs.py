"""Runs of real processes of which one fails at a failpoint, for tests and ``tests.bench.fault_matrix``."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.drive.requests import RunRequest
from coordinator.planner.given_plan import GivenPlan
from coordinator.records.step_lines import is_step
from ringtune import failpoints
from ringtune.failpoints import DONE_SUFFIX, Order
from ringtune.jobs.job import Job
from ringtune.rounds.checkpoint import Resume
from ringtune.schedule.plan import Plan
from tests.support.cluster import START_S, Cluster, Follower, Outcome
from tests.support.moves import slices_of
from tests.support.results import largest_difference, reference_of, trained

OWNERS, HOSTS = ("a", "b"), ("c", "d")
RING = (("a", 0, 1), ("c", 1, 3), ("d", 3, 4))
COORDINATOR = "coordinator"
STEPS = 24
LEASE_S = 6.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of a run in which ``victim`` was ordered to fail.

    Attributes:
        victim: node, or the coordinator.
        order: what was ordered.
        has_failed: whether the place was reached.
        error: why the run ended and had to be resumed; empty = it ended by itself.
        recoveries: how often the run went on without a lost node.
        repeated: steps that were done again.
        difference: of the largest trained value, to the undisturbed run.
        has_right_steps: whether each step is in the books once.
        notice_s: from the failure to the end of recovery, or of the run that ended, in seconds.
        wall_s: of the whole trial.
    """

    victim: str
    order: str
    has_failed: bool
    error: str
    recoveries: int
    repeated: int
    difference: float
    has_right_steps: bool
    notice_s: float
    wall_s: float

    @property
    def is_good(self) -> bool:
        """Whether it failed as ordered, and ended with the weights and the books of the undisturbed run."""
        return self.has_failed and self.difference <= 1e-9 and self.has_right_steps


class FaultyRing:
    """Owners a and b and hosts c and d that carry one job out again and again, failing as ordered.

    Args:
        cluster: of them, with failpoints.
        orders: folder of the orders.
        changes: of the job.
    """

    def __init__(self, cluster: Cluster, orders: Path, **changes: object) -> None:
        self.cluster, self._orders = cluster, orders
        wanted: dict[str, Any] = {
            "train__max_steps": STEPS,
            "train__local_iterations": 4,
            "train__checkpoint_every": 8,
            "train__eval_every": 8,
            "train__dropout": 0.0,
            "recovery__copies": "next",
        }
        self.job: Job = cluster.job(**{**wanted, **changes})
        self._plan = self._make_plan()
        whole = self._follow().wait()
        assert whole.is_done, whole.message
        self.wanted = trained(whole)
        reference = reference_of(cluster, self.job, whole)
        assert largest_difference(self.wanted, reference.adapter() | reference.head()) < 1e-9

    def _make_plan(self) -> Plan:
        asked = RunRequest(job=self.job, plan_only=True, num_nodes=len(self.cluster.names), join_s=START_S)
        plan = Follower(self.cluster.coordinator.run(asked)).wait().plan
        assert plan is not None
        return Plan.of(plan.course, type(plan.placement)(slices=slices_of(RING)))

    def _follow(self) -> Follower:
        request = RunRequest(job=self.job, join_s=START_S, plan=GivenPlan(plan=self._plan))
        return Follower(self.cluster.coordinator.run(request))

    def order(self, victim: str, text: str) -> None:
        """Let a process fail once."""
        path = self._orders / victim
        self._done(victim).unlink(missing_ok=True)
        partial = path.with_name(f".{victim}")
        partial.write_text(str(Order.parse(text)))
        partial.replace(path)

    def _done(self, victim: str) -> Path:
        return self._orders / f"{victim}{DONE_SUFFIX}"

    def trial(self, victim: str, text: str, *more: tuple[str, str]) -> Trial:
        """Carry the job out while a process fails, and others too; resume the run if it ends."""
        began_s = time.monotonic()
        orders = [(victim, text), *more]
        for name, each in orders:
            self.order(name, each)
        outcome = self._follow().wait()
        ended_s = time.time()
        has_failed = all(self._done(name).exists() for name, _ in orders)
        failed_s = self._done(victim).stat().st_ctime if self._done(victim).exists() else ended_s
        for name, _ in orders:
            (self._orders / name).unlink(missing_ok=True)
        error = f"{outcome.error}: {outcome.message}" if outcome.error else ""
        recoveries = [line for line in outcome.metrics if line.get("kind") == "recovery"]
        steps = [line["step"] for line in outcome.metrics if is_step(line)]
        self.revive()
        if not outcome.is_done:
            outcome, steps = self._resume(outcome, steps)
        return Trial(
            victim=victim,
            order=text,
            has_failed=has_failed,
            error=error,
            recoveries=len(recoveries),
            repeated=max((line.get("repeated_steps", 0) for line in recoveries), default=0),
            difference=largest_difference(trained(outcome), self.wanted) if outcome.is_done else float("inf"),
            has_right_steps=steps == list(range(1, STEPS + 1)),
            notice_s=ended_s - failed_s,
            wall_s=time.monotonic() - began_s,
        )

    def revive(self) -> None:
        """Start again whoever has ended, let go on who was stopped, and wait until all are idle."""
        for name in self.cluster.names:
            agent = self.cluster.agents.get(name)
            if agent is not None:
                agent.send_signal(signal.SIGCONT)
            if agent is None or agent.poll() is not None:
                if agent is not None:
                    self.cluster.wait_exit(name)
                self.cluster.start(name)
        self.cluster.wait_idle(*self.cluster.names)

    def _resume(self, stopped: Outcome, steps: Sequence[int]) -> tuple[Outcome, list[int]]:
        manifests = tuple(reversed(stopped.checkpoints[-2:]))
        if not manifests or stopped.plan is None:
            outcome = self._follow().wait()
        else:
            outcome = self.cluster.follow(self.job, Resume(plan=stopped.plan, manifests=manifests)).wait()
        kept = [step for step in steps if step <= outcome.resumed_at]
        return outcome, kept + [line["step"] for line in outcome.metrics if is_step(line)]


@contextmanager
def faulty_ring(folder: Path, **changes: object) -> Iterator[FaultyRing]:
    """A ring whose processes, and this one as coordinator, fail as they are ordered."""
    orders = folder / "failpoints"
    orders.mkdir()
    cluster = Cluster(folder, owners=OWNERS, hosts=HOSTS, failpoints=orders)
    failpoints.name_process(COORDINATOR, str(orders))
    try:
        with cluster.listening():
            yield FaultyRing(cluster, orders, **changes)
    finally:
        failpoints.name_process("", "")
