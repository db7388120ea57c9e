"""A node fetches weights ahead, rests, moves, goes back, and gives what it keeps to others."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from coordinator.run.migration import MigrationDriver
from edge.agent.active_run import ActiveRun
from edge.agent.migration import AgentMigration, NextPlacement
from edge.agent.process import AgentServicer
from edge.checkpoint.shard_saver import ResumeShard, SavedStart, ShardRequest
from edge.checkpoint.snapshot_servicer import SnapshotFetcher, SnapshotServicer
from edge.checkpoint.snapshots import MigratedState, SnapshotShelf, TurnSnapshots, block_digests
from edge.checkpoint.state_folder import StateFolder
from edge.options import AgentOptions
from edge.transport.access import RunAccess
from edge.weights.weight_fetch import ModelFetcher
from ringtune.errors import ConnectionFailedError, FrameError, IntegrityError, InterruptedRunError, TrustError
from ringtune.job.job import Job, Model, parse_job
from ringtune.models.folder import read_headers
from ringtune.run_control.events import MoveFailed
from ringtune.schedule.access import NOT_PLANNED
from ringtune.schedule.migration import Source
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn, turn_sequence
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors
from ringtune.transport.channels import Server
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.edge.checkpoint.test_snapshots import file_of
from tests.support.fakes import ADDRESSES, OTHER, WAIT_S, FakeSnapshot, TwoAgents
from tests.support.fakes import JOB as TWO_AGENTS_JOB
from tests.support.fakes import PLAN as TWO_AGENTS_PLAN
from tests.support.fakes import RUN as TWO_AGENTS_RUN
from tests.support.moves import moving
from tests.support.plans import make_plan
from tests.support.weights_parts import RUN, TIMEOUT_S, digest_at, serving, wait_until, write_bert

PLAN = moving(make_plan([("a", 0, 3), ("b", 3, 4)], ["a"], num_steps=4), (1, (("a", 0, 1), ("b", 1, 4))))
JOB = Job(model=Model(path="elsewhere/all-MiniLM-L6-v2")).with_overrides({"train.max_length": 16})


class Host:
    """The parts of an agent that know its run and where base weights are."""

    def __init__(self, cache: Path, port: int, *, path: Path | None = None) -> None:
        settings = AgentOptions(coordinator=f"127.0.0.1:{port}", name="b", cache=cache)
        self.models: Any = ModelFetcher(settings, list)
        self.models.trust(RUN, digest_at(settings.coordinator))
        self.active: ActiveRun | None = ActiveRun(RUN, "b", 0, PLAN.at(0))
        self._job = JOB if path is None else JOB.with_overrides({"model.path": str(path)})

    def current(self) -> ActiveRun | None:
        """Return the run that is under way."""
        return self.active

    def job_of(self, run_id: str, job_toml: str) -> Job:
        """Return the job of all runs."""
        return self._job


def ask(host: Any, plan: Plan, *, run_id: str = RUN) -> int:
    """Let node b fetch ahead for a part of the plan."""
    return AgentMigration(host, "b").fetch_ahead(run_id, json.dumps(plan.to_json()), "", timeout_s=TIMEOUT_S)


def test_node_fetches_the_tensors_of_its_next_slice_and_no_others(tmp_path: Path) -> None:
    """Those of its present slice are there already; the move finds all, and needs nobody for it."""
    folder = write_bert(tmp_path / "m")
    blocks = [
        sum(one.info.nbytes for name, one in read_headers(folder).items() if f".{at}." in name) for at in range(4)
    ]
    with serving(folder) as server:
        host = Host(tmp_path / "cache", server.port)
        host.models.for_run(RUN, JOB, PLAN.at(0), timeout_s=TIMEOUT_S)
        assert ask(host, PLAN.at(1)) == sum(blocks[1:3])
        assert ask(host, PLAN.at(1)) == 0
        host.active = None  # a node of the next placement alone
        assert ask(host, PLAN.at(1)) == 0
    found = Path(host.models.for_run(RUN, JOB, PLAN.at(1), timeout_s=TIMEOUT_S).model.path)
    assert {name.split(".")[2] for name in read_headers(found)} == {"1", "2", "3"}


def test_release_of_the_run_ends_the_fetching(tmp_path: Path) -> None:
    """Whoever waits for the tensors hears that the run is over."""
    folder = write_bert(tmp_path / "m")
    with serving(folder) as server:
        host = Host(tmp_path / "cache", server.port)
        peers = host.models._sources
        host.models._sources = lambda: [host.models.release(RUN)] and peers()
        with pytest.raises(InterruptedRunError, match="was released"):
            ask(host, PLAN.at(1))


MOVES = moving(TWO_AGENTS_PLAN, (1, (("b", 0, 4),)))
START = StartPoint(step=2, holder="a", first_turn=1, first_seq=2, placement_number=1)


@pytest.fixture
def ring() -> Iterator[TwoAgents]:
    """Two agents that have prepared the first placement."""
    made = TwoAgents()
    try:
        yield made
    finally:
        for agent in made.agents.values():
            agent.close(WAIT_S)


def prepare(ring: TwoAgents) -> None:
    """Both nodes at once, as they wait for each other's links."""
    part = json.dumps(MOVES.at(0).to_json())
    in_parallel(lambda: ring.prepare("a", plan_json=part), lambda: ring.prepare("b", plan_json=part))


def in_parallel(*calls: object) -> None:
    """Each on a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def to(part: Plan, *sources: Source, start: StartPoint = START) -> NextPlacement:
    """The request to move to a part of the plan, from placement 0."""
    return NextPlacement(
        run_id=TWO_AGENTS_RUN,
        placement_number=part.placement.placement_number,
        plan_json=json.dumps(part.to_json()),
        job_toml=TWO_AGENTS_JOB,
        addresses=ADDRESSES,
        shards_run=TWO_AGENTS_RUN,
        start=start,
        from_placement_number=0,
        sources=sources,
    )


def test_node_keeps_its_snapshot_until_the_first_turn_after_a_move(ring: TwoAgents) -> None:
    """It goes on with its own blocks, and with the head if it held it; a grant lets the snapshot go."""
    prepare(ring)
    agent, other = ring.agents["a"], ring.agents["b"]
    totals = json.loads(agent.moves.rest(TWO_AGENTS_RUN, 0, timeout_s=WAIT_S))
    assert totals["node"] == "a" and totals["hosted_bytes"] == 7
    other.moves.rest(TWO_AGENTS_RUN, 0, timeout_s=WAIT_S)
    part, own = MOVES.at(0), Source("a", 0, 2)
    in_parallel(
        lambda: agent.moves.move(to(part, own), timeout_s=WAIT_S),
        lambda: other.moves.move(to(part, Source("b", 2, 4)), timeout_s=WAIT_S),
    )
    assert ring.shops["a"].executor.log == [["a/0.up", "a/1.up"], b"head of a"]
    assert ring.shops["b"].executor.log == [["b/2.up", "b/3.up"]]
    assert agent.moves.shelf.get(TWO_AGENTS_RUN, 0).metadata == {"run": TWO_AGENTS_RUN, "epoch": "0"}
    agent.grant(TWO_AGENTS_RUN, 0, ())  # only lets shards go
    agent.moves.shelf.get(TWO_AGENTS_RUN, 0)
    agent.grant(TWO_AGENTS_RUN, 0, [turn(1)])
    with pytest.raises(FrameError, match=f"node a keeps no snapshot of run {TWO_AGENTS_RUN} in placement 0"):
        agent.moves.shelf.get(TWO_AGENTS_RUN, 0)


def turn(index: int) -> Turn:
    """A train turn of the plan."""
    return [one for one in turn_sequence(TWO_AGENTS_PLAN.course) if one.kind is StepKind.TRAIN][index]


def test_node_without_a_place_only_stops_and_still_has_its_snapshot(ring: TwoAgents) -> None:
    """Others may ask for its blocks until the run is over, or another one begins because the coordinator died."""
    prepare(ring)
    agent = ring.agents["b"]
    agent.moves.rest(TWO_AGENTS_RUN, 0, timeout_s=WAIT_S)
    alone = moving(TWO_AGENTS_PLAN, (1, (("a", 0, 4),))).at(1)
    assert agent.moves.move(to(alone), timeout_s=WAIT_S) == (0, 0)
    assert agent.current_run == ""
    kept = TensorFile(agent.moves.shelf.get(TWO_AGENTS_RUN, 0).part(2, 3), where="it")
    assert [*kept.infos] == ["b/2.up"]
    agent.release(OTHER, "another run")
    snapshot = agent.moves.shelf.get(TWO_AGENTS_RUN, 0)
    agent.release(TWO_AGENTS_RUN, "over")
    with pytest.raises(FrameError, match="keeps no snapshot"):
        agent.moves.shelf.get(TWO_AGENTS_RUN, 0)
    agent.moves.shelf.put(TWO_AGENTS_RUN, 0, snapshot)
    agent.inspect(OTHER, TWO_AGENTS_JOB, None, timeout_s=WAIT_S)
    with pytest.raises(FrameError, match="keeps no snapshot"):
        agent.moves.shelf.get(TWO_AGENTS_RUN, 0)


def test_links_that_break_while_the_node_rests_are_no_failure(ring: TwoAgents) -> None:
    """Others move first; a node that trains again minds its links."""
    prepare(ring)
    agent = ring.agents["a"]
    active, run = agent.of(TWO_AGENTS_RUN, 0)
    agent.moves.rest(TWO_AGENTS_RUN, 0, timeout_s=WAIT_S)
    active.on_link_lost("b", "it moved")
    active._report_lost("b", "it moved")
    assert not run._failed
    agent.grant(TWO_AGENTS_RUN, 0, [turn(0)])
    active._report_lost("b", "it broke")
    assert run._failed


def test_move_ends_where_another_call_came_meanwhile(ring: TwoAgents) -> None:
    """A run that is over does not come back because a move was still fetching."""
    prepare(ring)
    agent = ring.agents["a"]

    class Slow(FakeSnapshot):
        """While it is read, the run is released."""

        def part(self, start: int, stop: int) -> Pieces:
            agent.release(TWO_AGENTS_RUN, "over")
            return super().part(start, stop)

    agent.moves.shelf.put(TWO_AGENTS_RUN, 0, Slow("a", {}))
    with pytest.raises(InterruptedRunError, match=f"run {TWO_AGENTS_RUN} was moved or released meanwhile, so node a"):
        agent.moves.move(to(MOVES.at(0), Source("a", 0, 2)), timeout_s=WAIT_S)
    assert agent.current() is None


@pytest.fixture
def shelf() -> Iterator[tuple[SnapshotShelf, RunAccess, str]]:
    """The shelf of node b, who may fetch from it, and where it is served."""
    shelf, access = SnapshotShelf("b"), RunAccess("b")
    access.place(TWO_AGENTS_RUN, MOVES.at(0), None)

    def add(server: grpc.Server) -> None:
        servicer = SnapshotServicer(shelf, TurnSnapshots("b"), access)
        control_pb2_grpc.add_SnapshotsServicer_to_server(servicer, server)

    server = Server("127.0.0.1:0", add)
    yield shelf, access, f"127.0.0.1:{server.port}"
    server.stop()


def fetch_from(address: str, node: str = "a") -> list[str]:
    """What node b kept of blocks 1 and 2."""
    deadline_s = time.monotonic() + WAIT_S
    fetcher = SnapshotFetcher(
        node, TWO_AGENTS_RUN, 0, {"b": address}, deadline_s, lambda node, at: None, lease_s=WAIT_S
    )
    return sorted(TensorFile(fetcher.blocks(Source("b", 1, 3)), where="it").infos)


def test_snapshot_is_fetched_from_the_node_that_hosted_the_blocks(shelf: tuple[SnapshotShelf, RunAccess, str]) -> None:
    """Only by a node that takes them over, once this node is told of the move, and of this placement."""
    kept, access, address = shelf
    to_a = moving(TWO_AGENTS_PLAN, (1, (("a", 0, 4),))).at(1)
    kept.put(TWO_AGENTS_RUN, 0, FakeSnapshot("b", {}))
    fetched: list[list[str]] = []
    early = threading.Thread(target=lambda: fetched.append(fetch_from(address)))
    early.start()  # it waits until node b hears of the move too
    wait_until(lambda: access._waiting["a", 0] == 1)
    access.move(TWO_AGENTS_RUN, to_a, START, 0, None)
    early.join(WAIT_S)
    assert fetched == [["b/1.up", "b/2.up"]]
    access._wait_s = 0.0
    with pytest.raises(TrustError, match=r"node b refuses Snapshots\.Fetch of node 'c', .* no part in this call"):
        fetch_from(address, "c")
    access.move(TWO_AGENTS_RUN, MOVES.at(0), START, 0, None)
    with pytest.raises(TrustError, match=r"its part is blocks \[0, 1\]"):
        fetch_from(address)
    access.move(TWO_AGENTS_RUN, to_a, START, 0, 2)
    with pytest.raises(TrustError, match="its part is ends of turns"):
        fetch_from(address)
    access.move(TWO_AGENTS_RUN, to_a, START, 0, None)
    kept.put(TWO_AGENTS_RUN, 1, FakeSnapshot("b", {}))
    with pytest.raises(FrameError, match="node b keeps no snapshot of run"):
        fetch_from(address)


GOOD, POISON = file_of(0, 1), file_of(0, 1).replace(bytes([0, 1]), bytes([0, 9]))
EARLIER = file_of(0, 1).replace(bytes([0, 1]), bytes([0, 0]))  # block 1 before the turn, under the name of after it
NOTHING = b""
HEAD_UNIT = TWO_AGENTS_PLAN.course.head


class Keepers:
    """Node b, which recovers, and node a, which has copies of what b trained: each in memory, a at an address.

    All is after step 2, with the digests that b reported; ``own`` and ``copy`` are what b and a keep. Where that is
    nothing, b keeps it no longer, and a has no row of it.
    """

    def __init__(self, own: bytes, copy: bytes) -> None:
        self.plan = moving(TWO_AGENTS_PLAN, (1, (("b", 0, 4),))).at(1)
        self.far, access = TurnSnapshots("a"), RunAccess("a", wait_s=0.0)
        host: Any = SimpleNamespace(options=AgentOptions(coordinator="127.0.0.1:1", name="b"), access=RunAccess("b"))
        self.near = AgentMigration(host, "b")
        for kept, file in ((self.near.kept, own), (self.far, copy)):
            kept.begin(TWO_AGENTS_RUN)
            if file:
                kept.keep(TWO_AGENTS_RUN, 2, "b", file, b"head" if file == GOOD else b"evil")
        if copy:
            access.move(TWO_AGENTS_RUN, self.plan, dataclasses.replace(START, holder="b"), 1, 2)

        def add(server: grpc.Server) -> None:
            servicer = SnapshotServicer(SnapshotShelf("a"), self.far, access)
            control_pb2_grpc.add_SnapshotsServicer_to_server(servicer, server)

        self.server = Server("127.0.0.1:0", add)

    def recover(self, source: str, other: str, blocks: tuple[int, int] = (0, 2)) -> MigratedState:
        """What node b goes on with; blocks that ``source`` does not have come from the other one alone."""
        to = NextPlacement(
            run_id=TWO_AGENTS_RUN,
            placement_number=1,
            plan_json=json.dumps(self.plan.to_json()),
            job_toml=TWO_AGENTS_JOB,
            addresses={"a": f"127.0.0.1:{self.server.port}"},
            shards_run=TWO_AGENTS_RUN,
            start=dataclasses.replace(START, holder="b"),
            from_placement_number=1,
            sources=[Source(source, *blocks), *([Source(other, blocks[1], 2)] if blocks[1] < 2 else [])],
            from_step=2,
            head_from="" if source == "b" else source,
            digests={**block_digests(Pieces.of(GOOD)), HEAD_UNIT: Pieces.of(b"head").sha256()},
            others=[Source(other, block, block + 1) for block in range(blocks[1]) if other],
            other_head=other,
        )
        return self.near._kept(to, 2, HEAD_UNIT, time.monotonic() + WAIT_S)[0]


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize(
    ("own", "copy", "source", "other"),
    [
        (GOOD, POISON, "b", ""),
        (POISON, GOOD, "b", "a"),
        (GOOD, POISON, "a", "b"),
        (GOOD, EARLIER, "a", "b"),
        (POISON, GOOD, "a", ""),
        (NOTHING, GOOD, "b", "a"),
        (GOOD, NOTHING, "a", "b"),
    ],
)
def test_recovery_takes_what_was_trained_wherever_it_is(own: bytes, copy: bytes, source: str, other: str) -> None:
    """State that a node has changed (or is of an earlier turn), or does not give, is left for the next node's.

    The bits are those trained, by the digests of the turn to which the run goes back.
    """
    keepers = Keepers(own, copy)
    try:
        taken = keepers.recover(source, other)
    finally:
        keepers.server.stop(0.0)
    files = [TensorFile(one, where="it") for one in taken.files]
    found = {name: bytes(file.tensor(name).data) for file in files for name in file.infos}
    assert found == {"adapter/0.up": b"\0", "adapter/1.up": b"\1"}
    assert taken.head is not None and bytes(taken.head) == b"head"


@pytest.mark.parametrize("more", [{"adapter/0.up": b"\x09"}, {"adapter/up": b"\x09"}], ids=["of a block", "of none"])
def test_node_that_hands_in_more_than_it_was_asked_for_gives_nothing(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, bytes]
) -> None:
    """Tensors of a block that another node has given, which no digest would be compared with, or of none."""
    keepers = Keepers(GOOD, GOOD)
    tensors = {"adapter/1.up": b"\1", **more}
    pieces = {name: TensorPieces("U8", (1,), Pieces.of(content)) for name, content in tensors.items()}
    monkeypatch.setattr(keepers.far, "part", lambda *_: write_tensors(pieces))
    try:
        with pytest.raises(IntegrityError, match=r"node a sent a tensor '.*up' with the blocks \[1, 2\)"):
            keepers.recover("b", "a", blocks=(0, 1))
    finally:
        keepers.server.stop(0.0)


@pytest.mark.parametrize(
    ("kept", "source", "other"),
    [*((POISON, *nodes) for nodes in (("b", "a"), ("a", "b"), ("b", ""), ("a", ""))), (NOTHING, "b", "a")],
)
def test_recovery_ends_where_nobody_has_what_was_trained(kept: bytes, source: str, other: str) -> None:
    """At once, with the node and the step: nothing else may be trained on."""
    keepers = Keepers(kept, kept)
    why = r"no node has block 1 after step 2 as it was trained: node [ab] keeps another state of block 1 after step 2"
    if not kept:
        why = "no node has block 0 after step 2 as it was trained: node a refuses"
    try:
        with pytest.raises(IntegrityError, match=why) as ended:
            keepers.recover(source, other)
    finally:
        keepers.server.stop(0.0)
    assert type(ended.value) is IntegrityError  # a FrameError would be waited out
    assert ended.value.peer == ("a" if (source, other) == ("a", "") else "")  # the only one that b has asked


@pytest.mark.parametrize("takes_holder", [True, False])
def test_coordinator_learns_of_which_node_a_copy_is_disputed(takes_holder: bool) -> None:
    """One of a build that does not read it gets an error, as before."""

    def move(*_: Any, **__: Any) -> None:
        error = IntegrityError("no node has block 1")
        error.peer = "a"
        raise error

    agent: Any = SimpleNamespace(moves=SimpleNamespace(move=move))

    def abort(code: grpc.StatusCode, details: str) -> None:
        raise FrameError(f"{code.name} {details}")  # as gRPC does, of another class

    context: Any = SimpleNamespace(time_remaining=lambda: 9.0, abort=abort)
    request = control_pb2.MoveRequest(takes_holder=takes_holder)
    if not takes_holder:
        with pytest.raises(FrameError, match=r"DATA_LOSS .*no node has block 1"):
            AgentServicer(agent).Move(request, context)
        return
    reply = AgentServicer(agent).Move(request, context)
    calls = dict.fromkeys("ab", SimpleNamespace(place=lambda number: None))
    unused, participants = cast(Any, None), cast(Any, SimpleNamespace(calls=calls, queue=Queue(), hear=None))
    job = parse_job(TWO_AGENTS_JOB, source="it")
    driver = MigrationDriver(participants, TWO_AGENTS_PLAN, job, unused, unused, unused, unused)
    failed = MoveFailed("b", 3, "IntegrityError", "node b: no node has block 1", "a")
    assert list(driver._moved("b", 3, reply)) == [failed]
    unopened = ConnectionFailedError("no link")
    unopened.peer = "c"
    driver._failed("b", 3)(unopened)
    assert participants.queue.get_nowait() == MoveFailed("b", 3, "ConnectionFailedError", "no link", lost="c")


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize(
    ("own", "head", "fetched", "problem"),
    [
        (GOOD, b"head", GOOD, ""),
        (POISON, b"head", GOOD, "node b keeps another state of block 1 after step 2 than was trained"),
        (GOOD, b"evil", GOOD, "node b keeps another state of the head"),
        (GOOD, b"head", EARLIER, "node a keeps another state of block 1"),
    ],
)
def test_resumed_run_takes_from_disks_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bytes, head: bytes, fetched: bytes, problem: str
) -> None:
    """Whoever keeps a copy on the disk may write another one; the coordinator knows the digests of the turn's end.

    A head may be as large as the embedding of the model, and is never held in memory as a whole.
    """

    def whole(pieces: Pieces) -> bytes:
        assert pieces.size_bytes != len(head)
        return b"".join(pieces)

    monkeypatch.setattr(Pieces, "__bytes__", whole)
    host: Any = SimpleNamespace(
        options=AgentOptions(coordinator="127.0.0.1:1", name="b", state=tmp_path), access=RunAccess("b")
    )
    monkeypatch.setattr(SnapshotFetcher, "blocks", lambda fetcher, source, step: Pieces.of(fetched))
    with StateFolder(tmp_path, "b", timeout_s=WAIT_S) as folder:
        for content, is_head in ((own, False), (head, True)):
            folder.run(TWO_AGENTS_RUN).write_part(2, TWO_AGENTS_RUN, content, is_head=is_head)
        digests = {**block_digests(Pieces.of(GOOD)), HEAD_UNIT: Pieces.of(b"head").sha256()}
        sources = (Source("b", 0, 2), Source("a", 0, 2))
        resume = ResumeShard(
            TWO_AGENTS_RUN, ShardRequest(2, ""), "b", saved=SavedStart(TWO_AGENTS_RUN, sources, digests=digests)
        )

        def resumed() -> MigratedState | None:
            arguments = (resume, HEAD_UNIT, TWO_AGENTS_JOB, {"a": "127.0.0.1:1"}, time.monotonic() + WAIT_S)
            return AgentMigration(host, "b").from_disks(*arguments, sizes=NOT_PLANNED)

        if problem:
            with pytest.raises(IntegrityError, match=problem):
                resumed()
        else:
            state = resumed()
            assert state is not None
            assert [block_digests(file) for file in state.files] == [block_digests(Pieces.of(GOOD))] * 2


@pytest.mark.parametrize("is_finished", [True, False])
def test_node_that_left_a_run_marks_its_shards_when_the_run_is_finished(tmp_path: Path, is_finished: bool) -> None:
    """Nobody goes on from them then, so that they may go like those of any finished run."""
    ring = TwoAgents(state=tmp_path)
    prepare(ring)
    agent = ring.agents["b"]
    with StateFolder(tmp_path, "a", timeout_s=WAIT_S) as folder:
        folder.run(TWO_AGENTS_RUN).keep_rows("what the run left here")
    agent.moves.rest(TWO_AGENTS_RUN, 0, timeout_s=WAIT_S)
    agent.moves.move(to(moving(TWO_AGENTS_PLAN, (1, (("a", 0, 4),))).at(1)), timeout_s=WAIT_S)
    agent.release(TWO_AGENTS_RUN, "over", is_finished=is_finished)
    ring.close()
    with StateFolder(tmp_path, "a", timeout_s=WAIT_S) as folder:
        assert folder.run(TWO_AGENTS_RUN).is_finished() is is_finished
