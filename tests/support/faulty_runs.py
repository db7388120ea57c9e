"""Runs of real processes of which some fail at failpoints, for tests and ``tests.bench.fault_matrix``."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.run.run_text import is_step
from coordinator.server.certificate_authority import ADMIN, TrustKeeper
from ringtune.errors import BusyError, PeerLostError
from ringtune.job.job import Job
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, turn_sequence
from ringtune.transport.credentials import using_credentials
from ringtune.v1 import control_pb2
from tests.support import failpoints, reference
from tests.support.cluster import LEASE_S, RUN_S, START_S, Cluster, Follower, Hold, Outcome
from tests.support.failpoints import HOSTILE, Failure, Order, order_failure
from tests.support.moves import Slices, moving
from tests.support.results import datasets_of, largest_difference, reference_of, trained, turns_of
from tests.support.trials import Trial, differences
from tests.support.trust_parts import token_option, trusted, write_tokens

OWNERS, HOSTS = ("a", "b"), ("c", "d", "e")
COORDINATOR = "coordinator"
STEPS = 24
ENCRYPTED_LEASE_S = 2.0
"""Of the coordinator, whose members tell at each third of it how far they are with a rotation; runs have their own."""
RING: Slices = (("a", 0, 1), ("c", 1, 2), ("d", 2, 3), ("e", 3, 4))
ELSEWHERE: Slices = (("a", 0, 1), ("d", 1, 3), ("c", 3, 4))
"""The placement of the last steps of a run that moves."""
ROTATE_AT = 5
"""The step of a run after which its authority is rotated, or a second process of a node comes."""
HOSTILE_WAIT_S = 20.0
"""``runtime.wait_s`` of a run with a hostile node: the time for a message, and for the next placement."""
WHOLE, BEGUN = "rotation", "begun rotation"
"""Of a trial: the run stands still until the old authority is gone, or goes on meanwhile."""
_LOG_CHARACTERS = 1500
STOPPED_S = 1.5
"""How long a process stands still that is stopped: less than the lease of a run."""


class Fault(NamedTuple):
    """One process that fails: a node or the coordinator, and the order."""

    victim: str
    order: str


class FaultyRing:
    """Owners a and b and the hosts c, d and e, which carry one job out again and again and fail as ordered."""

    def __init__(self, cluster: Cluster, orders: Path, *, keeper: TrustKeeper | None = None, **changes: object) -> None:
        self.cluster, self._orders, self._keeper = cluster, orders, keeper
        wanted: dict[str, Any] = {
            "train__max_steps": STEPS,
            "train__local_iterations": 4,
            "train__checkpoint_every": 8,
            "train__eval_every": 8,
            "train__dropout": 0.0,
            "recovery__copies": "next",
            "recovery__wait_s": 0.0,  # a trial looks at runs that end, too, and resumes them
        }
        self.job: Job = cluster.job(**{**wanted, **changes})
        still = cluster.plan_on(self.job, RING)
        self._plans = {
            moves: one.with_copies(True) for moves, one in ((False, still), (True, moving(still, (3, ELSEWHERE))))
        }
        self._with_two = still.with_copies(True, 2)
        self._long: Job = self.job.with_overrides({"recovery.owners": "skip", "train.max_steps": 3 * STEPS})
        self._long_plan = cluster.plan_on(self._long, RING).with_copies(True)
        self._impatient: Job = self.job.with_overrides({"runtime.wait_s": HOSTILE_WAIT_S})
        one = reference.train(self.job, still, cluster.model, datasets_of(cluster, self.job))
        self._wanted, self._books = one.adapter() | one.head(), _books_of(still)

    def _follow(self, job: Job, *, moves: bool, has_two: bool, hold: Hold | None = None) -> Follower:
        plan = self._long_plan if job is self._long else self._plan(moves=moves, has_two=has_two)
        return self.cluster.follow(job, plan=plan, hold=hold)

    def _plan(self, *, moves: bool, has_two: bool) -> Plan:
        return self._with_two if has_two else self._plans[moves]

    def trial(
        self,
        *faults: Fault,
        moves: bool = False,
        has_two: bool = False,
        rotation: str = "",
        comes_back: bool = False,
        duplicate: str = "",
        all_fail: bool = True,
    ) -> Trial:
        """Carry the job out while processes fail; start them again, and resume the run if it has ended.

        A run may end, to be resumed, only because it has lost a node. ``recovery_s`` of the trial are the seconds from
        when the coordinator heard of a loss until the run went on, ``noticed_s`` those from the failure.

        Args:
            faults: at most one of each process.
            moves: whether the run has a second placement.
            has_two: whether it has two copies of what hosts train.
            rotation: of the authority in mid-run, ``WHOLE`` or ``BEGUN``; empty = none.
            comes_back: whether the run leaves out an owner that is killed, and takes it back while it trains.
            duplicate: the node of which a second process comes in mid-run, to be refused; empty = none.
            all_fail: whether all faults have to happen.

        Raises:
            AssertionError: the run does not end; has the end of each node's log.
        """
        hostile = [fault.victim for fault in faults if Order.parse(fault.order).failure in HOSTILE]
        job = self._long if comes_back else self._impatient if hostile else self.job
        began_s = time.monotonic()
        done = {fault: order_failure(self._orders, *fault) for fault in faults}
        kills = [fault for fault in faults if Order.parse(fault.order).failure is Failure.KILL]
        killed = {fault: self.cluster.agents[fault.victim] for fault in kills}
        over = threading.Event()
        helper = threading.Thread(target=self._let_go_on, args=(done, over))
        helper.start()
        rotate = Rotate(self._keeper, is_whole=rotation == WHOLE) if rotation and self._keeper else None
        second = Duplicate(self.cluster, duplicate) if duplicate else None
        sinks = [sink for sink in (rotate, second) if sink is not None]
        self.cluster.coordinator.sinks.extend(sinks)
        try:
            hold = Hold(self.cluster, 1, after="recovery") if comes_back else None
            follower = self._follow(job, moves=moves, has_two=has_two, hold=hold)
            if hold:
                self._bring_back(follower, hold, faults[0].victim)
            outcome = follower.wait()
            ended_unix_s = time.time()
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._said_last()}") from error
        finally:
            over.set()
            helper.join()
            for sink in sinks:
                self.cluster.coordinator.sinks.remove(sink)
        failed = [path for path in done.values() if path.exists()]
        failed_unix_s = min((path.stat().st_ctime for path in failed), default=ended_unix_s)
        for fault in faults:
            (self._orders / fault.victim).unlink(missing_ok=True)
        ended = f"{outcome.error}: {outcome.message}" if outcome.error else ""
        recoveries = outcome.of_kind("recovery")
        books = _books(outcome)
        for name in hostile:  # an honest process takes its place
            self.cluster.signal(name, signal.SIGKILL)
        for fault, agent in killed.items():  # a run that ends at once ends before the template has told
            assert not done[fault].exists() or agent.wait(START_S) is not None, f"{fault.victim} is not killed"
        self.cluster.revive()
        if not outcome.is_done:
            outcome, books = self._resume(outcome, moves=moves, has_two=has_two)
        wanted, wanted_books = self._wanted, self._books
        if comes_back and outcome.is_done and outcome.plan is not None:
            one = reference_of(self.cluster, job, outcome, turns_of(outcome, 3 * STEPS))
            wanted, last = one.adapter() | one.head(), outcome.plan.course.num_steps
            evaluated = [("evaluation", step) for step in sorted({*range(8, last, 8), last})]
            wanted_books = [*evaluated, *(("step", step) for step in range(1, last + 1))]
        difference = largest_difference(trained(outcome), wanted) if outcome.is_done else float("inf")
        problems = differences(difference, books, wanted_books)
        if ended and not ended.startswith(PeerLostError.__name__):
            problems.append(f"ended with {ended}")
        if all_fail and len(failed) < len(faults):
            problems.append(f"{len(failed)} of {len(faults)} faults happened")
        if rotate is not None and not rotate.has_ended():
            problems.append("the rotation is not over")
        if second is not None and not second.is_refused:
            problems.append(f"the second process of {duplicate} is not refused")
        figures = {"difference": difference, "failures": len(failed), "recoveries": len(recoveries)}
        if recoveries:
            went_on_unix_s = follower.seen_unix_s.get("recovery", ended_unix_s if ended else failed_unix_s)
            figures["recovery_s"] = sum(line["seconds"] for line in recoveries)
            figures["noticed_s"] = went_on_unix_s - failed_unix_s
        return Trial(problems=tuple(problems), wall_s=time.monotonic() - began_s, error=ended, figures=figures)

    def _said_last(self) -> str:
        """Of each node its exit code, None while it lives, and the end of its log."""
        nodes, log = self.cluster.agents, self.cluster.log
        return "; ".join(f"{name} ({nodes[name].poll()}): ...{log(name)[-_LOG_CHARACTERS:]}" for name in nodes)

    def _bring_back(self, follower: Follower, hold: Hold, owner: str) -> None:
        """Start an owner again that the run has left out, and let the run go on once it knows."""
        follower.wait_for(lambda outcome: bool(outcome.of_kind("recovery")))
        self.cluster.wait_exit(owner)
        self.cluster.start(owner)
        follower.wait_for(lambda outcome: any(f"node {owner} is back; its rows" in note for note in outcome.notes))
        hold.let_go()

    def _let_go_on(self, done: Mapping[Fault, Path], over: threading.Event) -> None:
        """Let processes that are stopped go on after a while, and end the leases of those that are killed, in a run."""
        agents = dict(self.cluster.agents)
        failures = {fault: Order.parse(fault.order).failure for fault in done}
        awaited = [fault for fault in done if failures[fault] in (Failure.STOP, Failure.KILL)]
        while awaited and not over.wait(0.05):
            for fault in [fault for fault in awaited if done[fault].exists()]:
                awaited.remove(fault)
                if failures[fault] is Failure.STOP:
                    self.cluster.wait_stopped(fault.victim)
                    over.wait(STOPPED_S)
                    self.cluster.signal(fault.victim, signal.SIGCONT)
                elif not over.wait(LEASE_S) and self.cluster.agents.get(fault.victim) is agents[fault.victim]:
                    self.cluster.end_lease(fault.victim)

    def _resume(self, stopped: Outcome, *, moves: bool, has_two: bool) -> tuple[Outcome, list[tuple[str, int]]]:
        manifests = tuple(reversed(stopped.checkpoints[-2:]))
        if not manifests or stopped.plan is None:
            outcome = self._follow(self.job, moves=moves, has_two=has_two).wait()
            return outcome, _books(outcome)
        plan = self._plan(moves=moves, has_two=has_two)
        outcome = self.cluster.follow(self.job, Resume(plan=plan, manifests=manifests)).wait()
        kept = [line for line in _books(stopped) if line[1] <= outcome.resumed_at - (line[0] == "evaluation")]
        return outcome, sorted(kept + _books(outcome))


def _books(outcome: Outcome) -> list[tuple[str, int]]:
    """Kind and step of each line of the books that a run has once, in order."""
    steps = [("step", line["step"]) for line in outcome.metrics if is_step(line)]
    evaluations = [("evaluation", line["step"]) for line in outcome.of_kind("evaluation")]
    return sorted(steps + evaluations)


def _books_of(plan: Plan) -> list[tuple[str, int]]:
    """What they are of an undisturbed run."""
    turns = list(turn_sequence(plan.course))
    evaluations = {("evaluation", turn.first_step) for turn in turns if turn.kind is StepKind.EVALUATE}
    return sorted([*evaluations, *(("step", step) for step in range(1, plan.course.num_steps + 1))])


class Rotate:
    """Begins a rotation of the authority after a step of a run, whose events it gets."""

    def __init__(self, keeper: TrustKeeper, *, is_whole: bool) -> None:
        self._keeper, self._is_whole = keeper, is_whole
        self._steps = 0

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Count a step; begin with the one at which it is time."""
        self._steps += event.WhichOneof("event") == "step_json"
        if event.WhichOneof("event") == "step_json" and self._steps == ROTATE_AT:
            self._keeper.rotate(RUN_S)
            if self._is_whole:
                self.has_ended()

    def has_ended(self) -> bool:
        """Wait until the rotation is over; whether it was begun and has ended before its time."""
        deadline_s = time.monotonic() + START_S
        while self._keeper.rotation_state(()) is not None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return self._steps >= ROTATE_AT and self._keeper.rotation_state(()) is None


class Duplicate:
    """Starts a second process of a node after a step of a run, whose events it gets; the run waits until it ends."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._steps = 0
        self.is_refused = False

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Count a step; start it after the one at which it is time."""
        self._steps += event.WhichOneof("event") == "step_json"
        if event.WhichOneof("event") == "step_json" and self._steps == ROTATE_AT:
            code, text = self._cluster.run_duplicate(self._name, self._cluster.address)
            self.is_refused = code == BusyError.exit_code and f"the name {self._name} is taken by the node at" in text


@contextmanager
def faulty_ring(folder: Path, *, is_encrypted: bool = False, **changes: object) -> Iterator[FaultyRing]:
    """A ring whose processes, and this one as coordinator, fail as they are ordered."""
    orders, more = folder / "failpoints", dict[str, Any]()
    orders.mkdir()
    keeper, options = None, dict[str, list[str]]()
    if is_encrypted:
        keeper = trusted(folder)
        keeper.remove(ADMIN, "it makes no calls in a trial")
        options = {name: token_option(folder, name) for name in (*OWNERS, *HOSTS)}
        more = {"keeper": keeper, "more": options, "lease_s": ENCRYPTED_LEASE_S}
    with using_credentials(keeper.credentials if keeper else None):
        cluster = Cluster(folder, owners=OWNERS, hosts=HOSTS, failpoints=orders, **more)
        if is_encrypted:
            write_tokens(folder, options, ttl_s=RUN_S)
        failpoints.arm(COORDINATOR, orders)
        try:
            with cluster.listening():
                yield FaultyRing(cluster, orders, keeper=keeper, **changes)
        finally:
            failpoints.disarm()
