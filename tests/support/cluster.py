"""A coordinator in this process and agents as real processes on loopback, for tests.

The agents are forked from one template, as those of ``ringtune train --local`` are; tests of a single agent's process
start ``python -m edge``. A cluster serves run after run; agents that a test kills are started again with the same name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from coordinator.client.local_nodes import AgentTemplate, ForkedAgent
from coordinator.planner.given_plan import GivenPlan
from coordinator.run.driver import Driver
from coordinator.run.requests import RunRequest
from coordinator.server.certificate_authority import TrustKeeper
from coordinator.server.server import CoordinatorServer
from ringtune.job.job import Job
from ringtune.run_control.checkpoint import CheckpointManifest, Resume
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from tests.support import leaks, measured, tiny
from tests.support.failpoints import VARIABLE
from tests.support.fake_agents import end_lease
from tests.support.moves import Slices, moving, slices_of
from tests.support.processes import source_environment
from tests.support.quick_template import COMMAND
from tests.support.trials import wait_until

START_S = 120.0
RUN_S = 200.0
# Every agent that a cluster has started and not yet seen end.
AGENTS: set[ForkedAgent] = set()
LEASE_S = 6.0
"""Of coordinators; their members tell at each third of it that they live."""
RUN_LEASE_S = 30.0
"""Of runs: no process loses its own because a busy machine holds it up, and tests end those that have to be over."""

RING: Slices = (("a", 0, 1), ("c", 1, 3), ("b", 3, 4))
"""A placement on which owners a and b and the host c all have blocks, whatever they have measured."""


@dataclass(slots=True)
class Outcome:
    """What a submitter got from one run."""

    plan: Plan | None = None
    report: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytearray] = field(default_factory=dict)
    checkpoints: list[CheckpointManifest] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    resumed_at: int = 0
    error: str = ""
    message: str = ""
    is_done: bool = False
    wall_s: float = 0.0

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind in the run's books."""
        return [line for line in self.metrics if line.get("kind") == kind]


class Follower:
    """Reads a run's events on a thread, so that a test can act at a chosen moment."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.outcome = Outcome()
        self.seen_unix_s: dict[str, float] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._started_s = time.monotonic()
        self._thread.start()

    def wait_for(self, predicate: Callable[[Outcome], bool]) -> None:
        """Wait until the outcome so far satisfies ``predicate``."""
        with self._changed:
            assert self._changed.wait_for(lambda: predicate(self.outcome) or self._is_over(), RUN_S), "no such event"
            assert predicate(self.outcome), f"the run ended before: {self.outcome.error} {self.outcome.message}"

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many items are through."""
        self.wait_for(lambda outcome: len(outcome.steps) >= count)

    def wait(self) -> Outcome:
        """Wait for the end of the run."""
        self._thread.join(RUN_S)
        assert not self._thread.is_alive(), "the run does not end"
        return self.outcome

    @property
    def is_alive(self) -> bool:
        """Whether the run goes on."""
        return self._thread.is_alive()

    def _is_over(self) -> bool:
        return self.outcome.is_done or bool(self.outcome.error)

    def _read(self) -> None:
        for event in self.driver.events():
            with self._changed:
                self._take(event)
                self._changed.notify_all()
        self.outcome.wall_s = time.monotonic() - self._started_s

    def _take(self, event: Any) -> None:
        outcome = self.outcome
        match event.WhichOneof("event"):
            case "plan_json":
                outcome.plan = Plan.from_json(_plan_part(json.loads(event.plan_json)))
            case "metrics_json":
                outcome.metrics.append(json.loads(event.metrics_json))
                self.seen_unix_s[outcome.metrics[-1].get("kind", "step")] = time.time()
            case "step_json":
                outcome.steps.append(json.loads(event.step_json))
            case "report_json":
                outcome.report = json.loads(event.report_json)
            case "file":
                outcome.files.setdefault(event.file.path, bytearray()).extend(event.file.chunk)
            case "checkpoint_json":
                outcome.checkpoints.append(CheckpointManifest.parse(event.checkpoint_json))
            case "operations_json":
                outcome.operations.append(event.operations_json)
            case "note":
                outcome.notes.append(event.note)
            case "profile_json":
                outcome.profile = json.loads(event.profile_json)
            case "resumed_json":
                outcome.resumed_at = json.loads(event.resumed_json)["step"]
            case "failure":
                outcome.error, outcome.message = event.failure.error, event.failure.message
            case "done":
                outcome.is_done = True


# below the ports that the system gives to whoever binds 0; each of several test processes has a thousand of its own,
# and begins somewhere in them, as the tests of another checkout have the same thousands
_FIRST_PORT = 20_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.cycle(_FIRST_PORT + (37 * os.getpid() + index) % 1000 for index in range(1000))


class _SharedTemplate:
    """One template for all clusters of this process, started when the first agent is."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._template: AgentTemplate | None = None

    def get(self) -> AgentTemplate:
        """The template, which serves; one that has ended fails its own test, not those after it."""
        if self._template is not None and self._template.error() is not None:
            self._template = None
            self._running.close()
        if self._template is None:
            folder = self._running.enter_context(tempfile.TemporaryDirectory(prefix="ringtune-template-"))
            environment = source_environment(RINGTUNE_LOG="DEBUG")
            template = AgentTemplate(Path(folder) / "template.log", environment, command=COMMAND)
            self._template = self._running.enter_context(template)
            leaks.KEPT.add(template.pid)
            self._running.callback(leaks.KEPT.discard, template.pid)
        return self._template

    def close(self) -> None:
        """End it; no agent may be left."""
        self._template = None
        self._running.close()
        assert not AGENTS, "a cluster was not closed"


TEMPLATE = _SharedTemplate()


def _plan_part(value: dict[str, Any]) -> dict[str, Any]:
    """The plan of plan.json, which may stand among other things."""
    plan: dict[str, Any] = value.get("plan", value)
    return plan


class Nodes:
    """Agents of one ring, with a model and rows."""

    def __init__(
        self,
        folder: Path,
        *,
        owners: Sequence[str],
        hosts: Sequence[str] = (),
        more: Mapping[str, Sequence[str]] | None = None,
        failpoints: Path | None = None,
    ) -> None:
        self.folder = folder
        self._environment = {VARIABLE: str(failpoints)} if failpoints else {}
        self.more = more or {}
        self.owners = tuple(owners)
        self.names = (*owners, *hosts)
        self.model = tiny.write_model(folder / "model", num_blocks=4)
        self.train = tiny.write_rows(folder / "train.csv", 60, seed=1)
        self.eval = tiny.write_rows(folder / "eval.csv", 22, seed=2)
        self.agents: dict[str, ForkedAgent] = {}
        self.ports = {name: free_port() for name in self.names}
        self.advertised = {name: self.ports[name] for name in self.names}

    def spawn(self, name: str, coordinator: str, *options: str) -> None:
        """Start an agent."""
        measured.recall([self.state(name)])
        arguments = self._arguments(name, coordinator, self.ports[name], self.advertised[name], self.state(name))
        arguments += options
        log = self.folder / f"{name}.log"
        agent = TEMPLATE.get().start(arguments, log=log, environment=self._environment)
        AGENTS.add(agent)
        leaks.KEPT.add(agent.pid)  # it may outlive the test that started it
        self.agents[name] = agent

    def _arguments(self, name: str, coordinator: str, port: int, advertised: int, state: Path) -> list[str]:
        arguments = ["--coordinator", coordinator, "--name", name, "--state", str(state)]
        arguments += ["--bind", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{advertised}"]
        arguments += ["--threads", "1", "--memory", "1GiB", *self.more.get(name, ())]
        if name in self.owners:
            share = f"{self.owners.index(name)}/{len(self.owners)}"
            arguments += ["--data", str(self.train), "--eval-data", str(self.eval), "--share", share]
        return arguments

    def run_duplicate(self, name: str, coordinator: str) -> tuple[int | None, str]:
        """Start a second process of a node, with a copy of its folder (of its certificate) and a port of its own.

        Return its exit code, and what it wrote; it tries to join once.
        """
        with tempfile.TemporaryDirectory(prefix="ringtune-duplicate-") as folder:
            state, log, port = Path(folder) / "state", Path(folder) / "log", free_port()
            with contextlib.suppress(shutil.Error):  # the node runs: files of its run come and go meanwhile
                shutil.copytree(self.state(name), state)
            arguments = [*self._arguments(name, coordinator, port, port, state), "--join-s", "0.1"]
            agent = TEMPLATE.get().start(arguments, log=log, environment={})
            AGENTS.add(agent)
            try:
                return agent.wait(START_S), log.read_text(errors="replace")
            finally:
                agent.send_signal(signal.SIGKILL)
                agent.wait(START_S)
                agent.close_input()
                AGENTS.discard(agent)

    def state(self, name: str) -> Path:
        """The folder of an agent."""
        return self.folder / "state" / name

    def log(self, name: str) -> str:
        """What an agent wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to an agent, through its template; one that kills or stops it has done so on return."""
        agent = self.agents[name]
        agent.send_signal(number)
        if number is signal.SIGKILL:
            assert agent.wait(START_S) is not None, f"{name} is not killed"
        elif number is signal.SIGSTOP:
            self.wait_stopped(name)

    def wait_stopped(self, name: str) -> None:
        """Wait until an agent stands still, so that a signal to go on is not too early."""
        process = psutil.Process(self.agents[name].pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, lambda: f"{name} goes on", within_s=START_S)

    def wait_exit(self, name: str) -> int:
        """The exit code of an agent that is about to end."""
        agent = self.agents.pop(name)
        try:
            code = agent.wait(START_S)
            assert code is not None, f"{name} does not end: {self.log(name)}"
            return code
        finally:
            agent.send_signal(signal.SIGKILL)
            assert agent.wait(START_S) is not None
            agent.close_input()
            AGENTS.discard(agent)
            leaks.KEPT.discard(agent.pid)

    def close(self) -> None:
        """Stop all agents."""
        for agent in self.agents.values():
            agent.send_signal(signal.SIGCONT)
            agent.send_signal(signal.SIGTERM)
        for name in list(self.agents):
            self.wait_exit(name)
        measured.keep(map(self.state, self.names))

    def job(self, **overrides: object) -> Job:
        """A small job in float64; keys have ``__`` instead of a dot."""
        values: dict[str, object] = {
            "model.path": str(self.model),
            "model.dtype": "float64",
            "wire.dtype": "float64",
            "train.learning_rate": 0.01,
            "train.batch_size": 8,
            "train.microbatches": 2,
            "train.max_length": 16,
            "train.local_iterations": 3,
            "train.max_steps": 12,
            "unfreeze.every_steps": 3,
            "runtime.lease_s": RUN_LEASE_S,
            "runtime.wait_s": 60.0,
            "recovery.copies": "none",
            "placement.replan": "never",  # a busy machine's nodes change their speed
            **{key.replace("__", "."): value for key, value in overrides.items()},
        }
        if values.get("train.method", "ringada") != "ringada":
            del values["unfreeze.every_steps"]
        from ringtune.job.job import Model

        return Job(model=Model(path=str(self.model))).with_overrides(values)


class Hold:
    """Keeps the grants of a run back, so that it has not ended when a node has come, or is noticed to be lost.

    It begins in the run's own thread, with the step of this number after the first event or line of a kind; empty = of
    all.
    """

    def __init__(self, cluster: Cluster, step: int, *, after: str = "") -> None:
        self._cluster, self._left, self._after = cluster, step, after
        self._lock, self._held, self._is_open = threading.Lock(), list[Any](), False
        self.has_begun = False

    def __call__(self, event: Any) -> None:
        """Count the steps of the run."""
        with self._lock:  # a step that is counted while it lets go begins no hold that nobody ends
            match event.WhichOneof("event"):
                case "metrics_json" if json.loads(event.metrics_json).get("kind") == self._after:
                    self._after = ""
                case kind if kind == self._after:
                    self._after = ""
                case "step_json" if not self._after:
                    self._left -= 1
                    if self._left == 0:
                        moving: Any = self._cluster.coordinator._driver.work._require_placed().migration
                        if moving.grant != self._keep:
                            self._moving, self._grant = moving, moving.grant
                            moving.grant = self._keep
                        self._is_open, self.has_begun = False, True

    def _keep(self, turns: Any, keep: Any = None) -> None:
        with self._lock:
            if self._is_open or not turns:
                self._grant(turns, keep)
            else:
                self._held.append((self._number, turns))

    @property
    def _number(self) -> int:
        return int(self._moving.part.placement.placement_number)

    def let_go(self, *, until: int = 0) -> None:
        """Grant what was kept back, and whatever follows; keep it back again with this step from now on; 0 = never."""
        with self._lock:
            self._is_open, self._left, self.has_begun = True, until, False
            for number, turns in self._held:
                if number == self._number:  # else all have gone back since
                    self._grant(turns)
            self._held.clear()


class Cluster(Nodes):
    """A coordinator in this process, and its agents."""

    def __init__(
        self, folder: Path, *, keeper: TrustKeeper | None = None, lease_s: float = LEASE_S, **nodes: Any
    ) -> None:
        super().__init__(folder, **nodes)
        self._planned: dict[str, Outcome] = {}
        self._server = CoordinatorServer("127.0.0.1:0", lease_s=lease_s, keeper=keeper)

    @property
    def address(self) -> str:
        """Where the coordinator listens."""
        return self._server.address

    @property
    def coordinator(self) -> Any:
        """The coordinator itself."""
        return self._server.coordinator

    # ---- agents -----------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start these agents, all by default, and wait until they have joined."""
        names = names or self.names
        before = self._instances()
        for name in names:
            self.end_lease(name)  # of its predecessor, which has ended
            self.spawn(name, self.address, "--watch-parent")
        deadline_s = time.monotonic() + START_S
        while not set(names) <= {name for name, instance in self._instances().items() if before.get(name) != instance}:
            for name in names:
                assert self.agents[name].poll() is None, f"{name} ended: {self.log(name)}"
            assert time.monotonic() < deadline_s, f"not all of {names} joined"
            time.sleep(0.02)

    def _instances(self) -> dict[str, str]:
        """Which process each living node is: one that was killed lives on until its lease ends."""
        return {member.node: member.instance for member in self.coordinator.living()}

    def end_lease(self, name: str) -> None:
        """Let the lease of an agent that was killed, or stands still, be over."""
        end_lease(self.coordinator, name)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Serve and have all agents joined; stop them in the end."""
        with self._server:
            try:
                self.start()
                yield
            finally:
                self.close()

    # ---- runs -------------------------------------------------------------------------------------

    def planned(self, job: Job) -> Outcome:
        """What the planner makes of a job, without a run; it is asked once for each job."""
        key = job.to_toml()
        if key not in self._planned:
            asked = RunRequest(job=job, plan_only=True, num_nodes=len(self.agents), join_s=START_S)
            self._planned[key] = Follower(self.coordinator.run(asked)).wait()
        return self._planned[key]

    def plan_on(self, job: Job, slices: Slices, *later: tuple[int, Slices]) -> Plan:
        """The course that the planner makes of a job on these slices, and on later ones from some turns on."""
        plan = self.planned(job).plan
        assert plan is not None, self.planned(job).message
        return moving(Plan.of(plan.course, Placement(slices=slices_of(slices))), *later)

    def follow(
        self, job: Job, resume: Resume | None = None, *, plan: Plan | None = None, hold: Hold | None = None, **more: Any
    ) -> Follower:
        """Start a run on the living nodes, by a plan if one is given, or go on with one; ``more`` is of the request."""
        given = GivenPlan(plan=plan) if plan is not None else None
        asked = {"num_nodes": len(self.agents), "join_s": START_S, **more}
        request = RunRequest(job=job, resume=resume, plan=given, **asked)
        sinks = self.coordinator.sinks
        sinks += [hold] if hold else []
        try:
            return Follower(self.coordinator.run(request))
        finally:
            sinks[:] = [sink for sink in sinks if sink is not hold]

    def run(self, job: Job, resume: Resume | None = None, *, plan: Plan | None = None) -> Outcome:
        """Run a job to its end, which is a good one."""
        outcome = self.follow(job, resume, plan=plan).wait()
        assert outcome.is_done, outcome.message
        return outcome

    def states(self) -> dict[str, str]:
        """The state of every member."""
        return {member.node: state for member, state, _ in self.coordinator.members()}

    def wait_idle(self, *names: str) -> None:
        """Wait until no run is driven and these nodes are idle."""
        deadline_s = time.monotonic() + START_S
        while any(self.states().get(name) != "idle" for name in names):
            assert time.monotonic() < deadline_s, f"not idle: {self.states()}"
            time.sleep(0.02)

    def wait_gone(self, name: str) -> None:
        """Wait until an agent that has left is no member: its call has a second, else its lease has to end."""
        deadline_s = time.monotonic() + START_S
        while self.states().get(name, "lost") != "lost":
            assert time.monotonic() < deadline_s, f"{name} is a member still: {self.states()}"
            time.sleep(0.02)

    def revive(self) -> None:
        """Start again whoever has ended, let go on who stands still, and wait until all are idle."""
        for name in self.names:
            agent = self.agents.get(name)
            if agent is not None:
                agent.send_signal(signal.SIGCONT)
                if agent.poll() is None:
                    continue
                self.wait_exit(name)
            self.start(name)
        self.wait_idle(*self.names)


@contextmanager
def running(folder: Path, **nodes: Any) -> Iterator[Cluster]:
    """A cluster whose agents have joined."""
    cluster = Cluster(folder, **nodes)
    with cluster.listening():
        yield cluster


def free_port() -> int:
    """A port that was free a moment ago, where neither the system nor another process of the tests takes any."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("endless")
