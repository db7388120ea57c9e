"""The loop that drives one engine, with fake executors and links, checkpoints, copies and operations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge.checkpoint.shard_saver import Saver
from edge.checkpoint.snapshots import HEAD
from edge.runtime import reporter as rp
from edge.runtime.loop import CopyMonitor
from edge.runtime.reporter import CopyCompared, record_line
from ringtune.engine.events import Handled, HeadArrived, Span, TensorArrived
from ringtune.errors import (
    DeadlineError,
    DivergedError,
    FrameError,
    IntegrityError,
    ModelError,
    PeerLostError,
    RingTuneError,
    StorageError,
)
from ringtune.run_control.checkpoint import Shard
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.lowering import item_updates
from ringtune.schedule.methods import Everything, Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, items, turn_sequence
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.tensor_files import TensorFile
from ringtune.techniques.operations import check_scores
from ringtune.techniques.replicas import compared_copies
from ringtune.transport.codecs import scores_from_proto
from tests.contract.techniques.test_replicas import hift_plan
from tests.support.choosing import DrawnTables, make_choice, table_of
from tests.support.fakes import WAIT_S, FakeExecutor, FakeRing, KeptReports
from tests.support.plans import changed, make_plan
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


def require_replays(reports: KeptReports, plan: Plan, node: str) -> list[str]:
    """What a node recorded, fed to a fresh engine, gives the very commands; returns the lines."""
    lines = [
        entry.line if isinstance(entry, rp.HeaderLine) else record_line(*entry)
        for entry in reports.entries
        if isinstance(entry, rp.HeaderLine | Handled)
    ]
    others = sum(line.startswith('{"table"') for line in lines)
    assert replay(lines, plan, node) == len(lines) - 1 - others > 0
    return lines


def test_run_ring_does_every_action_of_the_plan() -> None:
    """Four blocks, two owners, eight steps: each owner reports its items once, each node each turn once.

    There is a span for each action that the executor ran, and the bytes of every message with its target. Every hidden
    state that is taken from the inbox returns one credit; a gradient none.
    """
    with ring_of(two_hosts(eval_rows=0), record=True) as ring:
        ring.start()
        turns = ring.grant_all()
        assert ring.wait_done(len(turns))
    seqs = [step.report.seq for node in ring.plan.nodes for step in ring.reports[node].of(rp.StepDone)]
    assert sorted(seqs) == list(range(turns[-1].end_seq))
    for node, reports in ring.reports.items():
        assert sorted(entry.turn for entry in reports.of(rp.TurnDone)) == [turn.index for turn in turns]
        assert ring.executors[node].turns == set()
        actions = [entry for entry in ring.executors[node].log if isinstance(entry, Action)]
        assert [span.action for span in reports.of(Span)] == actions
        sent_bytes = sum(entry.num_bytes for entry in reports.of(rp.Sent))
        assert sent_bytes == sum(ring.runs[node].totals.sent_bytes.values())
        require_replays(reports, ring.plan, node)
    heads = [entry for entry in ring.reports["a"].of(rp.Sent) if entry.payload == "t"]
    assert {(entry.target, entry.num_bytes) for entry in heads} == {("c", len(b"head"))}
    sent = sum(entry.payload == "h" for reports in ring.reports.values() for entry in reports.of(rp.Sent))
    got = sum(len(_events(reports.entries, "CreditArrived")) for reports in ring.reports.values())
    assert sent - 8 <= got <= sent, "the last credits may come after the last turn was done"
    assert got > 0


def test_run_executor_error_names_node_and_class(caplog: pytest.LogCaptureFixture) -> None:
    """An error of ours keeps its class; the loop goes on answering and ends when it is told to.

    One that is not ours becomes the root class; its type and place are in the message, its text in the log.
    """

    def raising(error: Exception) -> FakeExecutor:
        def refuse(action: Action) -> None:
            raise error

        return FakeExecutor(refuse)

    for error, kind, message in (
        (ModelError("block 1 is not there"), "ModelError", "node b: block 1 is not there$"),
        (
            ZeroDivisionError("a bug"),
            "RingTuneError",
            r"node b: internal error, ZeroDivisionError at edge.runtime.loop:",
        ),
    ):
        with ring_of(two_hosts(), executors={"b": raising(error)}) as ring:
            ring.start()
            ring.grant_all()
            failed = failure_of(ring.reports["b"])
            assert (failed.error, failed.lost_peer) == (kind, "")
            assert re.match(message, failed.message) and "a bug" not in failed.message
            assert ring.runs["b"].call(lambda: "alive", timeout_s=WAIT_S, what="an answer") == "alive"
    assert "a bug" in caplog.text


@pytest.mark.parametrize("error", [IntegrityError, DivergedError])
@pytest.mark.parametrize(("what", "node"), [("put_tensor", "b"), ("load_head_blob", "c"), ("put_parcel", "c")])
def test_run_names_the_sender_of_what_can_not_be_used(what: str, node: str, error: type[RingTuneError]) -> None:
    """A hidden state, the head that an owner hands over, and a parcel: either of both may be wrong."""

    def refuse(*args: object) -> None:
        raise error("it is not what it should be")

    executor = FakeExecutor()
    setattr(executor, what, refuse)
    plan = changed(two_hosts(), method=Hift(group_size=2)) if what == "put_parcel" else two_hosts()
    with ring_of(plan, executors={node: executor}) as ring:
        ring.start()
        ring.grant_all()
        failed = failure_of(ring.reports[node])
    assert failed == rp.Failed(error.__name__, f"node {node}: it is not what it should be", "a")


def test_run_lost_peer_is_reported_once_and_at_once() -> None:
    """Both ends of a broken link tell it; the coordinator hears of it once, with the peer's name.

    A send may find a broken link before the link tells of it; the coordinator then hears the peer's own error.
    """
    with ring_of(two_hosts()) as ring:
        ring.start()
        ring.runs["b"].on_peer_lost("a", "socket closed")
        ring.runs["b"].on_peer_lost("a", "cancelled")
        failed = ring.reports["b"].of(rp.Failed)
        assert failed == [rp.Failed("PeerLostError", "node b lost its link with node a: socket closed", "a")]
    with ring_of(two_hosts()) as ring:
        lost = PeerLostError("node a: Socket closed")
        lost.peer = "a"
        ring.runs["b"].fail(lost)
        assert ring.reports["b"].of(rp.Failed) == [rp.Failed("PeerLostError", "node b: node a: Socket closed", "a")]


@pytest.mark.parametrize(
    ("waits", "is_lost"),
    [
        (Action(Op.SEND, 1, 0, 1, 1, "a", Payload.GRAD), True),
        (Action(Op.SEND, 2, 0, 1, 1, "a", Payload.GRAD), False),
        (Action(Op.SEND, 0, -1, 0, 0, "a", Payload.HEAD), True),
        (Action(Op.SEND, 0, -1, 1, 0, "a", Payload.HEAD), False),
        (None, False),
    ],
)
@pytest.mark.parametrize("goes_back", [True, False])
def test_run_loses_a_node_that_reads_nothing_of_turns_that_it_has_done(
    waits: Action | None, is_lost: bool, goes_back: bool
) -> None:
    """Gradients and heads would wait here without end. Turn 1 begins with item 2, and is done everywhere before 4."""
    plan = two_hosts().with_copies(goes_back)
    turns = list(turn_sequence(plan.course))
    assert [turn.first_seq for turn in turns[:2]] == [0, 2]
    with ring_of(plan) as ring:
        run = ring.runs["b"]
        ring.start("b")
        run._links["a"].waiting = waits  # type: ignore[misc]
        run.grant(turns[:2])
        run.grant(turns[2:3])
        run.call(lambda: None, timeout_s=WAIT_S, what="grants")
        assert not ring.reports["b"].of(rp.Failed)
        run.grant(turns[2:3])  # a call whose answer was lost is no further grant
        assert not ring.reports["b"].of(rp.Failed)
        run.grant(turns[3:4])
        text = "node b lost its link with node a: it has not read what was sent to it before turn 1"
        assert ring.reports["b"].of(rp.Failed) == [rp.Failed("PeerLostError", text, "a")] * (is_lost and goes_back)


def test_run_waits_for_nodes_with_turns_that_are_granted_at_once() -> None:
    """As after a loss, with the last turn of a run that the user stops right behind them: none of them is done yet."""
    plan = two_hosts().with_copies(True)
    turns = list(turn_sequence(plan.course))
    with ring_of(plan) as ring:
        run = ring.runs["b"]
        ring.start("b")
        run._links["a"].waiting = Action(Op.SEND, 0, 0, 1, 1, "a", Payload.GRAD)  # type: ignore[misc]
        run.grant(turns[:-1])
        run.call(lambda: None, timeout_s=WAIT_S, what="grants")
        run.grant(turns[-1:])
        run.call(lambda: None, timeout_s=WAIT_S, what="a grant")
        assert not ring.reports["b"].of(rp.Failed)


@pytest.mark.promise("6 every wait ends")
def test_run_without_progress_names_what_it_waits_for() -> None:
    """A host whose neighbour never starts gives up after wait_s and names message and sender."""
    with ring_of(two_hosts(), wait_s=0.05) as ring:
        ring.start("b")
        ring.grant_all()
        failed = failure_of(ring.reports["b"])
    assert failed.error == "DeadlineError"
    assert "hidden state of step 0" in failed.message
    assert "from node a" in failed.message


def holding() -> tuple[FakeExecutor, threading.Event, threading.Event]:
    """An executor that waits in each action, with the events that it began and that it may go on."""
    started, go_on = threading.Event(), threading.Event()

    def hold(action: Action) -> None:
        started.set()
        assert go_on.wait(WAIT_S)

    return FakeExecutor(hold), started, go_on


def test_run_stops_after_the_action_under_way() -> None:
    """A stop that comes while an action runs ends the loop without another; who asks then gets an error, not a wait."""
    executor, started, go_on = holding()
    with ring_of(make_plan([("a", 0, 4)], ["a"]), executors={"a": executor}) as ring:
        ring.start()
        ring.grant_all()
        assert started.wait(WAIT_S)
        ring.runs["a"].stop("enough")
        go_on.set()
        assert ring.runs["a"].wait(WAIT_S)
        assert len(executor.log) == 1
        with pytest.raises(DeadlineError, match="has ended"):
            ring.runs["a"].call(lambda: None, timeout_s=WAIT_S, what="nothing")


def test_run_sees_what_came_during_an_action_before_choosing_the_next() -> None:
    """Two hidden states come while b computes: both are in the recording before the action's end."""
    executor, started, go_on = holding()
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], microbatches=4, num_steps=1, eval_rows=0)
    with ring_of(plan, executors={"b": executor}, record=True) as ring:
        ring.start("b")
        ring.grant_all()
        run = ring.runs["b"]
        run.on_arrival(TensorArrived(TensorKey("h", 0, 0, 2), "a"), ("x", None))
        assert started.wait(WAIT_S)
        run.on_arrival(TensorArrived(TensorKey("h", 0, 1, 2), "a"), ("x", None))
        run.on_arrival(TensorArrived(TensorKey("h", 0, 2, 2), "a"), ("x", None))
        go_on.set()
        assert ring.reports["b"].wait_for(lambda entries: len(_events(entries, "ActionDone")) >= 1)
        names = [type(entry.event).__name__ for entry in ring.reports["b"].of(Handled)]
    first_done = names.index("ActionDone")
    assert names[:first_done].count("TensorArrived") == 3


def _events(entries: Any, name: str) -> list[Any]:
    return [entry for entry in entries if isinstance(entry, Handled) and type(entry.event).__name__ == name]


def test_run_takes_a_tensor_that_came_twice_for_no_other() -> None:
    """A second copy does not stand for the gradient that the micro-batch waits for, and is forgotten with its turn."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, local_iterations=2, eval_rows=0)
    first, *later = turn_sequence(plan.course)
    with ring_of(plan) as ring:
        run = ring.runs["b"]
        run.on_arrival(TensorArrived(TensorKey("h", 0, 0, 2), "a"), ("first", None))
        ring.start("b")
        run.grant([first])
        assert ring.reports["b"].wait_for(lambda entries: any(isinstance(entry, rp.Sent) for entry in entries))
        run.on_arrival(TensorArrived(TensorKey("h", 0, 0, 2), "a"), ("again", None))
        run.grant(later)  # whenever a turn comes, the engine looks for what can go backward
        assert run.call(lambda: "alive", timeout_s=WAIT_S, what="an answer") == "alive"
        assert ring.reports["b"].of(rp.Failed) == []
        ring.start("a")
        ring.runs["a"].grant([first, *later])
        assert ring.wait_done(1 + len(later))
        assert not run._inbox


def test_run_names_the_sender_of_a_gradient_that_comes_too_early() -> None:
    """An error without a peer would be this node's own, with which it leaves, or ends the run as its owner."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, method=Everything())
    with ring_of(plan) as ring:
        ring.start("a")
        ring.runs["a"].grant([next(turn_sequence(plan.course))])
        ring.runs["a"].on_arrival(TensorArrived(TensorKey(Payload.GRAD, 1, 0, 2), "b"), ("grad", None))
        failed = failure_of(ring.reports["a"])
    assert (failed.error, failed.lost_peer) == ("FrameError", "b")
    assert "before this node sent what it follows from" in failed.message


def test_run_keeps_no_more_gradients_and_heads_than_can_be_on_their_way() -> None:
    """They have no credits, and a plan names one for each micro-batch of thousands of items, so memory would grow."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "c"], num_steps=2000, local_iterations=1000)
    with ring_of(plan) as ring:
        run = ring.runs["a"]
        for seq, micro in itertools.product(range(3), range(2)):  # graphs of an item at each host, and of an embedding
            run.on_arrival(TensorArrived(TensorKey(Payload.GRAD, seq, micro, 2), "b"), ("grad", None))
        with pytest.raises(FrameError, match="node b sends more gradients of items while 3 wait at node a"):
            run.on_arrival(TensorArrived(TensorKey(Payload.GRAD, 3, 0, 2), "b"), ("grad", None))
        run.on_arrival(HeadArrived(2, "c"), Pieces.of(b"head"))
        with pytest.raises(FrameError, match="node c sends more heads while 1 wait at node a"):
            run.on_arrival(HeadArrived(4, "c"), Pieces.of(b"head"))
        assert len(run._inbox) == 7


RUN = "r20260101-000000-00000000"
PLAN_OF_CHECKPOINTS = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, checkpoint_every=2)


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[dict[str, Saver]]:
    """Folders of both nodes; let go in the end."""
    made = {node: Saver(tmp_path / node, RUN, PLAN_OF_CHECKPOINTS, node) for node in PLAN_OF_CHECKPOINTS.nodes}
    yield made
    for saver in made.values():
        saver.close()


class FullDisk:
    """Saves nothing."""

    def save(self, step: int, executor: object, *, with_head: bool) -> Shard:
        """There is no room."""
        raise StorageError(f"node b did not save step {step}: No space left on device")

    def keep_from(self, step: int) -> None:
        """Nothing to drop."""


def failure_of(reports: KeptReports) -> rp.Failed:
    """What a node failed with."""
    assert reports.wait_for(lambda entries: any(isinstance(entry, rp.Failed) for entry in entries))
    (failed,) = reports.of(rp.Failed)
    assert isinstance(failed, rp.Failed)
    return failed


def test_run_reports_a_turn_as_done_after_its_shard_is_on_disk(tmp_path: Path, savers: dict[str, Saver]) -> None:
    """Each node saves each checkpoint once, the owner of the turn with the head.

    A head may be sent ahead of the checkpoint that its last owner still has to write with it: its state is freed once
    it went, but never before it is saved.
    """
    with ring_of(PLAN_OF_CHECKPOINTS, savers=savers) as ring:
        ring.start()
        turns = ring.grant_all()
        assert ring.wait_done(len(turns))
    checkpoints = [turn for turn in turns if turn.kind is StepKind.CHECKPOINT]
    for node, reports in ring.reports.items():
        entries = list(reports.entries)
        saved = reports.of(rp.ShardSaved)
        assert [(entry.turn, entry.step) for entry in saved] == [(turn.index, turn.first_step) for turn in checkpoints]
        for entry, turn in zip(saved, checkpoints, strict=True):
            assert entries.index(entry) < entries.index(rp.TurnDone(turn.index))
            content = FilePieces(tmp_path / node / RUN / f"step-{entry.step}.safetensors")
            assert (HEAD in TensorFile(content, where="").infos) is (turn.owner == node)
            assert entry.shard.size_bytes == content.size_bytes
            head = {PLAN_OF_CHECKPOINTS.course.head: Pieces.of(str(entry.step).encode()).sha256()}
            assert entry.digests == (head if turn.owner == node else {})
    logs = [ring.executors[node].head_log for node in PLAN_OF_CHECKPOINTS.nodes]
    assert all("dropped" in log and "saved" in log for log in logs)
    for log in logs:
        is_whole = True
        for entry in log:
            assert is_whole or entry != "saved", log
            is_whole = {"came": True, "dropped": False}.get(entry, is_whole)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [({"b": FullDisk()}, "did not save step 2: No space left"), ({}, r"node b has no folder for checkpoints.*--state")],
)
def test_run_that_can_not_save_fails_with_a_name_of_its_own(
    savers: dict[str, Saver], theirs: Mapping[str, Any], message: str
) -> None:
    """The coordinator hears which node, which step and why, and ends with the exit code of a full disk."""
    with ring_of(PLAN_OF_CHECKPOINTS, savers={"a": savers["a"], **theirs}) as ring:
        ring.start()
        ring.grant_all()
        failed = failure_of(ring.reports["b"])
        assert failed.error == StorageError.__name__
        assert re.search(message, failed.message)
        assert not ring.reports["b"].of(rp.ShardSaved)


PLAN_OF_OPERATIONS = changed(
    make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, eval_every=4), choice=make_choice(refresh_steps=4)
)


def decided_turns(plan: Plan) -> list[Turn]:
    """The turns of a run with a table from the first train turn on, and another one from step 4 on."""
    tables = {0: table_of(plan.course, 0), 4: table_of(plan.course, 4)}
    table, found = None, []
    for turn in turn_sequence(plan.course):
        if turn.kind is StepKind.TRAIN:
            table = tables.get(turn.first_step, table)
        found.append(dataclasses.replace(turn, operations=table))
    return found


def test_loop_reports_scores_before_the_end_of_their_turn_and_records_each_table_once() -> None:
    """All that the node owes, and nothing for other turns.

    Turns name their table by its digest; the table stands before the first of them, and the recording replays.
    """
    plan, turns = PLAN_OF_OPERATIONS, decided_turns(PLAN_OF_OPERATIONS)
    by_index, tools = {turn.index: turn for turn in turns}, DrawnTables(plan)
    executors = {
        node: FakeExecutor(scores=lambda index, node=node: tools.scores(plan, node, by_index[index]))  # type: ignore[misc]
        for node in plan.nodes
    }
    with ring_of(plan, executors=executors, record=True) as ring:
        ring.start()
        for run in ring.runs.values():
            run.grant(turns)
        assert ring.wait_done(len(turns))
    digests = list(dict.fromkeys(turn.operations.digest for turn in turns if turn.operations))
    for node in plan.nodes:
        scores: dict[int, list[object]] = {}
        for entry in ring.reports[node].entries:
            match entry:
                case rp.Scored(message):
                    scores.setdefault(message.turn, []).extend(scores_from_proto(message))
                case rp.TurnDone(index):
                    check_scores(plan, by_index[index], node, scores.pop(index, []))  # type: ignore[arg-type]
        assert not scores
        lines = require_replays(ring.reports[node], plan, node)
        tables = [json.loads(line)["digest"] for line in lines if line.startswith('{"table"')]
        assert tables == digests and len(tables) == 2


PLAN_OF_COPIES = hift_plan()
TURNS = [turn for turn in turn_sequence(PLAN_OF_COPIES.course) if turn.kind is StepKind.TRAIN]


def updates(plan: Plan, turn: Turn, node: str) -> list[Action]:
    """The updates of a turn at a node, in order."""
    return [action for item in items(plan.course, turn) for action in item_updates(plan, item, node)]


def test_copy_watch_takes_a_digest_for_each_unit_after_its_last_update() -> None:
    """Of two updates of the embedding in a turn the second counts; updates of the next turn change nothing of it."""
    version = {"value": ""}
    watch = CopyMonitor(PLAN_OF_COPIES, "c", lambda unit, _: f"{unit} {version['value']}")
    for turn in TURNS[:2]:
        watch.expect(turn)
    for action in [*updates(PLAN_OF_COPIES, TURNS[0], "c"), *updates(PLAN_OF_COPIES, TURNS[1], "c")]:
        version["value"] = f"after item {action.seq}"
        watch.after(action)
    for turn in TURNS[:2]:
        wanted = compared_copies(PLAN_OF_COPIES.course, turn)
        assert sorted(watch.take(turn.index)) == sorted(
            CopyCompared(turn.index, unit, f"{unit} after item {seq}") for unit, seq in wanted.items()
        )
        assert list(watch.take(turn.index)) == []


def test_run_drops_shards_when_it_is_told(savers: dict[str, Saver]) -> None:
    """Not before: only the coordinator knows which checkpoints are complete."""
    saver = savers["a"]
    with ring_of(PLAN_OF_CHECKPOINTS, savers=savers) as ring:
        ring.start()
        assert ring.wait_done(len(ring.grant_all()))
        assert saver.open().steps() == (2, 4, 6, 8)
        ring.runs["a"].keep_shards_from(6)
        ring.runs["a"].call(lambda: None, timeout_s=WAIT_S, what="the shards to be dropped")
        assert saver.open().steps() == (6, 8)
