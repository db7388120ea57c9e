"""A run that fails, over real gRPC with agents that need no torch: its error, its end, and nobody left waiting."""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.client.follow import show_events
from coordinator.client.submit import Client
from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.make_plan import make_plan
from coordinator.run import node_client as file_calls
from coordinator.run.driver import Driver, MemberJoined, Participants
from coordinator.run.members import LinkCache, Member
from coordinator.run.requests import RunRequest
from coordinator.run.run_driver import RunWork
from coordinator.screen.progress import Progress
from coordinator.server.coordinator import Coordinator
from coordinator.server.run_store import RunStore
from ringtune.costs.profile import NodeFacts
from ringtune.errors import (
    CapacityError,
    DataError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    JobError,
    ModelError,
    PeerLostError,
    RingTuneError,
    StorageError,
)
from ringtune.job.job import Job
from ringtune.run_control import events as rd
from ringtune.schedule.turns import Turn
from ringtune.techniques.offload import helped
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, MODEL, NO_TIMES, FakeAgent, FakeCluster, end_lease, job, run, submit
from tests.support.fake_agents import facts as fake_facts
from tests.support.plans import make_plan as make_course_plan


@pytest.mark.promise("7 bounded memory")
def test_run_that_can_not_fit_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """Train and plan refuse with the same two numbers; a measurement of such a job would itself use up the memory."""
    little = {"facts_changes": {"memory_bytes": 1500, "activation_token_bytes": 250}}
    with FakeCluster("a", "b", agents={"a": little, "b": little}) as cluster:
        with pytest.raises(CapacityError) as refused:
            run(cluster)
        asked = [agent.inspected.measure for agent in cluster.agents.values()]
        facts = {name: fake_facts(name, memory_bytes=1500, **NO_TIMES) for name in ("a", "b")}
        with pytest.raises(CapacityError) as planned:
            make_plan(job(), facts)
    assert asked == [False, False]
    assert str(refused.value) == str(planned.value)


def test_run_whose_state_has_no_room_on_a_disk_is_refused_before_anything_is_measured() -> None:
    """The timing of a checkpoint would fill the disk, and refuse the run without the numbers."""
    little = {"facts_changes": {"state_free_bytes": 100}}
    with FakeCluster("a", "b", agents={"a": little, "b": little}) as cluster:
        with pytest.raises(StorageError, match=r"node a needs 500 B in its folder for state .* but 100 B are free"):
            run(cluster, train__method="hift", hift__state="disk")
        asked = [agent.inspected.measure for agent in cluster.agents.values()]
    assert asked == [False, False]


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train_rows": 10**15}, r"node b: b.train_rows is 1000000000000000, it has to be at most 16,777,216; give"),
        ({"eval_rows": 1 << 24}, r"node b has 16,777,216 evaluation rows, 4,194,304 batches, .*; give it fewer rows"),
        ({"labels": ["x"] * (1 << 16) + ["y"]}, r"node b: b.labels has 65,537 entries, it may have 65,536; leave out"),
        ({"rack": "x" * 2000}, r"node b: b.rack has 2,000 characters, it may have 1,000; shorten it"),
        ({"device": "x" * 2000}, r"node b: b.device has 2,000 characters, it may have 1,000; shorten it"),
        ({"block_forward_s": "fast"}, r"node b: block_forward_s has to be a number, but is the text 'fast'"),
    ],
)
def test_node_whose_facts_can_not_be_is_named(
    changes: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a list of its rows, of its batches or of its classes takes the coordinator's memory or time."""
    tell_facts(monkeypatch, changes)
    with FakeCluster("a", "b") as cluster, pytest.raises(RingTuneError, match=told):
        run(cluster)


def tell_facts(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Let node b say these facts of itself."""
    said = NodeFacts.to_message
    monkeypatch.setattr(NodeFacts, "to_message", lambda own: said(own) | (changes if own.node == "b" else {}))


_NO_TIME = {"work": "forward", "rows": 2, "tokens": 8, "median_s": 0, "low_s": 0, "high_s": 0, "samples": 3}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"memory_bytes": -1}, "b.memory_bytes is -1, it has to be at least 0; use one version on all machines;"),
        ({"block_forward_s": 0.0}, "block_forward_s took 0 s for a block, which can't be less than 1e-06 s"),
        ({"block_graph_s": 1e-9}, "block_graph_s took 1e-09 s for a block, which can't be less than 1e-06 s"),
        ({"work_times": [_NO_TIME]}, "forward of 16 tokens took 0 s for a block"),
    ],
)
def test_run_begins_without_a_host_whose_facts_can_not_be(
    changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first or, of times, the second answer takes the host out, by its name; an honest node is not blamed."""
    tell_facts(monkeypatch, changes)
    with FakeCluster("a", "b", agents={"b": {"rows": 0}}) as cluster:
        outcome = run(cluster)
        assert cluster.agents["b"].released.wait(CALL_S)
    assert list(outcome.report["nodes"]) == ["a"]
    assert any(f"node b: {why}" in note and note.endswith("the run begins without node b") for note in outcome.notes)


def _models_of(**digests: str) -> dict[str, dict[str, Any]]:
    """Options of nodes whose models have these digests; c owns no rows."""
    return {
        name: {
            "facts_changes": {"model": dataclasses.replace(MODEL, digest=digest * 64)},
            "rows": 0 if name > "b" else 4,
        }
        for name, digest in digests.items()
    }


def test_run_begins_without_a_host_with_another_model_than_most() -> None:
    """Two of three agree; the host with the third model has no rows."""
    agents = _models_of(a="e", b="e", c="f")
    with FakeCluster(*agents, agents=agents) as cluster:
        outcome = run(cluster, num_nodes=3)
        assert cluster.agents["c"].released.wait(CALL_S)
    assert set(outcome.report["nodes"]) == {"a", "b"}
    (note,) = [note for note in outcome.notes if note.endswith("the run begins without node c")]
    assert "node c: it has another model (ffffffffffff…) than node a, b (eeeeeeeeeeee…); copy the same folder" in note


@pytest.mark.parametrize(
    ("digests", "told"),
    [
        ({"a": "e", "c": "f"}, "nodes a and c have different models"),
        ({"a": "f", "b": "e", "c": "e"}, r"node a: it has another model \(f{12}…\) than node b, c \(e{12}…\); copy"),
        ({"a": "e", "b": "f", "c": "d"}, "nodes a and b have different models"),
    ],
)
def test_run_without_a_majority_or_of_an_owner_with_another_model_ends(digests: dict[str, str], told: str) -> None:
    """Neither is removed where one is as many as the other, or the run needs its rows."""
    agents = _models_of(**digests)
    with FakeCluster(*agents, agents=agents) as cluster, pytest.raises(ModelError, match=told):
        run(cluster, num_nodes=len(agents))


def test_run_without_a_node_whose_facts_can_be_ends_with_the_facts_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to plan with."""
    tell_facts(monkeypatch, {"memory_bytes": -1})
    with FakeCluster("b", agents={"b": {"rows": 0}}) as cluster, pytest.raises(IntegrityError, match="node b: b"):
        run(cluster, num_nodes=1)


@pytest.mark.promise("6 every wait ends")
def test_run_whose_last_files_fail_by_a_bug_ends_for_its_submitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last event comes all the same, and says what failed."""
    finish = RunWork.finish_files

    def broken(work: RunWork) -> None:
        finish(work)
        raise ValueError("no such figure")

    heard: list[control_pb2.RunEvent] = []
    monkeypatch.setattr(RunWork, "finish_files", broken)
    with FakeCluster("a", "b") as cluster:
        cluster.server.coordinator.sinks.append(heard.append)
        with pytest.raises(RingTuneError, match=r"internal error, ValueError at coordinator\.\S+; please"):
            run(cluster)
    assert heard[-1].WhichOneof("event") == "failure"


def test_run_without_room_for_what_nodes_send_names_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full temporary folder is no bug: exit code 9 and the folder, whether it is found or only can't be written."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with FakeCluster("a", "b") as cluster:
        for name in ("gettempdir", "TemporaryDirectory"):
            with monkeypatch.context() as patch:
                patch.setattr(tempfile, name, full)
                with pytest.raises(StorageError, match="No space left on device"):
                    run(cluster)


def test_run_ends_with_the_error_of_a_node() -> None:
    """Whenever a node fails, its own error comes out, named, and every node is released."""
    for phase in ["inspect", "prepare", "grant", "collect"]:
        failing = {"fails_at": {phase: ModelError("the weights are gone; copy them again")}}
        with FakeCluster("a", "b", agents={"b": failing}) as cluster:
            with pytest.raises(ModelError, match="node b: the weights are gone"):
                run(cluster)
            assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
            assert not any(agent.is_finished for agent in cluster.agents.values())


@pytest.mark.parametrize(
    ("peer", "phase", "kind", "lost"),
    [
        ("c", "preparing", FrameError, "c"),
        ("c", "training", FrameError, ""),
        ("c", "preparing", IntegrityError, ""),
        ("b", "preparing", FrameError, ""),
        ("d", "preparing", FrameError, "d"),
        ("x", "preparing", FrameError, ""),
        ("", "preparing", FrameError, ""),
    ],
)
def test_node_that_can_not_prepare_accuses_a_host_of_the_plan_alone(
    peer: str, phase: str, kind: type[RingTuneError], lost: str
) -> None:
    """The run goes on without a host that takes no link, or an owner ``d`` that it takes back as it is resumed.

    Without another owner, or a stranger, on nobody's word; nor without any node once all have prepared.
    """
    plan = make_course_plan([("a", 0, 2), ("c", 2, 4)], ["a", "b", "d"])
    members: Any = SimpleNamespace(links=LinkCache())
    participants = Participants("r", members, lease_s=CALL_S)
    work: Any = RunWork(participants, RunRequest(job()))
    work._planned, work._rounds = SimpleNamespace(plan=plan), SimpleNamespace(phase=phase)
    work._checkpoints = SimpleNamespace(taken_back=("d",))
    error = kind(f"node a can't send to node {peer}")
    error.peer = peer
    participants.node_failed("a", error)
    assert participants.queue.get_nowait() == rd.NodeFailed("a", kind.__name__, str(error), lost)


def test_run_ends_when_a_call_fails_by_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw ends the run at once, by name, instead of being waited for."""

    def broken(*_: object, **__: object) -> dict[str, bytes]:
        raise KeyError("oops")

    monkeypatch.setattr(file_calls, "write_any_files", broken)
    with (
        FakeCluster("a") as cluster,
        pytest.raises(RingTuneError, match="node a: internal error, KeyError at coordinator"),
    ):
        run(cluster, num_nodes=1)


def test_run_begins_with_a_node_that_joined_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it has joined is heard behind that it is one of the run: it was not started again."""
    recruit = Participants.recruit

    def late(participants: Participants, *arguments: Any, **options: Any) -> Any:
        members = recruit(participants, *arguments, **options)
        for member in members:
            participants.queue.put(MemberJoined(member))
        return members

    monkeypatch.setattr(Participants, "recruit", late)
    with FakeCluster("a", "b") as cluster:
        assert run(cluster).report["steps"]


def test_deadline_is_over_only_behind_what_was_heard_already() -> None:
    """A coordinator that stood still has what it waits for in its queue."""
    with FakeCluster("a") as cluster:
        participants = Participants("r", cluster.server.coordinator, lease_s=60.0)
        work, entries = RunWork(participants, RunRequest(job=job(), num_nodes=1)), participants.queue
        work._timers["phase"] = -1.0
        entries.put(rd.DrainRequested("test"))
        work._fire_timers()
        assert entries.get() == rd.DrainRequested("test")
        assert "phase" in work._timers
        work._take(entries.get())
        assert not work._timers


def test_run_names_a_lost_helper_with_what_it_did() -> None:
    """A node that only helps is lost like every other one, and the remedy says that another one could help."""
    wanted = job(offload__mode="auto", train__method="all")
    plan = helped(make_plan(wanted, {"b": fake_facts("b", **NO_TIMES)}).plan, {"b": "a"})

    def leaves(agent: FakeAgent, turns: list[Turn]) -> None:
        agent.stub.Leave(control_pb2.LeaveRequest(node="a", instance=agent.address), timeout=CALL_S)

    helper = {"on_grant": leaves, "facts_changes": {"train_rows": 0, "eval_rows": 0}}
    request = RunRequest(job=wanted, join_s=0.5, plan=GivenPlan(plan=plan))
    lost = r"node a is lost: .*; helper a fits .* b's blocks \[0, 4\): start it again"
    with FakeCluster("a", "b", agents={"a": helper}) as cluster, pytest.raises(PeerLostError, match=lost):
        submit(cluster, request)


def test_run_ends_when_a_node_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node at whose port nobody listens is lost, not an unreachable coordinator; it is asked once here."""
    monkeypatch.setattr("ringtune.transport.retry.RETRY_S", 600.0)
    cluster = FakeCluster("b")
    cluster.agents["b"].address = "127.0.0.1:1"
    with cluster, pytest.raises(PeerLostError, match=r"node b at 127.0.0.1:1 does not answer"):
        run(cluster, num_nodes=1)


def test_run_ends_with_the_last_words_of_a_node_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that is busy hears that it left before it reads them; they were said first all the same."""
    has_left = threading.Event()
    reported = RunWork._reported

    def busy(work: RunWork, request: control_pb2.ReportRequest) -> Iterator[rd.Event]:
        assert request.node != "b" or has_left.wait(CALL_S)
        yield from reported(work, request)

    def leaves(agent: FakeAgent, turns: list[Turn]) -> None:
        agent.stub.Report(agent.report([]), timeout=CALL_S)
        last = agent.report([])
        last.error, last.message = "PeerLostError", "node b was stopped (it rains); start it again"
        agent.stub.Report(last, timeout=CALL_S)
        agent.stub.Leave(control_pb2.LeaveRequest(node="b", instance=agent.address), timeout=CALL_S)
        has_left.set()

    monkeypatch.setattr(RunWork, "_reported", busy)
    with (
        FakeCluster("a", "b", agents={"b": {"on_grant": leaves}}) as cluster,
        pytest.raises(PeerLostError, match="it rains"),
    ):
        run(cluster)


def _reports(agent: FakeAgent, **values: Any) -> None:
    """Report that something went wrong."""
    request = agent.report([])
    for name, value in values.items():
        setattr(request, name, value)
    agent.stub.Report(request, timeout=CALL_S)


def _fails(agent: FakeAgent, turns: list[Turn]) -> None:
    _reports(agent, error="DataError", message="data/b.csv: row 7 has no text")


def _complains(agent: FakeAgent, turns: list[Turn]) -> None:
    _reports(agent, error="PeerLostError", message="node a lost its link with node b", lost_peer="b")


def _without_number(agent: FakeAgent, turns: list[Turn]) -> None:
    _reports(agent, number=0)


def _restarts(agent: FakeAgent, turns: list[Turn]) -> None:
    agent.stub.Leave(control_pb2.LeaveRequest(node=agent.node, instance=agent.address), timeout=CALL_S)
    agent.join(instance="another process")


def _silent(agent: FakeAgent, turns: list[Turn]) -> None:
    """Say nothing."""


Node = dict[str, Any]
HALF_EMOJI: Node = {"facts_changes": {"labels": ("\ud83d", "pos")}}
ENDS: dict[str, tuple[dict[str, Node], dict[str, Any], type[RingTuneError], str]] = {
    "a node reports an error, and is named": ({"a": {}, "b": {"on_grant": _fails}}, {}, DataError, "node b: .*row 7"),
    "others have lost a silent node": (
        {"a": {"on_grant": _complains}, "b": {"on_grant": _silent}},
        {},
        PeerLostError,
        "lost its link with node b",
    ),
    "a node was started again: nobody waits for it in vain": (
        {"a": {"on_grant": _restarts}},
        {},
        PeerLostError,
        "node a is lost: it has left, or was started again",
    ),
    "a node was started again and is granted turns before it joins": (
        {"a": {}, "b": {"fails_at": {"grant": FrameError("node b has no run, not run r; prepare it first")}}},
        {},
        PeerLostError,
        "node b was started again, or has given the run up: node b has no run",
    ),
    "a node was started again before its results are collected": (
        {"a": {}, "b": {"fails_at": {"collect": FrameError("node b has no run, not run r; prepare it first")}}},
        {},
        PeerLostError,
        "node b was started again, or has given the run up: node b has no run",
    ),
    "reports have no number": ({"a": {}, "b": {"on_grant": _without_number}}, {}, IntegrityError, "b has no number"),
    "nodes do not come": (
        {"a": {}},
        {"num_nodes": 2},
        DeadlineError,
        r"waited 0\.5 s for 2 nodes, 1 have joined \(a\)",
    ),
    "there is no node": ({}, {}, CapacityError, "no node has joined"),
    "the lease is shorter than the coordinator's": (
        {"a": {}},
        {"runtime__lease_s": 1.0},
        JobError,
        r"runtime\.lease_s = 1 is shorter",
    ),
    "a text can't be encoded": ({"a": {}, "b": HALF_EMOJI}, {"data__labels": ["neg", "pos"]}, DataError, "ud83d"),
}


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize("why", ENDS)
def test_run_ends_with_an_error_that_says_why(why: str) -> None:
    """Its submitter hears of it, whatever happens to nodes."""
    agents, changes, error, message = ENDS[why]
    with FakeCluster(*agents, agents=agents) as cluster, pytest.raises(error, match=message):
        run(cluster, **{"num_nodes": len(agents), **changes})


@pytest.mark.promise("6 every wait ends")
def test_run_ends_when_a_node_is_silent_for_a_lease() -> None:
    """In the midst of its turns."""

    def silent(agent: FakeAgent, turns: list[Turn]) -> None:
        end_lease(cluster.server.coordinator, "a")

    with (
        FakeCluster("a", agents={"a": {"on_grant": silent}}) as cluster,
        pytest.raises(PeerLostError, match=r"node a is lost: last contact .* lease is 600 s"),
    ):
        run(cluster, num_nodes=1)


@contextmanager
def losing_host(*, is_alive: bool = False, **changes: Any) -> Iterator[tuple[FakeCluster, Job]]:
    """Owners a and b, and host c, which stops at step 4 and is lost after the checkpoint there, or without one.

    With ``is_alive`` it answers the coordinator, but a has lost its link with it.
    """

    def stop(agent: FakeAgent, turns: list[Turn]) -> None:
        agent.stub.Report(agent.report([turn for turn in turns if turn.end_step <= 4]), timeout=CALL_S)
        if not wanted.train.checkpoint_every:
            lose()

    def on_event(event: control_pb2.RunEvent) -> None:
        begun.extend([event.run_id] if event.run_id else [])
        if event.WhichOneof("event") == "checkpoint_json" or (event.run_id and len(begun) > 1):  # told again late
            lose()

    def lose() -> None:
        coordinator, driver = cluster.server.coordinator, cluster.server.coordinator._driver
        if is_alive and driver is not None and len(begun) == 1:
            driver.participants.queue.put(rd.LinkFailed(rd.NodeFailed("a", "PeerLostError", "a link is lost", "c"), 0))
        else:
            coordinator.node_failed("c", PeerLostError("node c is lost"))

    wanted, begun = of_all_parameters(**changes), list[str]()
    stays = {"has_copies": True, "fails_at": {"collect": ModelError("collected")}}
    agents = {"a": stays, "b": stays, "c": {"rows": 0, "on_grant": stop}}
    with FakeCluster(*agents, agents=agents) as cluster:
        cluster.server.coordinator.sinks.append(on_event)
        yield cluster, wanted


def of_all_parameters(**changes: Any) -> Job:
    """Checkpoints at steps 4 and 8, of which the next host keeps copies."""
    return job(**{"train__method": "hift", "train__max_steps": 8, "train__checkpoint_every": 4, **changes})


def follow(cluster: FakeCluster, wanted: Job) -> None:
    """Submit a run on all nodes, and follow it to its end; the coordinator is there, so that nothing is waited for."""
    submit(cluster, RunRequest(wanted))


@pytest.mark.parametrize("is_alive", [False, True])
def test_run_of_all_parameters_goes_back_by_itself_where_it_is_stored_too(tmp_path: Path, is_alive: bool) -> None:
    """Whoever follows it follows the run that takes it up; the records say which one that is, and where it began."""
    with losing_host(is_alive=is_alive, recovery__copies="next") as (cluster, wanted):
        cluster.server.coordinator.kept = kept = RunStore(tmp_path)
        with pytest.raises(ModelError, match="collected"):
            follow(cluster, wanted)
        first, second = kept.records().values()
        with Client(cluster.server.address) as client:
            shown = show_events(client, first.run_id, follow=True, progress=Progress())
        kept.close()
        began = {name: cluster.agents[name].prepared.saved.step for name in "ab"}
    assert (first.state, first.message, first.saved_step) == ("interrupted", "a node was lost", 4)
    assert first.is_fetched, "nothing of it is left to be fetched"
    assert (second.takes_up, second.first_run, second.saved_step) == (first.run_id, first.run_id, 8)
    assert began == {"a": 4, "b": 4}
    assert shown is not None and isinstance(shown.error, ModelError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"node c is lost; no other disk has copies of its checkpoints \(recovery.copies = 'next' keeps them\)"),
        ({"train__checkpoint_every": 0}, "node c is lost; there is no checkpoint yet to go back to"),
    ],
)
def test_run_of_all_parameters_that_can_not_go_back_says_why(changes: dict[str, Any], message: str) -> None:
    """With the remedy."""
    with losing_host(**changes) as (cluster, wanted), pytest.raises(PeerLostError, match=message):
        follow(cluster, wanted)


@pytest.mark.parametrize(
    ("fails_in", "num_runs", "told"),
    [
        ("", 3, "the run continues from the checkpoint of step {step}; the rows of b are trained again (b has missed"),
        ("prepare", 4, "the run goes back to the checkpoint of step {step}: node b: it can't"),
        ("links", 4, "the run goes back to the checkpoint of step {step}: node a: it can't send to node b"),
        ("memory", 2, "node b takes no part in this run: node b needs "),
    ],
)
def test_run_of_all_parameters_takes_a_lost_owner_back_from_its_next_checkpoint(
    tmp_path: Path, fails_in: str, num_runs: int, told: str
) -> None:
    """As another run, with embedding and head from another owner; it goes on without one that can't take its part."""
    is_back, notes = threading.Event(), list[str]()

    def on_event(event: control_pb2.RunEvent) -> None:
        coordinator, num_begun = cluster.server.coordinator, len(kept.records())
        if event.note:
            notes.append(event.note)
        if event.WhichOneof("event") == "checkpoint_json" and num_begun == 1:
            coordinator.leave("b", cluster.agents["b"].address)
            coordinator.node_failed("b", PeerLostError("node b is lost"))
        elif event.note.startswith(("node b is back; its rows are", "node b takes no part")):
            refused = FrameError("it can't send to node b")
            refused.peer = "b"
            cluster.agents["b"]._fails_at = {fails_in: DataError("it can't")}
            cluster.agents["a"]._fails_at = ends | ({"prepare": refused} if fails_in == "links" else {})
            is_back.set()
        elif event.WhichOneof("event") == "plan_json" and num_begun == 4:
            cluster.agents["a"]._fails_at = ends

    def on_grant(agent: FakeAgent, turns: list[Turn]) -> None:
        num_begun = [*kept.records()].index(agent.run_id) + 1
        if num_begun == 2 and not is_back.is_set():  # prepared: what fails from now on fails in the next run
            cluster.agents["b"]._facts_changes = {"memory_bytes": 500} if fails_in == "memory" else {}
            joining.submit(cluster.agents["b"].join, "another process")
            assert is_back.wait(CALL_S)
        done = [turn for turn in turns if num_begun > 1 or turn.end_step <= 4]
        agent.stub.Report(agent.report(done), timeout=CALL_S)

    ends: dict[str, RingTuneError] = {"collect": ModelError("collected")}
    agents: dict[str, dict[str, Any]] = {"a": {"has_copies": True, "fails_at": ends, "on_grant": on_grant}, "b": {}}
    wanted = of_all_parameters(recovery__copies="next", recovery__owners="skip", train__max_steps=48)
    with FakeCluster(*agents, agents=agents) as cluster, ThreadPoolExecutor(1) as joining:
        cluster.server.coordinator.kept = kept = RunStore(tmp_path)
        cluster.server.coordinator.sinks.append(on_event)
        with pytest.raises(ModelError, match="collected"):
            follow(cluster, wanted)
        kept.close()
        runs, plan, prepared = [*kept.records().values()], cluster.agents["a"].plan, cluster.agents["b"].prepared
    step = runs[1].saved_step  # 8, or 20 if more turns were granted before it was there
    told = told.format(step=step)
    assert len(runs) == num_runs and any(note.startswith(told) for note in notes), notes
    why = ["a node was lost", "an owner is back" if num_runs > 2 else "node a: collected"]
    assert [run.message for run in runs[:2]] == why
    assert plan is not None and (plan.owner("b") is None) == bool(fails_in)
    if not fails_in:
        assert (prepared.saved.step, prepared.saved.head_from, plan.course.missed) == (
            step,
            "a",
            {"b": (step - 4) // 2 - 1},
        )


def test_run_that_goes_back_waits_for_nodes_that_are_silent_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost process is not waited for, and not taken at once; for hosts alone a lease is said and waited."""
    monkeypatch.setattr("coordinator.run.driver._COMING_S", 0.0)
    a, b, c = (Member(node=name, address=f"127.0.0.1:{port}", instance=name) for port, name in enumerate("abc", 1))
    living = iter([(a, c), (a, b, c)])
    members: Any = SimpleNamespace(living=lambda: next(living), links=LinkCache())
    notes = list[str]()
    absent: Any = SimpleNamespace(instead=lambda names, _: names, waits=lambda *_, hosts_s: f"{hosts_s:g} s")
    monkeypatch.setattr("coordinator.run.driver.AbsentNodes", lambda resume, job: absent)
    request, resume = RunRequest(of_all_parameters(), join_s=300.0), cast(Any, object())
    participants = Participants("r", members, lease_s=CALL_S, without={"c": "c"})
    participants.output.listeners.append(lambda event: notes.append(event.note))
    chosen, _ = participants._await_members(request._replace(resume=resume), "abc")
    assert (chosen, notes) == ((a, b), [f"{CALL_S:g} s"])


@pytest.mark.parametrize("has_data", [False, True])
def test_run_that_goes_back_takes_a_lost_owner_after_a_lease_and_a_lost_host_never(
    monkeypatch: pytest.MonkeyPatch, has_data: bool
) -> None:
    """A host that is hostile, and no more lost than others, would end each run that goes back without it."""
    living = [Member(node=name, address=f"127.0.0.1:{port}", instance=name) for port, name in enumerate("abc", 1)]
    living[2] = dataclasses.replace(living[2], has_data=has_data)
    absent: Any = SimpleNamespace(instead=lambda names, _: names, waits=lambda *_, hosts_s: "")
    monkeypatch.setattr("coordinator.run.driver.AbsentNodes", lambda resume, job: absent)
    members: Any = SimpleNamespace(living=lambda: tuple(living), links=LinkCache())
    participants = Participants("r", members, lease_s=0.0, without={"c": "c"})
    request = RunRequest(of_all_parameters(), join_s=300.0)._replace(resume=cast(Any, object()))
    chosen, _ = participants._await_members(request, "abc")
    assert [member.node for member in chosen] == ["a", "b", *["c"] * has_data]


@pytest.mark.parametrize("named", ["abc", "abx"])
def test_node_that_an_audit_has_named_is_not_among_the_members_of_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Neither in a placement of before it was named, nor where all who are there stand in for a lost node."""
    living = [Member(node=name, address=f"127.0.0.1:{port}", instance=name) for port, name in enumerate("abc", 1)]
    absent: Any = SimpleNamespace(instead=lambda names, _: names, waits=lambda *_, hosts_s: "")
    monkeypatch.setattr("coordinator.run.driver.AbsentNodes", lambda resume, job: absent)
    members: Any = SimpleNamespace(living=lambda: tuple(living), links=LinkCache())
    participants = Participants("r", members, lease_s=CALL_S)
    participants.excluded = frozenset("c")
    request = RunRequest(of_all_parameters(), join_s=0.0 if "x" in named else 300.0)
    chosen, _ = participants._await_members(request._replace(resume=cast(Any, object())), named)
    assert [member.node for member in chosen] == ["a", "b"]


def hold_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run that goes back begin when it is told to end: fake nodes could be done with it before."""
    is_told, drive = threading.Event(), RunWork.drive

    def begins(work: RunWork) -> RingTuneError | None:
        assert not work._participants.without or is_told.wait(CALL_S)
        return drive(work)

    def telling(ask: Callable[[Driver, str], None]) -> Callable[[Driver, str], None]:
        def told(driver: Driver, reason: str) -> None:
            ask(driver, reason)
            if driver.participants.without:
                is_told.set()

        return told

    monkeypatch.setattr(RunWork, "drive", begins)
    for name in ("drain", "stop"):
        monkeypatch.setattr(Driver, name, telling(getattr(Driver, name)))


@pytest.mark.parametrize("when", ["a bug", "before the next", "with the next", "at once"])
def test_run_that_can_not_begin_again_or_is_drained_while_it_does_ends(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug on the way back leaves the coordinator free, and a drain is that of the run that begins."""
    begin = Coordinator.run

    def on_the_way(coordinator: Coordinator, request: RunRequest, **how: Any) -> Driver:
        if (before := how.get("replaces")) is None:
            return begin(coordinator, request, **how)
        if when in ("a bug", "before the next"):
            coordinator.driver_of(before.run_id).drain("stopped by the user")
        if when == "a bug":
            raise KeyError("no such thing")
        after = begin(coordinator, request, **how)
        if when == "with the next":
            coordinator.driver_of(before.run_id).drain("stopped by the user")
        if when == "at once":
            coordinator.driver_of(before.run_id).stop("stopped by the user")
        return after

    hold_next_run(monkeypatch)
    monkeypatch.setattr(Coordinator, "run", on_the_way)
    ends = {False: (InterruptedRunError, "stopped by"), True: (PeerLostError, "lost; going back .* failed")}
    with losing_host(recovery__copies="next") as (cluster, wanted):
        error, message = ends[when == "a bug"]
        with pytest.raises(error, match=message):
            follow(cluster, wanted)
        assert cluster.server.coordinator.stop("the test ends", CALL_S)
        assert not cluster.server.coordinator.driven()


def test_stop_while_a_run_goes_back_waits_for_the_run_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop comes before the coordinator knows the second run, which takes longer to end than the first."""
    hold_next_run(monkeypatch)
    begin, drive, ask = Coordinator.run, RunWork.drive, Driver.stop
    goes_back, is_asked, may_end = (threading.Event() for _ in range(3))

    def on_the_way(coordinator: Coordinator, request: RunRequest, **how: Any) -> Driver:
        if how.get("replaces") is not None:
            goes_back.set()
            assert is_asked.wait(CALL_S)
        return begin(coordinator, request, **how)

    def ends_late(work: RunWork) -> RingTuneError | None:
        try:
            return drive(work)
        finally:
            assert not work._participants.without or may_end.wait(CALL_S)

    def asked(driver: Driver, reason: str) -> None:
        ask(driver, reason)
        is_asked.set()

    monkeypatch.setattr(Coordinator, "run", on_the_way)
    monkeypatch.setattr(RunWork, "drive", ends_late)
    monkeypatch.setattr(Driver, "stop", asked)
    with losing_host(recovery__copies="next") as (cluster, wanted), ThreadPoolExecutor(1) as pool:
        followed = pool.submit(follow, cluster, wanted)
        assert goes_back.wait(CALL_S)
        assert not cluster.server.coordinator.stop("the test ends", 1.0)
        may_end.set()
        assert cluster.server.coordinator.stop("the test ends", CALL_S)
        with pytest.raises(InterruptedRunError, match="the test ends"):
            followed.result(CALL_S)
