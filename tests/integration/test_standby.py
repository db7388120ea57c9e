"""Two coordinators of one database as processes: the first is killed, and the run ends as if nothing had been."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.planner.given_plan import GivenPlan
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from coordinator.server import database
from coordinator.server.database import Database
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.transport.endpoints import target_of
from ringtune.v1 import control_pb2
from tests.support.cluster import START_S, Nodes, free_port
from tests.support.failpoints import order_failure
from tests.support.fake_agents import CALL_S, FakeAgent, FakeCluster, job, read_lines, steps_of, submit
from tests.support.kept_runs import content
from tests.support.postgresql import postgresql
from tests.support.processes import RUN_S, start_ringtune
from tests.support.trials import wait_until

LEASE_S = 8.0  # a coordinator whose beats a busy machine holds up for as long ends, as it has to
LONG_LEASE_S = 30.0  # of real nodes, which keep a machine busy; nobody waits for its end
JOB = job(train__checkpoint_every=2, train__eval_every=4)


class Coordinators:
    """Two processes; the second one is a standby."""

    def __init__(self, folder: Path, url: str, lease_s: float) -> None:
        self.places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.first, self.second = (
            start_ringtune(
                *("coordinator", "--bind", place, "--database", url, "--lease", lease_s, "--json"),
                XDG_STATE_HOME=str(folder / f"home-{number}"),
            )
            for number, place in enumerate(self.places)
        )

    def begun(self) -> list[dict[str, str]]:
        """The first lines of both; from now on the first one is that which was faster, and acts."""
        told = [self.line(process) for process in (self.first, self.second)]
        if told[0]["event"] == "note":
            self.first, self.second = self.second, self.first
            told.reverse()
        assert told[0]["event"] == "listening"
        return told

    def line(self, process: subprocess.Popen[str]) -> dict[str, str]:
        """The next line of one of them."""
        assert process.stdout is not None
        return dict(json.loads(process.stdout.readline()))

    def close(self) -> None:
        """End both; what they said is shown with a failure."""
        for process in (self.first, self.second):
            process.send_signal(signal.SIGKILL)
            sys.stdout.write("\n".join(process.communicate(timeout=RUN_S)))


class BeatingAgent(FakeAgent):
    """An agent that renews its lease at whichever coordinator answers, and joins one that does not know it."""

    def __init__(self, node: str, places: str, on_grant: object) -> None:
        super().__init__(node, target_of(places), on_grant=on_grant)  # type: ignore[arg-type]
        self.has_joined, self._closing = threading.Event(), threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def _beat(self) -> None:
        request = control_pb2.HeartbeatRequest(node=self.node, instance=self.address)
        while not self._closing.wait(LEASE_S / 40):
            with contextlib.suppress(grpc.RpcError):
                if not self.stub.Heartbeat(request, timeout=CALL_S).known:
                    self.join()
                self.has_joined.set()

    def close(self) -> None:
        """Leave."""
        self._closing.set()
        self._beats.join(CALL_S)
        super().close()


class Killer:
    """Does turns, and kills a process in the third grant."""

    def __init__(self) -> None:
        self.victim: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._grants = 0

    def __call__(self, agent: FakeAgent, turns: list[Turn]) -> None:
        """Do them; a coordinator that was killed does not hear of it."""
        with self._lock:
            self._grants += 1
            if self._grants == 3 and self.victim is not None:
                self.victim.send_signal(signal.SIGKILL)
        with contextlib.suppress(grpc.RpcError):
            agent.stub.Report(agent.report(turns), timeout=CALL_S)


@contextlib.contextmanager
def coordinators(folder: Path, url: str, lease_s: float = LEASE_S) -> Iterator[Coordinators]:
    """Two of one database."""
    made = Coordinators(folder, url, lease_s)
    try:
        yield made
    finally:
        made.close()


def undisturbed(folder: Path) -> dict[str, bytes]:
    """The files of the run at one coordinator that nobody kills."""
    with FakeCluster("a", "b") as cluster:
        submit(cluster, RunRequest(job=JOB, num_nodes=2, join_s=CALL_S), folder)
    return content(folder)


def taken_over(folder: Path, url: str) -> None:
    """Kill the acting one of two coordinators in a run; see that the run ends at the other one with the same files."""
    whole = undisturbed(folder / "whole")
    with coordinators(folder, url) as two, contextlib.ExitStack() as stack:
        assert "this one takes over a lease after its last beat" in two.begun()[1]["text"]
        kills, places = Killer(), ",".join(two.places)
        agents = [BeatingAgent(name, places, kills) for name in ("a", "b")]
        for agent in agents:
            stack.callback(agent.close)
            assert agent.has_joined.wait(CALL_S)
        kills.victim = two.first
        with Client(places) as client, RunFolder(folder / "out") as files:
            request = RunRequest(job=JOB, num_nodes=2, join_s=CALL_S)
            client.run(request, progress=Progress(), folder=files, coordinator_wait_s=RUN_S)
            assert two.first.wait(RUN_S) == -signal.SIGKILL
            before, after = client.runs()
    assert (before.state, after.state, after.takes_up) == ("interrupted", "done", before.run_id)
    assert content(folder / "out") == whole
    assert [line["step"] for line in steps_of(folder / "out" / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.promise("6 every wait ends")
def test_coordinator_that_loses_its_lease_is_a_standby_again(tmp_path: Path) -> None:
    """In the same process, also while its database is away; it acts again when the lease is free."""
    folder = tmp_path / "state"
    folder.mkdir()
    url, lease = f"sqlite:///{folder}/state.sqlite", database._LEASE
    place = f"127.0.0.1:{free_port()}"
    process = start_ringtune("coordinator", "--bind", place, "--database", url, "--lease", LEASE_S, "--json")

    def line() -> dict[str, str]:
        assert process.stdout is not None
        return dict(json.loads(process.stdout.readline()))

    try:
        assert line()["event"] == "listening"
        with Database(url, lease_s=LEASE_S) as other, other.transaction() as rows:
            rows.execute(lease.update().values(number=lease.c.number + 1, holder="other"))
            folder.rename(tmp_path / "away")
        assert "can't use the database" in line()["text"]
        (tmp_path / "away").rename(folder)
        while "coordinator other acts" not in (text := line()["text"]):
            assert "can't use the database" in text
        end_lease(url)
        told = line()
        assert (told["event"], told["address"]) == ("listening", place)
        process.send_signal(signal.SIGTERM)
        assert process.wait(RUN_S) == 0
    finally:
        process.kill()
        process.communicate(timeout=RUN_S)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.promise("6 every wait ends")
def test_run_goes_on_at_the_standby_with_postgresql(tmp_path: Path) -> None:
    """As on SQLite below; the laws of lease and copy are in ``tests/coordinator/server/test_database.py``."""
    with postgresql() as server:
        taken_over(tmp_path, server.new_database())


def end_lease(url: str) -> None:
    """Let the lease of whoever has it be over."""
    with Database(url, lease_s=LEASE_S) as other, other.transaction() as rows:
        rows.execute(database._LEASE.update().values(lease_s=0.0))


class KillerAtStep(Progress):
    """Kills a coordinator as a step is shown, while a node stands still in a later turn; ends its lease at once."""

    def __init__(
        self, victim: subprocess.Popen[str], step: int, url: str, nodes: Nodes, node: str, stops: Path
    ) -> None:
        self._victim, self._step, self._url = victim, step, url
        self._nodes, self._node, self._stops = nodes, node, stops

    def step(self, step: Mapping[str, Any]) -> None:
        """Kill it."""
        if step["step"] == self._step:
            wait_until(self._stops.exists, lambda: f"{self._node} has not stopped", within_s=RUN_S)
            self._nodes.wait_stopped(self._node)
            self._victim.send_signal(signal.SIGKILL)
            assert self._victim.wait(RUN_S) == -signal.SIGKILL
            end_lease(self._url)
            self._nodes.signal(self._node, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.promise("1 partition invariance")
def test_real_nodes_go_on_at_the_standby_with_equal_bits(tmp_path: Path) -> None:
    """From the last turn that ended, with the evaluations and the steps of a run that was left alone, each once."""
    orders = tmp_path / "orders"
    orders.mkdir()
    nodes = Nodes(tmp_path, owners=("a", "b"), hosts=("c",), failpoints=orders)
    wanted = nodes.job(train__max_steps=18, train__eval_every=6, recovery__copies="next", runtime__lease_s=LONG_LEASE_S)
    url = f"sqlite:///{tmp_path}/state.sqlite"
    with coordinators(tmp_path, url, lease_s=LONG_LEASE_S) as two, contextlib.closing(nodes):
        two.begun()
        places = ",".join(two.places)
        for name in nodes.names:
            nodes.spawn(name, places, "--watch-parent")

        def run(name: str, progress: Progress, plan: GivenPlan | None = None) -> Plan:
            request = RunRequest(job=wanted, num_nodes=3, join_s=START_S, plan=plan)
            with Client(places) as client, RunFolder(tmp_path / name) as files:
                client.run(request, progress=progress, folder=files, coordinator_wait_s=RUN_S)
            return Plan.from_json(json.loads((tmp_path / name / "plan.json").read_text()))

        stops = order_failure(orders, "c", "backward 13 stop")  # two in a step: after two turns
        plan = run("killed", KillerAtStep(two.first, 2, url, nodes, "c", stops))
        run("whole", Progress(), GivenPlan(plan=plan))
        with Client(places) as client:
            assert [record.state for record in client.runs()] == ["interrupted", "done", "done"]
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    books = [
        [(line["kind"], line["step"], line["loss"]) for line in read_lines(tmp_path / name / "metrics.jsonl")]
        for name in ("killed", "whole")
    ]
    assert books[0] == books[1] and len(books[0]) == 18 + 3
