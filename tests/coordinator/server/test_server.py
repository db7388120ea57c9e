"""The coordinator's service: members, refusals, and where it may listen."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from coordinator.client.submit import Client
from coordinator.screen.listing import node_lines, node_table
from coordinator.server import server as servicer
from coordinator.server.server import CoordinatorServer
from ringtune import __version__
from ringtune.errors import BusyError, ConnectionFailedError, FrameError, JobError, RingTuneError, UsageError
from ringtune.transport.endpoints import CLIENT_OPTIONS
from ringtune.transport.speaker import speaking_as
from ringtune.transport.status import error_of_status
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.trust_parts import speaker_of

CALL_S = 30.0


@pytest.fixture
def server() -> Iterator[CoordinatorServer]:
    """A coordinator with a lease of ten seconds."""
    with CoordinatorServer("127.0.0.1:0", lease_s=10) as server:
        yield server


@pytest.fixture
def stub(server: CoordinatorServer) -> Iterator[control_pb2_grpc.CoordinatorStub]:
    """What an agent or a user has."""
    channel = grpc.insecure_channel(server.address, options=CLIENT_OPTIONS)
    yield control_pb2_grpc.CoordinatorStub(channel)
    channel.close()


def joining(**changes: str) -> control_pb2.JoinRequest:
    """A request to join as node a."""
    values: dict[str, Any] = {"node": "a", "address": "127.0.0.1:5", "version": __version__, "instance": "one"}
    values |= changes
    return control_pb2.JoinRequest(has_data=True, memory_bytes=1 << 30, device="cpu", threads=2, **values)


def error_of(call: grpc.RpcError) -> RingTuneError:
    """The error that a failed call carries."""
    assert isinstance(call, grpc.Call)
    return error_of_status(call.code().name, call.details() or "", peer="coordinator")


def test_service_lists_who_joined(stub: control_pb2_grpc.CoordinatorStub, server: CoordinatorServer) -> None:
    """A member is listed with what it said and its last heartbeat, as a table and as JSON lines."""
    assert stub.Join(joining(), timeout=CALL_S).lease_s == 10
    beat = control_pb2.HeartbeatRequest(node="a", instance="one", rss_bytes=4096)
    assert stub.Heartbeat(beat, timeout=CALL_S).known
    with Client(server.address) as client:
        members = client.nodes()
    line = json.loads(node_lines(members)[0])
    assert (line["node"], line["state"], line["rss_bytes"], line["memory_bytes"]) == ("a", "idle", 4096, 1 << 30)
    assert node_table(members, "127.0.0.1:7070")[1].split()[:2] == ["a", "idle"]
    assert "no node has joined" in node_table([], "127.0.0.1:7070")[0]


def test_service_lists_rows_version_and_cores(
    stub: control_pb2_grpc.CoordinatorStub, server: CoordinatorServer
) -> None:
    """What a node counted as it started is listed; what only a job tells is no number."""
    counted = joining()
    counted.train_rows, counted.eval_rows, counted.cores = 120, 0, 4
    stub.Join(counted, timeout=CALL_S)
    stub.Join(joining(node="b", address="127.0.0.1:6"), timeout=CALL_S)
    with Client(server.address) as client:
        members = client.nodes()
    first, second = (json.loads(line) for line in node_lines(members))
    assert (first["train_rows"], first["eval_rows"], first["cores"], first["version"]) == (120, 0, 4, __version__)
    assert (second["train_rows"], second["eval_rows"]) == (None, None)
    titles, a, b = (line.split() for line in node_table(members, "127.0.0.1:7070"))
    assert titles[3:9] == ["train", "rows", "eval", "rows", "version", "cores"]
    assert a[5:9] == ["120", "0", __version__, "4"]
    assert b[5:7] == ["some", "-"]
    assert "ringtune node --coordinator 10.0.0.1:7070 --insecure" in node_table([], "10.0.0.1:7070")[0]


def test_service_of_another_version_is_refused_by_every_command(
    server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command says so as it connects, whatever it then would ask; a later patch of the same version is fine."""
    monkeypatch.setattr(servicer, "__version__", "9.9.0")
    with pytest.raises(UsageError, match=r"coordinator .* runs ringtune 9\.9\.0, this is .*install the same"):
        Client(server.address)
    major, minor = __version__.split(".")[:2]
    monkeypatch.setattr(servicer, "__version__", f"{major}.{minor}.999")
    Client(server.address).close()


def test_service_forgets_who_leaves(stub: control_pb2_grpc.CoordinatorStub) -> None:
    """After Leave a node is a stranger: its heartbeat says join again."""
    stub.Join(joining(), timeout=CALL_S)
    stub.Leave(control_pb2.LeaveRequest(node="a", instance="one"), timeout=CALL_S)
    beat = control_pb2.HeartbeatRequest(node="a", instance="one")
    assert not stub.Heartbeat(beat, timeout=CALL_S).known


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"node": "../x"}, UsageError, "node name"),
        ({"address": "nowhere"}, UsageError, "is not HOST:PORT"),
        ({"address": "10.1.2.3:5"}, UsageError, "reaches beyond this machine"),
        ({"version": "9.9.0"}, UsageError, "install the same version"),
    ],
)
def test_service_refuses_to_let_in(
    stub: control_pb2_grpc.CoordinatorStub, changes: dict[str, str], kind: type[RingTuneError], message: str
) -> None:
    """Names, addresses and versions that can't be used are refused with a reason."""
    with pytest.raises(grpc.RpcError) as caught:
        stub.Join(joining(**changes), timeout=CALL_S)
    error = error_of(caught.value)
    assert type(error) is kind
    assert message in str(error)


def test_service_refuses_a_clone(stub: control_pb2_grpc.CoordinatorStub) -> None:
    """Two living processes can't have one name."""
    stub.Join(joining(), timeout=CALL_S)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Join(joining(instance="two"), timeout=CALL_S)
    assert type(error_of(caught.value)) is BusyError


def test_service_refuses_reports_of_another_run(stub: control_pb2_grpc.CoordinatorStub) -> None:
    """A node that still works for a run that is over is told to forget it."""
    with pytest.raises(grpc.RpcError) as caught:
        stub.Report(control_pb2.ReportRequest(run_id="r1", node="a"), timeout=CALL_S)
    assert type(error_of(caught.value)) is FrameError


def test_service_refuses_a_job_that_is_not_readable(stub: control_pb2_grpc.CoordinatorStub) -> None:
    """The submitted job is read as strictly as a file."""
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Run(control_pb2.RunRequest(job_toml="[modle]"), timeout=CALL_S))
    assert type(error_of(caught.value)) is JobError


def test_server_refuses_a_busy_port(server: CoordinatorServer) -> None:
    """Two coordinators never share a port."""
    with pytest.raises(ConnectionFailedError, match="the port is in use"):
        CoordinatorServer(server.address, lease_s=10)


def test_server_stays_on_this_machine() -> None:
    """Without --insecure nothing listens beyond this machine."""
    with pytest.raises(UsageError, match="add --insecure"):
        CoordinatorServer("0.0.0.0:0", lease_s=10)


@pytest.mark.promise("6 every wait ends")
def test_client_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens is an error within the connect deadline."""
    monkeypatch.setattr("coordinator.client.connection.CONNECT_S", 0.2)
    with pytest.raises(ConnectionFailedError, match=r"no coordinator answers at 127\.0\.0\.1:9 .*--coordinator$"):
        Client("127.0.0.1:9")
    with speaking_as(speaker_of("alice", "submitter")), pytest.raises(ConnectionFailedError, match="'ringtune doctor"):
        Client("127.0.0.1:9")  # its clock may refuse this certificate, which nothing here would tell


def test_service_takes_few_results_at_a_time(stub: control_pb2_grpc.CoordinatorStub) -> None:
    """Who opens uploads and sends nothing keeps at most eight workers; heartbeats are answered meanwhile."""
    calls: list[Any] = [stub.Evaluate(iter(queue.SimpleQueue[Any]().get, None), timeout=CALL_S) for _ in range(30)]
    ended = threading.Semaphore(0)
    for call in calls:
        if not call.add_callback(ended.release):  # it has ended already
            ended.release()
    assert all(ended.acquire(timeout=CALL_S) for _ in range(30 - servicer._MAX_UPLOADS))
    codes = [call.code() for call in calls if not call.is_active()]
    assert codes == [grpc.StatusCode.ALREADY_EXISTS] * (30 - servicer._MAX_UPLOADS)
    stub.Join(joining(), timeout=CALL_S)
    assert stub.Heartbeat(control_pb2.HeartbeatRequest(node="a", instance="one"), timeout=CALL_S).known
    for call in calls:
        call.cancel()
