"""What a failed call to a node means."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
import pytest

from coordinator.drive.agent_calls import AgentCalls, node_error
from ringtune.errors import DataError, DeadlineError, PeerLostError, RingTuneError
from ringtune.rpc.connections import Server
from ringtune.rpc.statuses import abort, status_of_error
from ringtune.schedule.turns import turn_sequence
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.plans import make_plan

WAIT_S = 10.0
TURNS = tuple(turn_sequence(make_plan([("a", 0, 4)], ["a"]).course))


class Node(control_pb2_grpc.AgentServicer):
    """Answers each grant as it is told; ``None`` = well."""

    def __init__(self, answers: Sequence[grpc.StatusCode | RingTuneError | None]) -> None:
        self._answers = iter(answers)
        self.grants: queue.SimpleQueue[list[int]] = queue.SimpleQueue()

    def Grant(self, request: control_pb2.GrantRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Answer, and remember which turns came."""
        self.grants.put([turn.index for turn in request.turns])
        answer = next(self._answers, grpc.StatusCode.UNAVAILABLE)
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "the network is away")
        if isinstance(answer, RingTuneError):
            abort(context, answer)
        return control_pb2.Empty()


@contextmanager
def calls_to(node: Node, *, lease_s: float) -> Iterator[tuple[AgentCalls, Callable[[], RingTuneError]]]:
    """Calls to a node, and its first failure."""
    failures: queue.SimpleQueue[RingTuneError] = queue.SimpleQueue()
    server = Server("127.0.0.1:0", lambda made: control_pb2_grpc.add_AgentServicer_to_server(node, made))
    calls = AgentCalls("pi", server.address, "r", lease_s=lease_s, on_failure=lambda _, error: failures.put(error))
    try:
        yield calls, lambda: failures.get(timeout=WAIT_S)
    finally:
        calls.close()
        server.stop(0.0)


def test_grant_is_given_again_while_a_node_is_silent_and_stays_in_order() -> None:
    """A network that was away for two calls costs no run; the next grant comes after the one that was repeated."""
    away = grpc.StatusCode.UNAVAILABLE
    node = Node([away, grpc.StatusCode.DEADLINE_EXCEEDED, None, None])
    with calls_to(node, lease_s=60.0) as (calls, _):
        calls.grant(TURNS[:2])
        calls.grant(TURNS[2:3])
        assert [node.grants.get(timeout=WAIT_S) for _ in range(4)] == [[0, 1], [0, 1], [0, 1], [2]]


@pytest.mark.promise("6 every wait ends")
def test_grant_to_a_node_that_stays_silent_fails_after_the_lease() -> None:
    """As long as heartbeats may be missing and no longer; the node is named."""
    node = Node([])
    with calls_to(node, lease_s=0.5) as (calls, failure):
        calls.grant(TURNS)
        assert type(error := failure()) is PeerLostError
        assert "node pi at 127.0.0.1" in str(error)
    assert 2 <= node.grants.qsize() <= 4


def test_grant_that_the_node_refuses_is_not_repeated() -> None:
    """What the node itself says is its answer."""
    node = Node([DataError("train.csv has no rows")])
    with calls_to(node, lease_s=60.0) as (calls, failure):
        calls.grant(TURNS)
        assert type(failure()) is DataError
    assert node.grants.qsize() == 1


@pytest.mark.parametrize("status", ["UNAVAILABLE", "DEADLINE_EXCEEDED"])
def test_node_error_of_silence_is_a_lost_node(status: str) -> None:
    """If the node itself said nothing, it is lost; the name and address are in the message."""
    error = node_error(status, "socket closed", node="pi", address="10.0.0.2:1")
    assert type(error) is PeerLostError
    assert "node pi at 10.0.0.2:1" in str(error)


def test_node_error_keeps_what_the_node_said() -> None:
    """The node's own error keeps its class, and its name is added if it is missing."""
    said = status_of_error(DataError("train.csv has no rows"))
    error = node_error(said.name, said.details, node="pi", address="x:1")
    assert type(error) is DataError
    assert str(error) == "node pi: train.csv has no rows"
    waited = status_of_error(DeadlineError("node pi waited for b"))
    assert type(node_error(waited.name, waited.details, node="pi", address="x:1")) is DeadlineError


def test_node_error_names_its_node_though_a_path_has_the_same_letters() -> None:
    """A path that contains the node's name does not say which node it is."""
    said = status_of_error(DataError("/data/pi/train.csv has no rows"))
    assert str(node_error(said.name, said.details, node="pi", address="x:1")).startswith("node pi: ")
