"""The loop that drives one engine, with fake executors and links."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from edge.run import reporter as rp
from ringtune.engine.handled import Handled
from ringtune.engine.spans import Span
from ringtune.errors import DeadlineError, ModelError, PeerLostError
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import turn_sequence
from tests.support.fakes import WAIT_S, FakeExecutor, FakeRing
from tests.support.plans import make_plan
from tests.support.replay import replay


@contextmanager
def ring_of(plan: Plan, **options: Any) -> Iterator[FakeRing]:
    """A ring that is stopped in the end."""
    ring = FakeRing(plan, **options)
    try:
        yield ring
    finally:
        assert ring.close(), "a loop did not end"


def two_hosts(**options: Any) -> Plan:
    """Hosts a and b, owners a and c, so that tensors and the head travel."""
    return make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "c"], num_steps=8, **options)


def test_run_ring_does_every_action_of_the_plan() -> None:
    """Four blocks, two owners, eight steps: each owner reports its items once, each node each turn once."""
    with ring_of(two_hosts()) as ring:
        ring.start()
        turns = ring.grant_all()
        assert ring.wait_done(len(turns))
        seqs = [step.report.seq for node in ring.plan.nodes for step in ring.reports[node].of(rp.StepDone)]
        assert sorted(seqs) == list(range(turns[-1].end_seq))
        for node in ring.plan.nodes:
            done = sorted(entry.turn for entry in ring.reports[node].of(rp.TurnDone))
            assert done == [turn.index for turn in turns]
            assert ring.executors[node].turns == set()


def test_run_spans_and_bytes_are_those_of_the_actions() -> None:
    """One span for each action that the executor ran, and the bytes of every message with its target."""
    with ring_of(two_hosts()) as ring:
        ring.start()
        assert ring.wait_done(len(ring.grant_all()))
        for node in ring.plan.nodes:
            actions = [entry for entry in ring.executors[node].log if isinstance(entry, Action)]
            assert [span.action for span in ring.reports[node].of(Span)] == actions
            sent = ring.reports[node].of(rp.Sent)
            assert sum(entry.num_bytes for entry in sent) == sum(ring.runs[node].totals.sent_bytes.values())
        heads = [entry for entry in ring.reports["a"].of(rp.Sent) if entry.payload == "t"]
        assert {(entry.target, entry.num_bytes) for entry in heads} == {("c", len(b"head"))}


def test_run_recordings_replay_to_the_same_commands() -> None:
    """What each node recorded, fed to a fresh engine, gives the very commands."""
    with ring_of(two_hosts(), record=True) as ring:
        ring.start()
        assert ring.wait_done(len(ring.grant_all()))
    for node in ring.plan.nodes:
        lines = [_line(entry) for entry in ring.reports[node].entries if isinstance(entry, rp.HeaderLine | Handled)]
        assert replay(lines, ring.plan, node) == len(lines) - 1 > 0


def _line(entry: Any) -> str:
    from edge.run.recorder import record_line

    return entry.line if isinstance(entry, rp.HeaderLine) else record_line(*entry)


def test_run_executor_error_names_node_and_class() -> None:
    """An error of ours keeps its class; the loop goes on answering and ends when it is told to."""

    def refuse(action: Action) -> None:
        raise ModelError("block 1 is not there")

    with ring_of(two_hosts(), executors={"b": FakeExecutor(refuse)}) as ring:
        ring.start()
        ring.grant_all()
        assert ring.reports["b"].wait_for(lambda entries: any(isinstance(entry, rp.Failed) for entry in entries))
        assert ring.reports["b"].of(rp.Failed) == [rp.Failed("ModelError", "node b: block 1 is not there", "")]
        assert ring.runs["b"].call(lambda: "alive", timeout_s=WAIT_S, what="an answer") == "alive"


def test_run_foreign_error_is_reported_with_its_type(caplog: pytest.LogCaptureFixture) -> None:
    """An error that is not ours becomes the root class; its type and place are in the message, its text in the log."""

    def crash(action: Action) -> None:
        raise ZeroDivisionError("a bug")

    with ring_of(two_hosts(), executors={"b": FakeExecutor(crash)}) as ring:
        ring.start()
        ring.grant_all()
        assert ring.reports["b"].wait_for(lambda entries: any(isinstance(entry, rp.Failed) for entry in entries))
        failed = ring.reports["b"].of(rp.Failed)[0]
    assert (failed.error, failed.lost_peer) == ("RingTuneError", "")
    assert failed.message.startswith("node b: internal error, ZeroDivisionError at edge.run.loop:")
    assert "a bug" not in failed.message and "a bug" in caplog.text


def test_run_lost_peer_is_reported_once_and_at_once() -> None:
    """Both ends of a broken link tell it; the coordinator hears of it once, with the peer's name."""
    with ring_of(two_hosts()) as ring:
        ring.start()
        ring.runs["b"].on_peer_lost("a", "socket closed")
        ring.runs["b"].on_peer_lost("a", "cancelled")
        failed = ring.reports["b"].of(rp.Failed)
        assert failed == [rp.Failed("PeerLostError", "node b lost its link with node a: socket closed", "a")]


def test_run_names_the_peer_that_it_can_not_send_to() -> None:
    """A send may find a broken link before the link tells of it; the coordinator then hears the peer's own error."""
    with ring_of(two_hosts()) as ring:
        lost = PeerLostError("node a: Socket closed")
        lost.peer = "a"
        ring.runs["b"].fail(lost)
        assert ring.reports["b"].of(rp.Failed) == [rp.Failed("PeerLostError", "node b: node a: Socket closed", "a")]


@pytest.mark.promise("6 every wait ends")
def test_run_without_progress_names_what_it_waits_for() -> None:
    """A host whose neighbour never starts gives up after wait_s and names message and sender."""
    with ring_of(two_hosts(), wait_s=0.05) as ring:
        ring.start("b")
        ring.grant_all()
        assert ring.reports["b"].wait_for(lambda entries: any(isinstance(entry, rp.Failed) for entry in entries))
        failed = ring.reports["b"].of(rp.Failed)[0]
    assert failed.error == "DeadlineError"
    assert "hidden state of step 0" in failed.message
    assert "from node a" in failed.message


def test_run_stops_after_the_action_under_way() -> None:
    """A stop that comes while an action runs ends the loop without another action."""
    started, go_on = threading.Event(), threading.Event()

    def hold(action: Action) -> None:
        started.set()
        assert go_on.wait(WAIT_S)

    executor = FakeExecutor(hold)
    with ring_of(make_plan([("a", 0, 4)], ["a"]), executors={"a": executor}) as ring:
        ring.start()
        ring.grant_all()
        assert started.wait(WAIT_S)
        ring.runs["a"].stop("enough")
        go_on.set()
        assert ring.runs["a"].wait(WAIT_S)
        assert len(executor.log) == 1


def test_run_sees_what_came_during_an_action_before_choosing_the_next() -> None:
    """Two hidden states come while b computes: both are in the recording before the action's end."""
    started, go_on = threading.Event(), threading.Event()

    def hold(action: Action) -> None:
        started.set()
        assert go_on.wait(WAIT_S)

    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], microbatches=4, num_steps=1, eval_rows=0)
    with ring_of(plan, executors={"b": FakeExecutor(hold)}, record=True) as ring:
        ring.start("b")
        ring.grant_all()
        run = ring.runs["b"]
        run.on_tensor(TensorKey("h", 0, 0, 2), "a", "x", None)
        assert started.wait(WAIT_S)
        run.on_tensor(TensorKey("h", 0, 1, 2), "a", "x", None)
        run.on_tensor(TensorKey("h", 0, 2, 2), "a", "x", None)
        go_on.set()
        assert ring.reports["b"].wait_for(lambda entries: len(_events(entries, "ActionDone")) >= 1)
        names = [type(entry.event).__name__ for entry in ring.reports["b"].of(Handled)]
    first_done = names.index("ActionDone")
    assert names[:first_done].count("TensorArrived") == 3


def _events(entries: Any, name: str) -> list[Any]:
    return [entry for entry in entries if isinstance(entry, Handled) and type(entry.event).__name__ == name]


def test_run_credit_goes_back_for_hidden_states_only() -> None:
    """Every hidden state that is taken from the inbox returns one credit; a gradient none."""
    with ring_of(two_hosts(eval_rows=0), record=True) as ring:
        ring.start()
        assert ring.wait_done(len(ring.grant_all()))
    sent = sum(entry.payload == "h" for node in ring.plan.nodes for entry in ring.reports[node].of(rp.Sent))
    got = sum(len(_events(ring.reports[node].entries, "CreditArrived")) for node in ring.plan.nodes)
    # the last credits may come after the last turn was done
    assert sent - 8 <= got <= sent
    assert got > 0


def test_run_drops_a_tensor_that_came_twice() -> None:
    """A second copy after the first was taken is forgotten with its turn, not kept for ever."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=2, local_iterations=2, eval_rows=0)
    with ring_of(plan) as ring:
        ring.runs["b"].on_tensor(TensorKey("h", 0, 0, 2), "a", "first", None)
        ring.start("b")
        ring.grant_all()
        assert ring.reports["b"].wait_for(lambda entries: any(isinstance(entry, Span) for entry in entries))
        ring.runs["b"].on_tensor(TensorKey("h", 0, 0, 2), "a", "again", None)
        ring.start("a")
        assert ring.wait_done(1)
        assert ring.runs["b"].num_waiting == 0


def test_run_takes_a_tensor_that_came_twice_for_no_other() -> None:
    """A second copy that comes while the micro-batch waits for its gradient does not stand for that gradient."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, local_iterations=2, eval_rows=0)
    first, *later = turn_sequence(plan.course)
    with ring_of(plan) as ring:
        run = ring.runs["b"]
        run.on_tensor(TensorKey("h", 0, 0, 2), "a", "first", None)
        ring.start("b")
        run.grant([first])
        assert ring.reports["b"].wait_for(lambda entries: any(isinstance(entry, rp.Sent) for entry in entries))
        run.on_tensor(TensorKey("h", 0, 0, 2), "a", "again", None)
        run.grant(later)  # whenever a turn comes, the engine looks for what can go backward
        assert run.call(lambda: "alive", timeout_s=WAIT_S, what="an answer") == "alive"
        assert ring.reports["b"].of(rp.Failed) == []
        ring.start("a")
        ring.runs["a"].grant([first, *later])
        assert ring.wait_done(1 + len(later))
        assert run.num_waiting == 0


def test_run_call_after_the_end_is_refused() -> None:
    """Whoever asks for results of a run that has ended gets an error, not a wait."""
    with ring_of(make_plan([("a", 0, 4)], ["a"])) as ring:
        ring.start()
        ring.runs["a"].stop("enough")
        assert ring.runs["a"].wait(WAIT_S)
        with pytest.raises(DeadlineError, match="has ended"):
            ring.runs["a"].call(lambda: None, timeout_s=WAIT_S, what="nothing")


def test_run_on_an_owner_that_hosts_nothing_hands_the_head_over() -> None:
    """Node c owns data only: the next owner's turn is done for it at once, and its head still goes there."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["c", "a"], num_steps=8)
    with ring_of(plan) as ring:
        ring.start()
        assert ring.wait_done(len(ring.grant_all()))
        sent = [entry for entry in ring.reports["c"].of(rp.Sent) if entry.payload == "t"]
        assert (sent[0].target, sent[0].seq) == ("a", 2)
        assert all(
            action.op in (Op.EMBED, Op.HEAD, Op.UPDATE)
            for action in ring.executors["c"].log
            if isinstance(action, Action)
        )
