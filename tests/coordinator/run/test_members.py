"""Members and leases on a hand-held clock, and which of them take part in a run."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.driver import Participants
from coordinator.run.join import JoinHandler, KnownNodes, refusal_reason
from coordinator.run.members import MAX_BETWEEN_S, Member, Registry, WakingClock, check_reachable
from coordinator.run.recovery import Reports
from coordinator.run.requests import RunRequest
from coordinator.run.run_driver import RunWork
from ringtune.errors import BusyError, CapacityError, ConnectionFailedError, DataError, FrameError, IntegrityError
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.methods import Hift, RingAda
from ringtune.schedule.migration import without_owner
from ringtune.schedule.plan import Plan
from ringtune.transport.status import error_of_call
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, MODEL, FakeAgent, FakeCluster, facts, job
from tests.support.plans import changed, make_plan


def member_named(node: str, address: str) -> Member:
    """A member at an address."""
    return Member(node=node, address=address, instance="one")


def test_recruiting_refuses_a_node_that_the_others_can_not_reach() -> None:
    """A node that told 127.0.0.1 is named before the run begins, and so is one that would look for it in vain."""
    desk, board = member_named("desk", "127.0.0.1:5"), member_named("board", "10.0.0.7:5")
    with pytest.raises(ConnectionFailedError, match=r"node desk at 127\.0\.0\.1:5 can't be reached by node board"):
        check_reachable([board, desk])
    check_reachable([desk, member_named("two", "127.0.0.1:6")])
    check_reachable([board, member_named("pi", "10.0.0.8:5")])


def member(node: str, instance: str = "one") -> Member:
    """A member with an address made from its name."""
    return Member(node=node, address=f"127.0.0.1:{len(node)}", instance=instance)


def registry_of_a() -> Registry:
    """A registry in which node ``a`` has joined at 0 for 10 s."""
    registry = Registry(lease_s=10)
    registry.join(member("a"), now_s=0)
    return registry


def test_registry_has_members_for_a_lease() -> None:
    """Members come sorted by name, whatever the order in which they joined."""
    registry = Registry(lease_s=10)
    for node in ("b", "c", "a"):
        registry.join(member(node), now_s=0)
    assert [entry.node for entry in registry.living(now_s=1)] == ["a", "b", "c"]
    # At the very end of its lease a member is lost, but still listed
    registry = registry_of_a()
    assert registry.is_alive("a", now_s=9.9)
    assert not registry.is_alive("a", now_s=10.0)
    assert [entry.node for entry in registry.all(now_s=10.0)] == ["a"]
    # A heartbeat starts the lease anew and carries the resident memory
    registry = registry_of_a()
    assert registry.heartbeat("a", "one", rss_bytes=7, now_s=9)
    assert registry.living(now_s=18)[0].rss_bytes == 7
    # A heartbeat after the lease does not revive a member: its run has gone on without it
    registry = registry_of_a()
    assert not registry.heartbeat("a", "one", rss_bytes=0, now_s=11)
    # Nor does a run that begins with a longer lease; a living member has that one, and the other after the run
    registry = registry_of_a()
    registry.join(member("b"), now_s=5)
    registry.set_lease(60, now_s=11)
    assert [entry.node for entry in registry.living(now_s=64)] == ["b"]
    assert not registry.heartbeat("a", "one", rss_bytes=0, now_s=12)
    registry.join(member("a"), now_s=12)
    assert registry.is_alive("a", now_s=71)
    registry.set_lease(10, now_s=40)
    assert registry.living(now_s=40) == ()
    # A member that was lost long ago is not listed for ever
    registry = registry_of_a()
    assert registry.all(now_s=299) != ()
    assert registry.all(now_s=300) == ()


def test_registry_has_one_process_for_a_name() -> None:
    """A second process with the name of a living one is refused, and told how long ago that one was seen."""
    registry = registry_of_a()
    with pytest.raises(BusyError, match=r"taken .* seen 3\.0 s ago"):
        registry.join(member("a", instance="two"), now_s=3)
    assert not registry.heartbeat("a", "two", rss_bytes=0, now_s=3)
    # A new process may take the name of a lost one
    registry = registry_of_a()
    registry.join(member("a", instance="two"), now_s=10)
    assert registry.living(now_s=11)[0].instance == "two"
    # A process that lost the reply of its first join may simply join again, and stays where it was
    registry = registry_of_a()
    registry.join(dataclasses.replace(member("a"), address="10.0.0.1:1"), now_s=9)
    assert [entry.address for entry in registry.living(now_s=18)] == [member("a").address]
    # Only the process that joined can leave
    registry = registry_of_a()
    assert not registry.leave("a", "two")
    assert registry.leave("a", "one")
    assert registry.all(now_s=1) == ()


class Machine:
    """A machine's clock, which goes on whatever its processes do."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Read it."""
        return self.now_s

    def idle(self) -> float:
        """The time in which a process has worked: none."""
        return 0.0


def passed_s(machine: Machine, clock: WakingClock, seconds: float, every_s: float) -> float:
    """Let time go by while the clock is read every so often; how much of it counted."""
    began_s, end_s = clock(), machine.now_s + seconds
    while machine.now_s < end_s:
        machine.now_s = min(end_s, machine.now_s + every_s)
        last_s = clock()
    return last_s - began_s


def test_clock_of_a_process_that_runs_is_the_machines() -> None:
    """However busy it is, and however long one piece of its work takes, which puts no deadline off."""
    for every_s in [0.01, 0.25, MAX_BETWEEN_S]:
        machine = Machine()
        assert passed_s(machine, WakingClock(machine, machine.idle), 60.0, every_s) == pytest.approx(60.0)
    machine = Machine()
    assert passed_s(machine, WakingClock(machine, machine), 60.0, 4 * MAX_BETWEEN_S) == pytest.approx(60.0)


def test_lease_is_not_over_because_the_coordinator_stood_still() -> None:
    """It is over a lease of listening later, if nothing is heard."""
    for stood_s in [MAX_BETWEEN_S + 0.1, 9.0, 86_400.0]:
        machine = Machine()
        clock, registry = WakingClock(machine, machine.idle), Registry(5.0)
        registry.join(Member(node="a", address="a:1", instance="x"), clock())
        passed_s(machine, clock, 4.0, 0.25)
        machine.now_s += stood_s
        assert registry.is_alive("a", clock())
        assert registry.silent_for_s("a", "x", clock()) == pytest.approx(4.0)
        passed_s(machine, clock, 1.1, 0.25)
        assert not registry.is_alive("a", clock())


KNOWN = KnownNodes(make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"]), {name: facts(name) for name in "ab"})
OTHER = dataclasses.replace(MODEL, digest="cd" * 32)


def silent(number: int) -> dict[str, Any]:
    """An agent on a machine of its own that never ends a turn."""
    return {"on_grant": lambda agent, turns: None, "host": f"127.0.0.{number}"}


class Going:
    """A run on a and b that is under way, with what its submitter hears."""

    def __init__(self, cluster: FakeCluster, **changes: object) -> None:
        self.cluster = cluster
        self._notes: queue.Queue[str] = queue.Queue()
        cluster.server.coordinator.sinks.append(self._hear)
        self.driver = cluster.server.coordinator.run(RunRequest(job=job(**changes), num_nodes=2))
        self.participants = self.driver.participants
        self.work = cast(RunWork, self.driver.work)
        assert all(cluster.agents[name].granted.wait(CALL_S) for name in "ab")

    def _hear(self, event: control_pb2.RunEvent) -> None:
        if event.WhichOneof("event") == "note":
            self._notes.put(event.note)

    def note_of(self, node: str) -> str:
        """The next note that begins with this node."""
        while not (note := self._notes.get(timeout=CALL_S)).startswith(f"node {node} "):
            pass
        return note


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Two nodes on machines of their own."""
    with FakeCluster("a", "b", agents={"a": silent(1), "b": silent(2)}) as made:
        yield made


def come(cluster: FakeCluster, **values: Any) -> FakeAgent:
    """A third node joins."""
    agent = FakeAgent("c", cluster.server.address, **{**silent(3), "rows": 0, **values})
    cluster.agents["c"] = agent
    agent.join()
    return agent


def test_node_that_comes_is_asked_and_may_have_blocks(cluster: FakeCluster) -> None:
    """It measures itself as the others did, and is of the run from then on."""
    going = Going(cluster)
    agent = come(cluster)
    assert going.note_of("c").startswith("node c may get blocks of this run")
    assert agent.log == ["inspect"] and agent.inspected.measure and agent.inspected.measure_s == 1.0
    assert going.participants.nodes == {"a", "b", "c"} == {*going.work._join_handler.facts}
    going.driver.stop("test")
    assert agent.released.wait(CALL_S)


def test_node_that_comes_and_goes_is_asked_no_more_until_turns_have_ended(cluster: FakeCluster) -> None:
    """Each time it is lost all may have to go back, so it could keep them from training."""
    going = Going(cluster)
    agent, coordinator = come(cluster), cluster.server.coordinator

    def again(number: int) -> None:
        coordinator.leave("c", agent.instance)
        agent.join(f"process {number}")

    for number in range(2, 7):
        assert going.note_of("c").startswith("node c may get blocks")
        again(number)
    assert going.note_of("c").endswith("it has joined more than 5 times in 50 turns; start it again later")
    again(7)
    was_taken = threading.Event()
    going.participants.queue.put(was_taken.set)
    assert was_taken.wait(CALL_S)
    for _ in range(50):
        going.work._rounds.joins.end_turn()
    again(8)
    assert going.note_of("c").startswith("node c may get blocks")
    assert agent.log.count("inspect") == 6
    going.driver.stop("test")


@pytest.mark.parametrize(
    ("values", "changes", "why"),
    [
        ({}, {"placement__replan": "never"}, "placement.replan is 'never'"),
        ({}, {"train__method": "pipeadapter"}, "the run stays on its placement, as the result of pipeadapter"),
        ({"facts_changes": {"model": OTHER}}, {}, "it has model cdcdcdcdcdcd…, the run has abababababab…"),
        ({"fails_at": {"inspect": DataError("no such file")}}, {}, "no such file"),
    ],
)
def test_node_that_does_not_fit_takes_no_part_and_the_run_goes_on(
    cluster: FakeCluster, values: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    """The user is told why; nobody else notices."""
    going = Going(cluster, **changes)
    come(cluster, **values)
    note = going.note_of("c")
    assert "takes no part in this run" in note and why in note
    assert going.participants.nodes == {"a", "b"}
    going.driver.stop("test")


def test_node_that_is_drained_takes_no_part(cluster: FakeCluster) -> None:
    """It is to be taken into no run, and this is one."""
    agent = come(cluster)
    cluster.server.coordinator.drain_node("c", undo=False)
    going = Going(cluster)
    cluster.server.coordinator.leave("c", agent.address)
    agent.join()
    assert going.note_of("c").endswith("it is drained")
    going.driver.stop("test")


def test_node_on_the_machine_of_all_others_takes_no_part() -> None:
    """Its work would be taken for slow boards."""
    quiet: dict[str, Any] = {"on_grant": lambda agent, turns: None}
    with FakeCluster("a", "b", agents={"a": quiet, "b": quiet}) as cluster:
        going = Going(cluster)
        come(cluster, host="127.0.0.1")
        assert "its nodes share a machine" in going.note_of("c")
        going.driver.stop("test")


def test_run_that_waits_for_room_asks_members_that_had_no_part(cluster: FakeCluster) -> None:
    """One that was left out by the plan, or came when nobody was wanted, is asked then."""
    going = Going(cluster, placement__replan="never")
    agent = come(cluster)
    assert "takes no part" in going.note_of("c") and agent.log == []
    machine: Any = going.work._rounds
    going.work._join_handler.ask_others()  # nobody is awaited
    machine.awaited.for_room("CapacityError", "nothing fits", ("b",), time.monotonic() + 60.0)
    going.work._join_handler.ask_others()
    assert going.note_of("c") == "node c is back; resuming"
    assert agent.log == ["inspect"] and going.participants.nodes == {"a", "b", "c"}
    going.driver.stop("test")


@pytest.mark.parametrize(
    ("reason", "changes", "note"),
    [
        ("", {"placement__replan": "never"}, "is back; its rows are trained again from the next turn boundary on"),
        ("none is left", {}, "decided after the next turn; its rows stay left out: none is left"),
        ("none is left", {"placement__replan": "never"}, "takes no part in this run: its rows stay left out"),
    ],
)
def test_owner_that_was_left_out_and_joins_is_told_what_becomes_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, reason: str, changes: dict[str, Any], note: str
) -> None:
    """It need not pay as a host that comes; where its rows stay out it may still get blocks."""
    monkeypatch.setattr(RunStateMachine, "left_out", ("c",))
    monkeypatch.setattr(RunStateMachine, "return_reason", lambda machine, node: reason)
    with FakeCluster("a", "b", agents={"a": silent(1), "b": silent(2)}) as made:
        going = Going(made, **changes)
        agent = FakeAgent("c", made.server.address, **silent(3))
        made.agents["c"] = agent
        agent.join()
        assert note in going.note_of("c")
        going.driver.stop("test")


def participants_beside(*living: Member) -> Participants:
    """A run without nodes of its own, beside these members."""
    members: Any = SimpleNamespace(living=lambda: living)
    return Participants("run", members, lease_s=1.0)


def handler_of(participants: Participants, machine: RunStateMachine) -> JoinHandler:
    """The handler of those that join this run."""
    return JoinHandler(
        participants,
        RunRequest(job=job()),
        machine,
        Reports(CheckpointManager("run", job(), None)),
        feed=lambda event: None,
        addresses={},
        shards_run="run",
    )


def test_run_that_begins_without_owners_asks_those_that_are_there() -> None:
    """They were left out in an earlier part of the run; other members are asked when they join."""
    participants = participants_beside(member("a"), member("b"), member("c"))
    handler = handler_of(participants, RunStateMachine(None))
    books: Any = None
    plan = Plan(without_owner(KNOWN.plan.course, "b", 1), KNOWN.plan.placements)
    handler.begin(KnownNodes(plan, {"a": facts("a")}), books, books)
    entry = participants.queue.get_nowait()
    assert (entry.func, *entry.args) == (handler._consider, member("b")) and participants.queue.empty()


def test_guest_is_no_host_of_a_run_that_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can invite one; other members that join meanwhile are asked."""
    inspected, noted, books = list[str](), list[str](), cast(Any, None)
    monkeypatch.setattr(JoinHandler, "_ask", lambda handler, joined, needed: inspected.append(joined.node))
    machine = RunStateMachine(None, recovery=RecoveryPolicy(awaits_s=10.0))
    assert machine.awaited.for_room(CapacityError.__name__, "nothing fits", ["b"], 0.0)
    participants = participants_beside()
    monkeypatch.setattr(participants.output, "note", noted.append)
    handler = handler_of(participants, machine)
    handler.begin(KNOWN, books, books)
    for joined in (member("pi"), dataclasses.replace(member("eval-00000000"), is_guest=True)):
        handler.joined(joined)
    assert inspected == ["pi"]
    assert noted[1:] == ["node eval-00000000 has joined the coordinator, and takes no part in this run: it is a guest"]


def test_report_of_a_former_process_is_refused(cluster: FakeCluster) -> None:
    """It is told to forget the run, and the user why; what the node says that took its place is taken.

    Only the report that is taken renews the node's lease.
    """
    going = Going(cluster)
    node, coordinator = cluster.agents["a"], cluster.server.coordinator
    clock: Any = itertools.repeat(coordinator._now_s() + 1.0).__next__
    coordinator._now_s = clock
    about: dict[str, Any] = {"run_id": node.run_id, "node": "a", "number": 1}
    for instance in ("old", ""):
        with pytest.raises(FrameError, match="another process is node a"):
            coordinator.report(control_pb2.ReportRequest(**about, instance=instance))
    assert coordinator.silent_for_s("a", node.address) >= 1.0
    coordinator.report(control_pb2.ReportRequest(**about, instance=node.address))
    assert coordinator.silent_for_s("a", node.address) == 0.0
    for name in ("z", "y"):  # one note: such names have no end
        with pytest.raises(IntegrityError, match=f"node {name} is not in run .*; start it again"):
            going.work.report(control_pb2.ReportRequest(run_id=node.run_id, node=name, number=1))
    last = control_pb2.ReportRequest(run_id=node.run_id, node="b", number=1, notes=["node b is last"])
    last.instance = cluster.agents["b"].address
    going.work.report(last)
    assert going.note_of("a").startswith("node a of the run is another process: a report in its name is refused")
    assert going.note_of("z").startswith("node z is not in the run")
    assert going._notes.get(timeout=CALL_S) == "node b is last"
    going.driver.stop("test")


def test_members_without_a_part_end_no_run(cluster: FakeCluster) -> None:
    """Neither one that is asked while there is no plan, nor one that has joined; others have their notes, not all."""
    told: list[str] = []

    def early() -> None:
        node = cluster.agents["b"]
        report = control_pb2.ReportRequest(run_id=node.inspected.run_id, node="b", instance=node.address)
        with pytest.raises(grpc.RpcError) as caught:
            node.stub.Report(report, timeout=CALL_S)
        told.append(str(error_of_call(caught.value, peer="it")))

    cluster.agents["b"].on_inspect = early
    going = Going(cluster)
    assert told and all("node b has no part in run" in each for each in told)
    come(cluster)
    assert going.note_of("c").startswith("node c may get blocks")
    wrong = control_pb2.StepReport(seq=0, step=1, kind="train")
    for request in (control_pb2.ReportRequest(), control_pb2.ReportRequest(number=1, steps=[wrong])):
        request.run_id, request.node, request.instance = going.driver.run_id, "c", cluster.agents["c"].address
        going.work.report(request)
    about: dict[str, Any] = {"run_id": going.driver.run_id, "node": "a", "instance": cluster.agents["a"].address}
    for number in (1, 2):
        going.work.report(control_pb2.ReportRequest(**about, number=number, notes=["node a is here"] * 1000))
    notes = [going.note_of("a") for _ in range(1001)]
    assert notes == ["node a is here"] * 1000 + ["node a has more than 1,000 notes, left out here"]
    going.work._waiting_bytes["a"] += 32 << 20  # as if the run's thread had not come to them
    with pytest.raises(BusyError, match="reports of node a are not read yet"):
        going.work.report(control_pb2.ReportRequest(**about, number=3))
    going.driver.stop("test")


def test_reports_without_end_put_no_deadline_off_and_fill_no_file(cluster: FakeCluster) -> None:
    """A deadline is behind what has come before it; of a node no more actions count than it was granted."""
    going = Going(cluster)
    node, recorder = cluster.agents["b"], going.work._require_placed().recorder
    report = control_pb2.ReportRequest(run_id=node.run_id, node="b", instance=node.address, number=1)
    for _ in range(2 * recorder._most_spans):
        report.spans.add(action="F0.0[0,1)", start_unix_s=1.0, end_unix_s=2.0)
    going.work.report(report)

    def again() -> None:
        going.participants.queue.put(again)

    again()
    late: Any = itertools.repeat(going.participants.now_s() + 1e6).__next__
    going.participants.now_s = late
    assert going.driver.join(CALL_S)
    assert going.work._finish is not None and going.work._finish.error == "DeadlineError"
    assert "s for turn 0 of node a (from step 0): not done by a, b" in going.work._finish.message
    assert 0 < recorder.ledger.nodes["b"].num_actions == recorder._most_spans


def test_owner_that_comes_back_has_the_rows_that_it_had() -> None:
    """Counts, labels and model; what it has of memory is a matter of the placement."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"rows": 11}, "it has 11 training and 5 evaluation rows, the run began with 10 and 5"),
        ({"labels": ("neg", "new")}, "its rows have other labels"),
        ({"model": OTHER}, "it has model"),
        ({"memory_bytes": 5}, ""),
    ]
    for changes, why in rows:
        found = refusal_reason(facts("b", **changes), KNOWN)
        assert found.startswith(why) and bool(found) == bool(why)
    # One that was left out before this part of the run began is compared with the plan
    course = changed(KNOWN.plan, labels=("neg", "pos")).course
    plan = Plan(without_owner(course, "a", 1), KNOWN.plan.placements)
    known = KnownNodes(plan, {"b": facts("b")})  # it was the first host
    (had,) = [one.owner for one in plan.course.absent]
    for changes, why in rows:
        found = refusal_reason(facts("a", **{"eval_rows": had.eval_rows, **changes}), known)
        assert found.startswith(why.replace(" 5", f" {had.eval_rows}")) and bool(found) == bool(why)


def test_owner_with_copies_comes_back_with_the_device_that_it_had() -> None:
    """Another one would update its copies otherwise; without copies it may."""
    for method, is_refused in ((Hift(), True), (RingAda(every_steps=2), False)):
        known = KnownNodes(changed(KNOWN.plan, method=method), KNOWN.facts)
        found = refusal_reason(dataclasses.replace(facts("b"), numerics="cuda NVIDIA T4 sm_75"), known)
        assert ("equal in every bit" in found) == is_refused
    # They are not of the course
    assert refusal_reason(facts("c", rows=99), KNOWN) == ""
