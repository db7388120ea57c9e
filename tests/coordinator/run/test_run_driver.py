"""A whole run over real gRPC with agents that need no torch: who takes part, who hears of it, and what follows it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.client.submit import Client
from coordinator.run.driver import Driver, Participants, StatusBoard
from coordinator.run.members import Member
from coordinator.run.requests import RunRequest
from coordinator.screen.listing import status_json, status_lines
from coordinator.screen.progress import Progress
from coordinator.server.server import CoordinatorServer
from ringtune import __version__, cli
from ringtune.errors import InterruptedRunError, PlanError, RingTuneError
from ringtune.schedule.plan import Plan
from ringtune.techniques.offload import helped
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, FakeCluster, job, run, submit
from tests.support.plans import make_plan


def test_run_tells_further_readers_what_it_tells_its_submitter() -> None:
    """A sink at the coordinator and one at the submitter hear the same events, from the run's id to its end.

    What another reader raises is its own fault. Nodes are told that the run is done: only then may they drop shards.
    """
    there: list[control_pb2.RunEvent] = []
    here: list[control_pb2.RunEvent] = []

    def broken(event: control_pb2.RunEvent) -> None:
        raise ValueError("this page does not load")

    with FakeCluster("a", "b") as cluster:
        cluster.server.coordinator.sinks += [broken, there.append]
        submit(cluster, RunRequest(job=job(), num_nodes=2), sinks=(here.append,))
        assert all(agent.released.wait(CALL_S) and agent.is_finished for agent in cluster.agents.values())
    assert there == here
    kinds = [event.WhichOneof("event") for event in there]
    assert [kinds[0], kinds[1], kinds[-1]] == ["run_id", "job_toml", "done"]
    assert {"plan_json", "step_json", "metrics_json", "report_json", "file"} <= set(kinds)


def test_run_plan_only_prepares_nobody() -> None:
    """Asked for a plan, the coordinator inspects (once for sizes, once for times), plans and releases."""
    with FakeCluster("a", "b") as cluster:
        came = submit(cluster, RunRequest(job=job(), plan_only=True))
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        logs = [agent.log[:3] for agent in cluster.agents.values()]  # of one that is slow the release is asked again
        asked = [agent.inspected for agent in cluster.agents.values()]
    assert came.plan is not None
    assert [(piece.node, piece.start, piece.stop) for piece in came.plan.placement.slices] == [("a", 0, 2), ("b", 2, 4)]
    assert set(came.memory) == {"a", "b"}
    assert logs == [["inspect", "inspect", "release"]] * 2
    assert [(one.measure, one.neighbours, one.fresh) for one in asked] == [(True, 1, False)] * 2, "beside each other"
    assert all(0 < one.measure_s <= 1 for one in asked), "a run takes a second for it"


def test_run_takes_nodes_with_data_first() -> None:
    """Of three members two are wanted: the one without data stays idle."""
    with FakeCluster("a", "b", "c", agents={"a": {"rows": 0}}) as cluster:
        came = run(cluster, num_nodes=2)
        assert cluster.agents["a"].log == []
    assert came.plan is not None
    assert came.plan.nodes == ("b", "c")


def test_run_that_is_cancelled_releases_every_node() -> None:
    """If the submitter goes away the run stops; nodes are free and the next run may begin."""
    silent: dict[str, Any] = {"on_grant": lambda agent, turns: None}
    with FakeCluster("a", "b", agents={"a": silent, "b": silent}) as cluster:
        client = Client(cluster.server.address)
        ended: list[RingTuneError] = []

        def follow() -> None:
            try:
                client.run(RunRequest(job=job(), num_nodes=2), progress=Progress(), folder=None)
            except RingTuneError as error:
                ended.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        assert cluster.agents["a"].granted.wait(CALL_S)
        client.close()
        thread.join(CALL_S)
        assert [type(error) for error in ended] == [InterruptedRunError], ended
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        assert cluster.server.coordinator.stop("test", CALL_S)


class Clock:
    """A clock that stands until it is set."""

    now_s = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


def step(**changes: Any) -> control_pb2.RunEvent:
    """An item that is through."""
    values = {"kind": "train", "step": 5, "round": 1, "initiator": "a", "depth": 2, "loss": 0.25, **changes}
    return control_pb2.RunEvent(step_json=json.dumps(values))


def planned(plan: Plan) -> control_pb2.RunEvent:
    """A run has a plan."""
    return control_pb2.RunEvent(plan_json=json.dumps(plan.to_json()))


def test_run_status_follows_the_events() -> None:
    """Phase, figures and times are the latest ones."""
    clock = Clock()
    board = StatusBoard("r1", clock=clock)
    clock.now_s = 103.0
    board.take(control_pb2.RunEvent(state="training"))
    board.take(planned(make_plan([("a", 0, 4)], ["a"], num_steps=8)))
    board.take(step())
    clock.now_s = 105.0
    found = board.read()
    assert (found.phase, found.phase_s, found.run_s, found.is_over) == ("training", 2.0, 5.0, False)
    assert (found.steps_done, found.num_steps, found.round, found.initiator) == (5, 8, 1, "a")
    assert (found.depth, found.loss) == (2, 0.25)


def test_run_status_tells_who_helps_whom() -> None:
    """As the latest plan says, so that a node that hosts nothing is seen to be of use."""
    board = StatusBoard("r1")
    plain = make_plan([("a", 0, 2), ("b", 2, 4)], ["b"])
    board.take(planned(helped(plain, {"a": "z", "b": "a"})))
    status = control_pb2.StatusReply(run=board.read())
    assert status_json(status)["run"]["helpers"] == [
        {"node": "z", "host": "a", "start": 0, "stop": 2},
        {"node": "a", "host": "b", "start": 2, "stop": 4},
    ]
    assert status_lines(status, "127.0.0.1:7070")[1:3] == [
        "z fits the adapters of a's blocks [0, 2)",
        "a fits the adapters of b's blocks [2, 4)",
    ]
    board.take(planned(plain))
    assert not board.read().helpers
    # What was known stays
    board = StatusBoard("r1")
    board.take(planned(helped(make_plan([("a", 0, 4)], ["a"]), {"a": "z"})))
    with pytest.raises(PlanError):
        board.take(control_pb2.RunEvent(plan_json='{"course": {"num_steps": 8}}'))
    assert [one.node for one in board.read().helpers] == ["z"]


def test_run_status_names_the_units_of_a_group_and_figures_that_there_are() -> None:
    """Where groups of units train, their names stand instead of a depth."""
    board = StatusBoard("r1")
    board.take(step(depth=0, trains="embedding"))
    status = control_pb2.StatusReply(run=board.read())
    assert status_json(status)["run"]["trains"] == "embedding"
    assert status_lines(status, "127.0.0.1:7070")[1] == "step 5/0: round 1, a, trains embedding, loss 0.2500"
    board.take(step(step=6))
    assert not board.read().HasField("trains")
    # Before the first step there is no loss, not a loss of 0; nor is there one of a batch without targets
    board = StatusBoard("r1")
    assert not board.read().HasField("loss")
    board.take(step(loss=None))
    assert not board.read().HasField("loss")
    assert board.read().steps_done == 5


def test_run_status_stops_the_clock_at_the_end() -> None:
    """A failed run keeps its reason and its length."""
    clock = Clock()
    board = StatusBoard("r1", clock=clock)
    clock.now_s = 104.0
    board.take(control_pb2.RunEvent(failure=control_pb2.RunFailure(error="PeerLostError", message="node b is lost")))
    clock.now_s = 150.0
    found = board.read()
    assert (found.is_over, found.phase, found.run_s, found.phase_s) == (True, "failed", 4.0, 46.0)
    status = control_pb2.StatusReply(run=found)
    assert status_lines(status, "127.0.0.1:7070")[:2] == [
        "run r1: failed 46.0 s ago, after 4.0 s; nothing is driven now",
        "error: node b is lost",
    ]


def test_run_status_is_answered_by_a_coordinator() -> None:
    """Nothing yet, then the run that was; nodes with their state beside it."""
    with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client:
        before = client.status()
        assert (before.version, before.HasField("run")) == (__version__, False)
        assert status_lines(before, client.address)[0] == "no run yet"
        client.run(RunRequest(job=job()), progress=Progress(), folder=None)
        value = status_json(client.status())
    run = value["run"]
    assert (run["phase"], run["is_over"], run["message"]) == ("done", True, "")
    assert (run["steps_done"], run["num_steps"]) == (8, 8)
    assert run["loss"] == 0.5
    assert [(node["node"], node["state"]) for node in value["nodes"]] == [("a", "idle"), ("b", "idle")]


def test_run_status_without_nodes_tells_how_one_joins_there() -> None:
    """The command can be typed as it stands: with the address that was asked."""
    lines = status_lines(control_pb2.StatusReply(), "10.0.0.7:7070")
    assert lines[-1].endswith("ringtune node --coordinator 10.0.0.7:7070 --insecure")
    with CoordinatorServer("127.0.0.1:0", lease_s=10.0) as server:
        shown = CliRunner().invoke(cli.app, ["status", "--coordinator", server.address])
    assert f"ringtune node --coordinator {server.address}" in shown.stdout


def test_run_status_says_for_whom_the_run_waits() -> None:
    """With the time that is left, until another phase begins."""
    clock = Clock()
    board = StatusBoard("r1", clock=clock)
    board.take(control_pb2.RunEvent(state="waiting"))
    board.awaits(("b",), "b owns rows, which no other node has", clock.now_s + 300.0)
    clock.now_s += 60.0
    status = control_pb2.StatusReply(run=board.read())
    assert status_json(status)["run"]["awaited"] == {
        "nodes": ["b"],
        "why": "b owns rows, which no other node has",
        "seconds": 240.0,
    }
    (line,) = [line for line in status_lines(status, "127.0.0.1:7070") if line.startswith("waits for node b, ")]
    assert "b owns rows, which no other node has; start it again" in line
    board.awaits((), "nothing fits", clock.now_s + 300.0)
    lines = status_lines(control_pb2.StatusReply(run=board.read()), "127.0.0.1:7070")
    (line,) = [line for line in lines if line.startswith("waits for a node with room, ")]
    assert "nothing fits; start one, or stop the run" in line
    board.take(control_pb2.RunEvent(state="moving"))
    status = control_pb2.StatusReply(run=board.read())
    assert status_json(status)["run"]["awaited"] is None
    assert not any("waits for" in line for line in status_lines(status, "127.0.0.1:7070"))


def test_run_passes_on_a_drain_that_comes_while_the_next_run_takes_its_place() -> None:
    """Between the look for earlier drains and the moment from which later ones are passed on none is lost."""
    drained: list[str] = []

    class Watched(Driver):
        next_run: Any = None

        @property
        def after(self) -> Any:
            return self.next_run

        @after.setter
        def after(self, value: Any) -> None:
            self.asking = threading.Thread(target=self.drain, args=("Ctrl-C",))
            if value is not None:
                self.asking.start()
                self.asking.join(0.1)  # it ends, unless it waits until the next run is in its place
            self.next_run = value

    failing: Any = SimpleNamespace(
        drive=lambda: PlanError("it failed"),
        begin_after=lambda failed: SimpleNamespace(drain=drained.append, stop=drained.append),
    )
    with FakeCluster("a", "b") as cluster:
        participants = Participants("r", cluster.server.coordinator, lease_s=CALL_S)
        driver = Watched(participants, failing, on_end=lambda: None)
        driver.start()
        assert driver.join(CALL_S)
        driver.asking.join(CALL_S)
    assert drained == ["Ctrl-C"]


def test_run_that_is_stopped_begins_no_other_and_releases_who_is_not_released() -> None:
    """A node is released once, and again if it has come back since; a failure beside a stop is the end."""
    told: list[str] = []
    begun: list[RingTuneError] = []

    def calls_to(node: str) -> Any:
        def release(reason: str, *, is_finished: bool = False) -> Future[None]:
            told.append(f"{node}: {reason}")
            released = Future[None]()
            released.set_result(None)
            return released

        return SimpleNamespace(release=release, close=lambda: None)

    members: Any = SimpleNamespace()
    participants = Participants("r", members, lease_s=CALL_S)
    participants.calls |= {node: calls_to(node) for node in "abc"}
    participants.release("a", "it is lost")
    participants.release("b", "the plan does not need this node")
    participants.admit(Member(node="a", address="127.0.0.1:1", instance="another process"), calls_to("a"))
    failing: Any = SimpleNamespace(
        drive=lambda: PlanError("it failed"), begin_after=begun.append, finish_files=lambda: None
    )
    driver = Driver(participants, failing, on_end=lambda: None)
    driver.stop("Ctrl-C")
    driver.start()
    assert driver.join(CALL_S)
    assert told == ["a: it is lost", "b: the plan does not need this node", "a: it failed", "c: it failed"]
    assert not begun
