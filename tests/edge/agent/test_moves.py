"""A node rests, moves, goes back, and gives what it keeps to others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from edge.agent.moving.agent_moves import NextPlacement
from edge.agent.moving.fetch import fetch
from edge.agent.moving.kept import KeptTurns
from edge.agent.moving.servicer import SnapshotServicer
from edge.agent.moving.shelf import SnapshotShelf
from edge.shards.state_folder import StateFolder
from ringtune.errors import FrameError, InterruptedRunError
from ringtune.files.pieces import Pieces
from ringtune.rpc.connections import Server
from ringtune.schedule.changing_hands.placements import Source
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn, turn_sequence
from ringtune.v1 import control_pb2_grpc
from tests.support.fakes import WAIT_S
from tests.support.moves import moving
from tests.support.two_agents import ADDRESSES, JOB, OTHER, PLAN, RUN, FakeSnapshot, TwoAgents

MOVES = moving(PLAN, (1, (("b", 0, 4),)))
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
    in_parallel(
        lambda: ring.agents["a"].prepare(RUN, 0, plan_json=part, job_toml=JOB, addresses=ADDRESSES, timeout_s=WAIT_S),
        lambda: ring.agents["b"].prepare(RUN, 0, plan_json=part, job_toml=JOB, addresses=ADDRESSES, timeout_s=WAIT_S),
    )


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
        run_id=RUN,
        placement_number=part.placement.placement_number,
        plan_json=json.dumps(part.to_json()),
        job_toml=JOB,
        addresses=ADDRESSES,
        shards_run=RUN,
        start=start,
        from_placement_number=0,
        sources=sources,
    )


def test_node_keeps_its_snapshot_until_the_first_turn_after_a_move(ring: TwoAgents) -> None:
    """It goes on with its own blocks, and with the head if it held it; a grant lets the snapshot go."""
    prepare(ring)
    agent, other = ring.agents["a"], ring.agents["b"]
    totals = json.loads(agent.moves.rest(RUN, 0, timeout_s=WAIT_S))
    assert totals["node"] == "a" and totals["hosted_bytes"] == 7
    other.moves.rest(RUN, 0, timeout_s=WAIT_S)
    part, own = MOVES.at(0), Source("a", 0, 2)
    in_parallel(
        lambda: agent.moves.move(to(part, own), timeout_s=WAIT_S),
        lambda: other.moves.move(to(part, Source("b", 2, 4)), timeout_s=WAIT_S),
    )
    assert ring.shops["a"].executor.log == ["a [0, 2)", b"head of a"]
    assert ring.shops["b"].executor.log == ["b [2, 4)"]
    assert agent.moves.shelf.get(RUN, 0).metadata == {"run": RUN, "epoch": "0"}
    agent.grant(RUN, 0, ())  # only lets shards go
    agent.moves.shelf.get(RUN, 0)
    agent.grant(RUN, 0, [turn(1)])
    with pytest.raises(FrameError, match=f"node a keeps no snapshot of run {RUN} in placement 0"):
        agent.moves.shelf.get(RUN, 0)


def turn(index: int) -> Turn:
    """A train turn of the plan."""
    return [one for one in turn_sequence(PLAN.course) if one.kind is StepKind.TRAIN][index]


def test_grants_of_another_placement_are_refused(ring: TwoAgents) -> None:
    """A node that has moved knows only turns of its present placement."""
    prepare(ring)
    with pytest.raises(FrameError, match="node a has placement 0, not 1; prepare it first"):
        ring.agents["a"].grant(RUN, 1, [turn(0)])
    with pytest.raises(FrameError, match="node a has placement 0, not 1; prepare it first"):
        ring.agents["a"].moves.rest(RUN, 1, timeout_s=WAIT_S)


def test_node_without_a_place_only_stops_and_still_has_its_snapshot(ring: TwoAgents) -> None:
    """Others may ask for its blocks until the run trains again."""
    prepare(ring)
    agent = ring.agents["b"]
    agent.moves.rest(RUN, 0, timeout_s=WAIT_S)
    alone = moving(PLAN, (1, (("a", 0, 4),))).at(1)
    assert agent.moves.move(to(alone), timeout_s=WAIT_S) == (0, 0)
    assert agent.current_run == ""
    assert bytes(agent.moves.shelf.get(RUN, 0).part(2, 3)) == b"b [2, 3)"
    agent.release(OTHER, "another run")
    agent.moves.shelf.get(RUN, 0)
    agent.release(RUN, "over")
    with pytest.raises(FrameError, match="keeps no snapshot"):
        agent.moves.shelf.get(RUN, 0)


@pytest.mark.parametrize("is_finished", [True, False])
def test_node_that_left_a_run_marks_its_shards_when_the_run_is_finished(tmp_path: Path, is_finished: bool) -> None:
    """Nobody goes on from them then, so that they may go like those of any finished run."""
    ring = TwoAgents(state=tmp_path)
    prepare(ring)
    agent = ring.agents["b"]
    with StateFolder(tmp_path, timeout_s=WAIT_S) as folder:
        folder.run(RUN).keep_rows("what the run left here")
    agent.moves.rest(RUN, 0, timeout_s=WAIT_S)
    agent.moves.move(to(moving(PLAN, (1, (("a", 0, 4),))).at(1)), timeout_s=WAIT_S)
    agent.release(RUN, "over", is_finished=is_finished)
    ring.close()
    with StateFolder(tmp_path, timeout_s=WAIT_S) as folder:
        assert folder.run(RUN).is_finished() is is_finished


def test_snapshot_of_a_run_whose_coordinator_died_goes_when_another_begins(ring: TwoAgents) -> None:
    """Nobody released the node that had left it."""
    prepare(ring)
    agent = ring.agents["b"]
    agent.moves.rest(RUN, 0, timeout_s=WAIT_S)
    agent.moves.move(to(moving(PLAN, (1, (("a", 0, 4),))).at(1)), timeout_s=WAIT_S)
    agent.inspect(OTHER, JOB, None, timeout_s=WAIT_S)
    with pytest.raises(FrameError, match="keeps no snapshot"):
        agent.moves.shelf.get(RUN, 0)


def test_links_that_break_while_the_node_rests_are_no_failure(ring: TwoAgents) -> None:
    """Others move first; a node that trains again minds its links."""
    prepare(ring)
    agent = ring.agents["a"]
    active, run = agent.of(RUN, 0)
    agent.moves.rest(RUN, 0, timeout_s=WAIT_S)
    active.on_link_lost("b", "it moved")
    active._report_lost("b", "it moved")
    assert not run._failed
    agent.grant(RUN, 0, [turn(0)])
    active._report_lost("b", "it broke")
    assert run._failed


def test_move_ends_where_another_call_came_meanwhile(ring: TwoAgents) -> None:
    """A run that is over does not come back because a move was still fetching."""
    prepare(ring)
    agent = ring.agents["a"]

    class Slow(FakeSnapshot):
        """While it is read, the run is released."""

        def part(self, start: int, stop: int) -> Pieces:
            agent.release(RUN, "over")
            return super().part(start, stop)

    agent.moves.shelf.put(RUN, 0, Slow("a", {}))
    with pytest.raises(InterruptedRunError, match=f"run {RUN} goes on otherwise, so node a does not move"):
        agent.moves.move(to(MOVES.at(0), Source("a", 0, 2)), timeout_s=WAIT_S)
    assert agent.current() is None


@pytest.fixture
def shelf() -> Iterator[tuple[SnapshotShelf, str]]:
    """The shelf of node b, and where it is served."""
    shelf = SnapshotShelf("b")

    def add(server: grpc.Server) -> None:
        control_pb2_grpc.add_SnapshotsServicer_to_server(SnapshotServicer(shelf, KeptTurns("b")), server)

    server = Server("127.0.0.1:0", add)
    yield shelf, f"127.0.0.1:{server.port}"
    server.stop()


def fetch_from(address: str) -> bytes:
    """What node b kept of blocks 1 and 2."""
    deadline_s = time.monotonic() + WAIT_S
    (file,) = fetch(RUN, 0, [Source("b", 1, 3)], {"b": address}, deadline_s, lambda node, at: None)
    return bytes(file)


def test_snapshot_is_fetched_from_the_node_that_hosted_the_blocks(shelf: tuple[SnapshotShelf, str]) -> None:
    """Only what is kept of this run in this placement."""
    kept, address = shelf
    kept.put(RUN, 0, FakeSnapshot("b", {}))
    assert fetch_from(address) == b"b [1, 3)"
    kept.put(RUN, 1, FakeSnapshot("b", {}))
    with pytest.raises(FrameError, match="node b keeps no snapshot of run"):
        fetch_from(address)
