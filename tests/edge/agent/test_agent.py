"""The agent's part in runs, with a stand-in for everything that needs torch or sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.agent.agent import Agent
from edge.checkpoint.state_folder import StateFolder
from edge.profiler.timing import TimingRequest
from edge.weights.weight_fetch import ModelFetcher
from ringtune.errors import (
    ConnectionFailedError,
    DataError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    PlanError,
    RingTuneError,
)
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.turns import turn_sequence
from ringtune.techniques.audit import Exchange
from ringtune.v1 import control_pb2
from tests.support.fakes import ADDRESSES, JOB, OTHER, PLAN, RUN, WAIT_S, FakeExecutor, TwoAgents
from tests.support.plans import changed, make_plan

TIMING = TimingRequest()


@pytest.fixture
def ring() -> Iterator[TwoAgents]:
    """Two agents that are closed in the end."""
    made = TwoAgents()
    yield made
    made.close()


def test_agent_goes_through_a_whole_run(ring: TwoAgents) -> None:
    """Inspect, prepare, grant, collect, release: every turn is reported by both, the results come, nothing stays."""
    for agent in ring.agents.values():
        agent.inspect(RUN, JOB, TIMING, timeout_s=WAIT_S)
    ring.shops["a"].executor.copied = "200 MiB are copied"
    ring.prepare_all()
    assert [ring.shops[name].built for name in "ab"] == [["rows of a"], ["rows of b"]]
    turns = tuple(turn_sequence(PLAN.course))
    for agent in ring.agents.values():
        agent.grant(RUN, 0, turns)
    wanted = {(name, turn.index) for name in "ab" for turn in turns}
    ring.wait_for(lambda requests: {(r.node, turn) for r in requests for turn in r.turns_done} == wanted)
    files = ring.agents["a"].collect(RUN, with_head=True, with_private=False, timeout_s=WAIT_S)
    assert set(files) == {"adapter.safetensors", "model_head.safetensors", "totals.json"}
    totals = json.loads(bytes(files["totals.json"]))
    assert totals["actions"] == len([entry for entry in ring.shops["a"].executor.log if not isinstance(entry, bytes)])
    assert totals["hosted_bytes"] == 7
    assert (totals["peak_versions"], totals["peak_version_bytes"]) == (2, 5)
    assert totals["sent_bytes"]["b"] > 0
    for servicer in ring.network.values():
        assert (servicer.turns, servicer.done_turns) == (list(turns), len(turns))
    for agent in ring.agents.values():
        agent.release(RUN, "done")
        assert agent.current_run == ""
    assert all(link.is_closed for shop in ring.shops.values() for link in shop.links)
    assert all(servicer.active is None for servicer in ring.network.values())
    assert [request.error for request in ring.requests if request.error] == []
    assert [note for request in ring.requests for note in request.notes] == ["node a: 200 MiB are copied"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_agent_marks_shards_of_a_finished_run_only(tmp_path: Path, is_finished: bool) -> None:
    """After a run that was stopped they are all that can be gone on from: no mark, and others may fetch them."""
    ring = TwoAgents(state=tmp_path)
    plan = make_plan([("a", 0, 4)], ["a"], num_steps=4, checkpoint_every=2)
    ring.prepare("a", plan_json=json.dumps(plan.to_json()))
    turns = tuple(turn_sequence(plan.course))
    ring.agents["a"].grant(RUN, 0, turns)
    ring.wait_for(lambda requests: {turn for r in requests for turn in r.turns_done} == {t.index for t in turns})
    ring.agents["a"].access.inspect(RUN, ["b"], shards_run=OTHER)
    ring.agents["a"].release(RUN, "over", is_finished=is_finished)
    assert bool(ring.agents["a"].access._inspected) is not is_finished
    ring.close()
    with StateFolder(tmp_path, "a", timeout_s=WAIT_S) as folder:
        assert folder.run(RUN).steps() == (2, 4)
        assert folder.run(RUN).is_finished() is is_finished


def test_agent_inspects_with_what_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--model`` and ``--memory`` win over the job and over what is free; what the data says reaches the caller."""
    ring = TwoAgents(model=Path("/elsewhere"), memory_bytes=5)
    agent = ring.agents["a"]

    def refuse(*_: Any, **__: Any) -> Any:
        raise DataError("no column 'text'")

    with monkeypatch.context() as patch:
        patch.setattr(ring.shops["a"], "inspect", refuse)
        with pytest.raises(DataError, match="no column"):
            agent.inspect(RUN, JOB, TIMING, timeout_s=WAIT_S)
    facts = json.loads(agent.inspect(RUN, JOB, None, timeout_s=WAIT_S))
    ring.close()
    assert facts == {"node": "a", "path": "/elsewhere", "memory_bytes": 5, "timing": None}


def test_agent_refuses_calls_for_a_run_that_it_does_not_have(ring: TwoAgents) -> None:
    """Another run or placement: refused by name. Releasing an unknown run is no error, and ends its fetches."""
    agent, released = ring.agents["a"], list[str]()
    with pytest.raises(FrameError, match="has no run"):
        agent.grant(RUN, 0, ())
    ring.prepare_all()
    with pytest.raises(FrameError, match=f"has run {RUN}, not run {OTHER}"):
        agent.grant(OTHER, 0, ())
    with pytest.raises(FrameError, match="placement 0, not 1"):
        agent.grant(RUN, 1, ())
    agent.models = cast(ModelFetcher, SimpleNamespace(release=released.append))
    agent.release(OTHER, "never heard of")
    assert (agent.current_run, released) == (RUN, [OTHER])


def test_agent_refuses_a_plan_that_it_can_not_follow(ring: TwoAgents) -> None:
    """The error says why, and nothing of the run stays: no address, one beyond this machine, no JSON, keys, digest."""
    other = json.dumps({**PLAN.to_json(), "course": changed(PLAN, seed=1).course.to_json()})
    cases: tuple[tuple[dict[str, Any], type[Exception]], ...] = (
        ({"addresses": {"a": "127.0.0.1:1"}}, ConnectionFailedError),
        ({"addresses": {**ADDRESSES, "b": "10.0.0.7:1"}}, ConnectionFailedError),
        ({"plan_json": "{"}, IntegrityError),
        ({"plan_json": "[]"}, IntegrityError),
        ({"plan_json": json.dumps({**PLAN.to_json(), "seed": 1})}, PlanError),
        ({"plan_json": other}, PlanError),
    )
    for options, error in cases:
        with pytest.raises(error):
            ring.prepare("a", **options)
        assert ring.agents["a"].current_run == ""
        assert ring.network["a"].active is None


def test_agent_gives_up_in_time_for_an_answer(monkeypatch: pytest.MonkeyPatch, ring: TwoAgents) -> None:
    """Who prepares it waits as long as it was told: at the end of that time its own word of what is missing is there.

    A tenth is left for it, on whatever the node waits while it prepares.
    """
    left_s = list[float]()

    def opened(active: object, options: object, backend: object, addresses: object, deadline_s: float) -> None:
        left_s.append(deadline_s - time.monotonic())

    monkeypatch.setattr("edge.agent.agent.open_links", opened)
    ring.prepare("a", timeout_s=1000.0)
    assert 0.0 < left_s[0] <= 900.0


def test_agent_can_be_released_while_it_prepares(ring: TwoAgents) -> None:
    """Release does not wait for a slow build; the build ends without effect."""
    building, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        building.set()
        assert go_on.wait(WAIT_S)

    ring.shops["a"].on_build = hold
    errors: list[BaseException] = []

    def prepare() -> None:
        try:
            ring.prepare("a")
        except InterruptedRunError as error:
            errors.append(error)

    caller = threading.Thread(target=prepare)
    caller.start()
    assert building.wait(WAIT_S)
    ring.agents["a"].release(RUN, "the user stops")
    assert ring.agents["a"].current_run == ""
    go_on.set()
    caller.join(WAIT_S)
    assert [str(error) for error in errors] == [f"run {RUN} was released while node a prepared it"]
    assert ring.network["a"].active is None


def test_agent_released_between_its_links_and_its_loop_starts_neither(
    monkeypatch: pytest.MonkeyPatch, ring: TwoAgents
) -> None:
    """What the loop would work with is freed by then, and nobody would stop it."""
    agent = ring.agents["a"]

    def opened(*_: object) -> None:
        agent.release(RUN, "the user stops")
        agent.on_compute_thread(lambda: None, "free the run", timeout_s=WAIT_S)

    monkeypatch.setattr("edge.agent.agent.open_links", opened)
    monkeypatch.setattr("edge.agent.agent.Reporter", lambda **_: pytest.fail("a reporter that nobody closes"))
    with pytest.raises(InterruptedRunError, match=f"run {RUN} was released while node a prepared it"):
        ring.prepare("a")
    agent.on_compute_thread(lambda: None, "be free", timeout_s=WAIT_S)


def test_agent_close_does_not_wait_for_a_long_action(ring: TwoAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process can end within seconds although torch is in the middle of something."""
    monkeypatch.setattr("edge.agent.active_run._END_S", 0.0)
    started, go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        started.set()
        assert go_on.wait(WAIT_S)

    ring.shops["a"].executor = FakeExecutor(hold)
    ring.prepare_all()
    ring.agents["a"].grant(RUN, 0, tuple(turn_sequence(PLAN.course)))
    assert started.wait(WAIT_S)
    assert not ring.agents["a"].close(0.0)
    go_on.set()


def test_agent_takes_a_new_run_over_a_left_over_one(ring: TwoAgents) -> None:
    """If a Release got lost, the next run wins: the coordinator drives one at a time."""
    ring.prepare_all()
    ring.agents["a"].inspect(OTHER, JOB, TIMING, timeout_s=WAIT_S)
    assert ring.agents["a"].current_run == ""
    assert all(link.is_closed for link in ring.shops["a"].links)


def test_agent_that_is_told_to_end_says_so(ring: TwoAgents) -> None:
    """The coordinator hears why before the links close."""
    ring.prepare_all()
    ring.agents["b"].abandon(RingTuneError("node b was stopped (SIGTERM)"))
    told = [(request.node, request.error, request.message) for request in ring.requests if request.error]
    assert told == [("b", "RingTuneError", "node b was stopped (SIGTERM)")]
    assert ring.agents["b"].current_run == ""


def test_agent_lost_link_is_reported_with_the_peer(ring: TwoAgents) -> None:
    """A link that breaks while the run goes on is reported; one that breaks after the results were taken is not."""
    ring.prepare_all()
    active = ring.network["a"].active
    assert active is not None
    active.on_link_lost("b", "socket closed")
    ring.wait_for(lambda requests: any(request.lost_peer == "b" for request in requests))
    ring.agents["b"].collect(RUN, with_head=False, with_private=False, timeout_s=WAIT_S)
    other = ring.network["b"].active
    assert other is not None
    other.on_link_lost("a", "closed")
    ring.agents["b"].release(RUN, "done")
    assert [request.node for request in ring.requests if request.error] == ["a"]


@pytest.mark.parametrize("error", ["FrameError", "DivergedError"])
def test_agent_refused_frame_of_ours_ends_the_run(ring: TwoAgents, error: str) -> None:
    """A peer that dropped our tensor will wait for ever: the run fails with its reason, at once."""
    from edge.transport.frames import Ack

    ring.prepare_all()
    active = ring.network["a"].active
    assert active is not None
    active.on_ack("b", Ack(credits=0, boundary=0, refusal="it has another shape", error=error))
    ring.wait_for(lambda requests: any(request.error for request in requests))
    failed = next(request for request in ring.requests if request.error)
    message = "node b refused a frame of node a: it has another shape"
    assert (failed.error, failed.message, failed.lost_peer) == (error, message, "b")


def test_agent_measures_no_link_beyond_this_machine_unless_told(ring: TwoAgents) -> None:
    """As with tensors: nothing unencrypted leaves by accident; both ends are named."""
    for computing_s in (0.0, 1.0):
        request = control_pb2.MeasureLinkRequest(
            target="b", address="10.0.0.7:1", message_bytes=1000, computing_s=computing_s
        )
        with pytest.raises(ConnectionFailedError, match=r"node a won't send tensors unencrypted to b at 10.0.0.7:1"):
            ring.agents["a"].measure(request, timeout_s=WAIT_S)


def test_checker_answers_in_time_whoever_hands_in_too_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names that node, with half of the time left: else its own answer would be late, and it the lost one.

    What is compared after the work has half of what the work has left, however long that took.
    """
    agent: Any = Agent.__new__(Agent)
    now_s, limits_s, slow = [0.0], list[float](), set[str]()
    sent = Exchange(TensorKey(Payload.HIDDEN, 0, 0, 1), "d", False)
    differing = SimpleNamespace(differing={sent.key}, compare=lambda key, tensor: None, results={})
    audit = SimpleNamespace(
        read_work=lambda *_: {},
        read_tensor=lambda *_, **__: None,
        most_bytes=lambda *_: 0,
        recorder=SimpleNamespace(exchanges=lambda cell, turn: (sent,)),
    )
    active = SimpleNamespace(audit=audit, addresses={}, lease_s=1.0, sizes=None, audit_stub=lambda node, address: None)

    def work(function: Any, timeout_s: float, what: str) -> Any:
        now_s[0] += 80.0
        return differing

    def fetch(request: Any, source: str, address: str, deadline_s: float, **more: float) -> None:
        limits_s.append(deadline_s - now_s[0])
        if source in slow:
            raise DeadlineError(f"node {source} is slow")

    agent.of = lambda run_id, placement_number: (active, SimpleNamespace(call=work))
    agent.options = SimpleNamespace(name="c", insecure=True)
    monkeypatch.setattr("edge.agent.agent.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr("edge.agent.agent.fetch_audited", fetch)
    reply = agent.repeat(control_pb2.RepeatRequest(node="b"), timeout_s=100.0)
    assert (reply.results_json, limits_s) == ("{}", [50.0, 10.0])
    slow.add("b")
    reply = agent.repeat(control_pb2.RepeatRequest(node="b"), timeout_s=100.0)
    assert (reply.node, reply.is_lost) == ("b", True)
