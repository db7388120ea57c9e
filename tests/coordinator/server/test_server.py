"""The coordinator's service: members, refusals, where it may listen, what it says and serves."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from coordinator.client.submit import Client
from coordinator.run.members import Member, Registry
from coordinator.run.requests import RunRequest
from coordinator.screen.listing import node_table, nodes_json
from coordinator.server import server as servicer
from coordinator.server.coordinator import _MAX_LINES, Coordinator, ShutdownSignals, model_folder
from coordinator.server.run_record import RunRecord
from coordinator.server.run_store import RunStore
from coordinator.server.server import CoordinatorServer
from ringtune import __version__
from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    FrameError,
    IntegrityError,
    JobError,
    RingTuneError,
    StorageError,
    UsageError,
)
from ringtune.job.job import Job, Model
from ringtune.models.weights_by_digest import ModelSource, manifest_from_proto
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.transport.channels import open_channel
from ringtune.transport.credentials import Credentials, using_credentials
from ringtune.transport.endpoints import CLIENT_OPTIONS, MAX_STREAMS, WIRE
from ringtune.transport.open_calls import TokenBucket
from ringtune.transport.parties import COORDINATOR, Party
from ringtune.transport.status import error_of_status
from ringtune.v1 import control_pb2, control_pb2_grpc, trust_pb2, trust_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.support.fake_agents import job
from tests.support.model_folder import write_model
from tests.support.trust_parts import AUTHORITY, credentials_of

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


def joining(**changes: Any) -> control_pb2.JoinRequest:
    """A request to join as node a."""
    values: dict[str, Any] = {"node": "a", "address": "127.0.0.1:5", "instance": "one"}
    values |= {"version": __version__, "wire": WIRE} | changes
    return control_pb2.JoinRequest(has_data=True, memory_bytes=1 << 30, device="cpu", threads=2, **values)


def error_of(call: grpc.RpcError) -> RingTuneError:
    """The error that a failed call carries."""
    assert isinstance(call, grpc.Call)
    return error_of_status(call.code().name, call.details() or "", peer="coordinator")


def test_refused_calls_leave_nothing_behind(server: CoordinatorServer) -> None:
    """An error that was made once for all of them kept each call, until the connection had room for none."""
    with grpc.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
        stub = trust_pb2_grpc.MembershipStub(channel)
        for _ in range(MAX_STREAMS + 1):
            with pytest.raises(grpc.RpcError) as failed:
                stub.Renew(trust_pb2.RenewRequest(), timeout=CALL_S)
            assert "this coordinator gives no certificates" in str(error_of(failed.value))


def test_service_lists_who_joined(stub: control_pb2_grpc.CoordinatorStub, server: CoordinatorServer) -> None:
    """A member is listed with what it said and its last heartbeat, as a table and as JSON lines.

    What it counted as it started is listed; what only a job tells is no number.
    """
    counted = joining()
    counted.train_rows, counted.eval_rows, counted.cores = 120, 0, 4
    assert stub.Join(counted, timeout=CALL_S).lease_s == 10
    beat = control_pb2.HeartbeatRequest(node="a", instance="one", rss_bytes=4096)
    assert stub.Heartbeat(beat, timeout=CALL_S).known
    stub.Join(joining(node="b", address="127.0.0.1:6"), timeout=CALL_S)
    with Client(server.address) as client:
        members = client.nodes()
    first, second = nodes_json(members)
    assert (first["node"], first["state"], first["rss_bytes"], first["memory_bytes"]) == ("a", "idle", 4096, 1 << 30)
    assert (first["train_rows"], first["eval_rows"], first["cores"], first["version"]) == (120, 0, 4, __version__)
    assert (second["train_rows"], second["eval_rows"]) == (None, None)
    titles, a, b = (line.split() for line in node_table(members, "127.0.0.1:7070"))
    assert titles[3:9] == ["train", "rows", "eval", "rows", "version", "cores"]
    assert (a[:2], a[5:9]) == (["a", "idle"], ["120", "0", __version__, "4"])
    assert b[5:7] == ["some", "-"]
    nobody = node_table([], "10.0.0.1:7070")[0]
    assert "no node has joined" in nobody and "ringtune node --coordinator 10.0.0.1:7070 --insecure" in nobody


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


def test_connection_starts_no_thread_that_watches_it(
    server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread of gRPC raises where a command ends between two of its looks, and the end waits 0.2 s for it."""
    with open_channel(server.address) as channel:
        monkeypatch.setattr(type(channel), "subscribe", lambda *_: pytest.fail("the connection is watched"))
    Client(server.address).close()
    monkeypatch.setattr("coordinator.client.connection.CONNECT_S", 0.2)
    with pytest.raises(ConnectionFailedError):
        Client("127.0.0.1:9")


def test_service_refuses_strangers_clones_and_what_it_can_not_read(stub: control_pb2_grpc.CoordinatorStub) -> None:
    """After Leave a node is a stranger: its heartbeat says join again."""
    stub.Join(joining(), timeout=CALL_S)
    stub.Leave(control_pb2.LeaveRequest(node="a", instance="one"), timeout=CALL_S)
    beat = control_pb2.HeartbeatRequest(node="a", instance="one")
    assert not stub.Heartbeat(beat, timeout=CALL_S).known
    # Two living processes can't have one name
    stub.Join(joining(), timeout=CALL_S)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Join(joining(instance="two"), timeout=CALL_S)
    assert type(error_of(caught.value)) is BusyError
    # A node that still works for a run that is over is told to forget it
    with pytest.raises(grpc.RpcError) as caught:
        stub.Report(control_pb2.ReportRequest(run_id="r1", node="a"), timeout=CALL_S)
    assert type(error_of(caught.value)) is FrameError
    # The submitted job is read as strictly as a file
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Run(iter([control_pb2.RunRequest(job_toml="[modle]")]), timeout=CALL_S))
    assert type(error_of(caught.value)) is JobError


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"node": "../x"}, UsageError, "node name"),
        ({"address": "nowhere"}, UsageError, "is not HOST:PORT"),
        ({"address": "10.1.2.3:5"}, UsageError, "reaches beyond this machine"),
        ({"version": "9.9.0"}, UsageError, "install the same version"),
        ({"wire": 9}, UsageError, "messages are those of number 9"),
    ],
)
def test_service_refuses_to_let_in(
    stub: control_pb2_grpc.CoordinatorStub, changes: dict[str, Any], kind: type[RingTuneError], message: str
) -> None:
    """Names, addresses and versions that can't be used are refused with a reason."""
    with pytest.raises(grpc.RpcError) as caught:
        stub.Join(joining(**changes), timeout=CALL_S)
    error = error_of(caught.value)
    assert type(error) is kind
    assert message in str(error)


def test_server_refuses_a_busy_port_and_stays_on_this_machine(server: CoordinatorServer) -> None:
    """Two coordinators never share a port."""
    with pytest.raises(ConnectionFailedError, match="the port is in use"):
        CoordinatorServer(server.address, lease_s=10)
    # Without --insecure nothing listens beyond this machine
    with pytest.raises(UsageError, match="add --insecure"):
        CoordinatorServer("0.0.0.0:0", lease_s=10)


@pytest.mark.promise("6 every wait ends")
def test_client_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens is an error within the connect deadline."""
    monkeypatch.setattr("coordinator.client.connection.CONNECT_S", 0.2)
    with pytest.raises(ConnectionFailedError, match=r"no coordinator answers at 127\.0\.0\.1:9 .*--coordinator$"):
        Client("127.0.0.1:9")
    with (
        using_credentials(credentials_of("alice", "submitter")),
        pytest.raises(ConnectionFailedError, match="'ringtune doctor"),
    ):
        Client("127.0.0.1:9")  # its clock may refuse this certificate, which nothing here would tell


def test_upload_ends_with_its_evaluation_though_nobody_reads_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight followers that read nothing would keep everybody else from an evaluation."""
    service, folders, ended = servicer.CoordinatorServicer(cast(Any, None), None), list[Path](), threading.Event()
    driver = SimpleNamespace(join=ended.wait, events=lambda: iter([control_pb2.RunEvent(done=True)]))
    monkeypatch.setattr(servicer, "caller_of", lambda context: None)
    closed, end_upload = threading.Event(), service._end_upload

    def evaluate(inputs: object, folder: Callable[[], Path], caller: object) -> SimpleNamespace:
        folders.append(folder())
        return driver

    def ended_upload(who: str) -> None:
        end_upload(who)
        closed.set()

    monkeypatch.setattr(service, "_evaluate", evaluate)
    monkeypatch.setattr(service, "_end_upload", ended_upload)
    context: Any = SimpleNamespace(add_callback=lambda callback: True, cancel=lambda: None)
    assert next(service.Evaluate(iter(()), context)).done
    assert (service._uploads.total(), folders[0].is_dir()) == (1, True)
    ended.set()
    assert closed.wait(CALL_S)
    assert (service._uploads.total(), folders[0].is_dir()) == (0, False)


def test_service_takes_few_results_at_a_time(stub: control_pb2_grpc.CoordinatorStub) -> None:
    """Of uploads that begin and send no more eight are taken; heartbeats are answered meanwhile."""
    asked = control_pb2.EvaluateInput(request=control_pb2.EvaluateRequest(job_toml=job().to_toml()))

    over = threading.Event()

    def begun() -> Iterator[control_pb2.EvaluateInput]:
        yield asked
        over.wait(CALL_S)

    calls: list[Any] = [stub.Evaluate(begun(), timeout=CALL_S) for _ in range(30)]
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
    over.set()


def test_coordinator_answers_while_initial_values_are_written() -> None:
    """They take minutes on a slow disk: heartbeats go on, a second run is refused, and a full disk blocks nothing."""
    coordinator = Coordinator()
    coordinator.join(member())
    writes, go_on = threading.Event(), threading.Event()

    def begin(*_: object, **__: object) -> None:
        writes.set()
        assert go_on.wait(CALL_S)
        raise StorageError("the disk is full")

    store: Any = SimpleNamespace(begin=begin)
    coordinator.kept = store
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(coordinator.run, RunRequest(job=job(), num_nodes=1))
        assert writes.wait(CALL_S)
        with ThreadPoolExecutor(1) as beats:
            beat = beats.submit(coordinator.heartbeat, "pi", "one", 0).result(CALL_S)
        with pytest.raises(BusyError, match="begins another run already"):
            coordinator.run(RunRequest(job=job(), num_nodes=1))
        go_on.set()
        with pytest.raises(StorageError, match="the disk is full"):
            run.result(CALL_S)
    assert beat == (True, "")
    with pytest.raises(StorageError):
        coordinator.run(RunRequest(job=job(), num_nodes=1))
    assert coordinator.stop("the test ends", CALL_S)


def test_run_that_is_stored_and_can_not_begin_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would end it: its followers would wait for ever, and the next start would resume it."""
    coordinator = Coordinator()
    coordinator.kept = RunStore(tmp_path)
    coordinator.join(member())

    def fails(*_: object) -> str:
        raise IntegrityError("it can't be read: Input/output error; check the disk")

    monkeypatch.setattr(FilePieces, "_read", fails)
    no_tensors = (2).to_bytes(8, "little") + b"{}"
    with pytest.raises(IntegrityError, match="can't be read: Input/output error; check the disk"):
        coordinator.run(RunRequest(job=job(), num_nodes=1, initial=Pieces.of(no_tensors)))
    assert coordinator.kept.records() == {} and not [*(tmp_path / "runs").iterdir()]
    coordinator.kept.close()


RUN = "r20260101-000000-00000000"
OF_BOB = "r20260101-000000-00000001"
PRUNED = "r20260101-000000-00000002"  # which that of bob resumes
FORGOTTEN = "r20260101-000000-00000003"


def refusals(stub: control_pb2_grpc.CoordinatorStub, run_id: str) -> list[str]:
    """What each call about a run is answered with."""
    resume = control_pb2.RunRequest(job_toml=run_id)
    calls: list[Callable[[], object]] = [
        lambda: list(stub.Follow(control_pb2.FollowRequest(run_id=run_id), timeout=CALL_S)),
        lambda: list(stub.Run(iter([resume]), timeout=CALL_S)),
        lambda: stub.Fetched(control_pb2.RunRef(run_id=run_id), timeout=CALL_S),
        lambda: stub.Noted(control_pb2.CheckpointNoted(run_id=run_id, step=1), timeout=CALL_S),
        lambda: stub.Drain(control_pb2.DrainRequest(run_id=run_id), timeout=CALL_S),
    ]
    found = []
    for each in calls:
        try:
            each()
            found.append("")
        except grpc.RpcError as error:
            found.append(str(error_of(error)))
    return found


def test_service_shows_and_gives_users_their_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored ones, and a plan that is made right now; an administrator has all of them."""

    def resumed(messages: Iterator[control_pb2.RunRequest], folder: object) -> RunRequest:
        run_id = next(messages).job_toml
        resume: Any = SimpleNamespace(run_id=run_id) if run_id else None
        return RunRequest(job=job(), plan_only=True, num_nodes=9, resume=resume)

    monkeypatch.setattr(servicer, "receive_run_request", resumed)
    store = RunStore(tmp_path)
    for run_id, owner, first in ((RUN, "alice", RUN), (OF_BOB, "bob", PRUNED)):
        about = {"model": "m", "method": "all", "submitted_by": "", "started_unix_s": time.time()}
        done = RunRecord(run_id=run_id, first_run=first, owner=owner, **about)  # type: ignore[arg-type]
        store.begin(done, on_saved=lambda step: None)(control_pb2.RunEvent(done=True))
    users = {}
    for name in ("alice", "bob", "root"):
        party = Party("submitter", name)
        users[name] = Credentials(AUTHORITY.identity(party, time.time(), has_own_runs_only=name != "root"))
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        with using_credentials(credentials_of("coordinator", "coordinator")):
            server = stack.enter_context(CoordinatorServer("127.0.0.1:0", lease_s=10))
        server.coordinator.kept = store
        stubs = {}
        for name, who in users.items():
            with using_credentials(who):
                channel = stack.enter_context(open_channel(server.address, peer=COORDINATOR))
            stubs[name] = control_pb2_grpc.CoordinatorStub(channel)

        def listed(name: str) -> list[str]:
            runs = stubs[name].Runs(control_pb2.Empty(), timeout=CALL_S).runs
            return [RunRecord.parse(run.record_json).run_id for run in runs]

        assert [listed(name) for name in users] == [[RUN], [OF_BOB], [RUN, OF_BOB]]
        plan: Any = stubs["bob"].Run(iter([control_pb2.RunRequest()]), timeout=CALL_S)
        planned = next(event.run_id for event in plan if event.run_id)
        for run_id in (OF_BOB, PRUNED, planned):
            told = refusals(stubs["alice"], run_id)
            assert told == [f"run {run_id} is of bob; ask them, or an administrator"] * 5
        driver = server.coordinator._driver
        assert driver is not None
        driver.board.awaits(["pi"], "it has the rows", math.inf)
        courses = [stubs[name].Status(control_pb2.Empty(), timeout=CALL_S).run for name in users]
        assert [(run.run_id, list(run.awaited)) for run in courses] == [(planned, []), *[(planned, ["pi"])] * 2]
        guest = credentials_of("eval-00000000", "node")  # which any user may invite
        with using_credentials(guest), open_channel(server.address, peer=COORDINATOR) as of_guest:
            run = control_pb2_grpc.CoordinatorStub(of_guest).Status(control_pb2.Empty(), timeout=CALL_S).run
        assert (run.run_id, list(run.awaited)) == (planned, [])
        for name, run_id in (("alice", RUN), ("root", OF_BOB), ("bob", planned)):
            assert not [why for why in refusals(stubs[name], run_id) if " is of " in why]
        request, after, before = RunRequest(job=job(), plan_only=True, num_nodes=9), planned, driver
        for _ in range(2):  # the coordinator takes the run up twice, as B and C; none of them is stored
            before = server.coordinator.run(request, takes_up=after, owner="bob", replaces=before)
            after = before.run_id
        for run_id in (planned, after):
            assert refusals(stubs["alice"], run_id) == [f"run {run_id} is of bob; ask them, or an administrator"] * 5
            assert not [why for name in ("bob", "root") for why in refusals(stubs[name], run_id) if " is of " in why]
        of_nobody = {name: refusals(stubs[name], FORGOTTEN)[1] for name in users}
        refused = [name for name, why in of_nobody.items() if why.endswith("ask an administrator to resume it")]
        assert refused == ["alice", "bob"], "nodes keep the state of a run for longer than its coordinator knows it"
        membership = trust_pb2_grpc.MembershipStub(channel)
        membership.Remove(trust_pb2.RemoveRequest(node="bob", role="submitter"), timeout=CALL_S)
        assert [listed(name) for name in users] == [[RUN], [], [RUN, OF_BOB]]  # a later user bob is another one
        assert RunRecord.parse((tmp_path / "runs" / OF_BOB / "run.json").read_text()).owner == ""
        for each in server.coordinator._drivers:  # else the server would wait for those that were replaced
            each.stop("the test ends")


TIMEOUT_S = 30.0


def test_weights_of_the_model_of_a_run_are_served_and_no_others(server: CoordinatorServer, tmp_path: Path) -> None:
    """The bytes of the folder, by digest, under the id of the run.

    An unknown run, a run whose model is elsewhere, and a digest that is not the model's: each its own status.
    """
    folder, request = write_model(tmp_path / "m"), weights_pb2.ManifestRequest(run_id=RUN)
    with grpc.insecure_channel(server.address) as channel:
        stub = weights_pb2_grpc.WeightsStub(channel)
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Manifest(request, timeout=TIMEOUT_S)
        server.coordinator.offers.put(RUN, model_folder(Job(model=Model(path=str(tmp_path / "nowhere")))))
        with pytest.raises(grpc.RpcError) as elsewhere:
            stub.Manifest(request, timeout=TIMEOUT_S)
        server.coordinator.offers.put(RUN, model_folder(Job(model=Model(path=str(folder)))))
        manifest = manifest_from_proto(stub.Manifest(request, timeout=TIMEOUT_S))
        assert manifest == ModelSource(folder).manifest
        pieces = [weights_pb2.Piece(sha256=bytes.fromhex(manifest.files[0].sha256), offset=3)]
        chunks = stub.Fetch(weights_pb2.FetchRequest(run_id=RUN, pieces=pieces), timeout=TIMEOUT_S)
        assert b"".join(chunk.data for chunk in chunks) == (folder / "config.json").read_bytes()[3:]
        fetch = weights_pb2.FetchRequest(run_id=RUN, pieces=[weights_pb2.Piece(sha256=bytes(32))])
        with pytest.raises(grpc.RpcError) as foreign:
            list(stub.Fetch(fetch, timeout=TIMEOUT_S))
    assert [caught.value.code() for caught in (unknown, elsewhere, foreign)] == [
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DATA_LOSS,
    ]


def member(node: str = "pi", **changes: object) -> Member:
    """A node of another process each time."""
    values = {
        "address": "127.0.0.1:5",
        "instance": "one",
        "version": __version__,
        "threads": 4,
        "memory_bytes": 3 << 30,
    }
    return Member(node=node, **{**values, **changes})  # type: ignore[arg-type]


def test_registry_lists_a_lost_member_once_until_it_joins_again() -> None:
    """A lease that ends is news once; after a restart it can be news again."""
    registry = Registry(lease_s=10.0)
    registry.join(member("a"), 0.0)
    registry.join(member("b"), 5.0)
    assert registry.newly_lost(9.0) == ()
    assert [entry.node for entry in registry.newly_lost(11.0)] == ["a"]
    assert [entry.node for entry in registry.newly_lost(16.0)] == ["b"]
    assert registry.newly_lost(17.0) == ()
    registry.join(member("a", instance="two"), 18.0)
    assert registry.newly_lost(19.0) == ()
    assert [entry.node for entry in registry.newly_lost(29.0)] == ["a"]


def test_coordinator_says_who_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a node has; one that is told twice that it left is a stranger."""
    said: list[str] = []
    now_s = [100.0]
    coordinator = Coordinator(lease_s=10.0)
    monkeypatch.setattr(coordinator, "_now_s", lambda: now_s[0])
    monkeypatch.setattr(coordinator, "_lines", TokenBucket(_MAX_LINES, 1.0, now_s=lambda: 0.0))  # no minute passes
    coordinator.say = said.append
    coordinator.join(member(has_data=True))
    for now_s[0] in (105.0, 111.0, 112.0):
        coordinator.report_lost_members()
    coordinator.leave("pi", "one")
    coordinator.leave("pi", "one")
    for _ in range(100):  # a node that does nothing else fills no log
        coordinator.join(member("noisy"))
        coordinator.leave("noisy", "one")
    assert sum("noisy" in line for line in said) == 20
    said = [line for line in said if "noisy" not in line]
    assert said[0] == "node pi joined from 127.0.0.1:5: 4 threads, 3,072 MiB, cpu, owns rows"
    assert said[1:] == ["node pi is lost: last contact 11.0 s ago", "node pi left"]


def gone(_line: str) -> None:
    """A terminal that was closed: every write to it fails."""
    raise OSError(5, "Input/output error")


def test_ending_drains_the_run_though_the_terminal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP says that nobody can be told any more; the run gets its checkpoint, and a node joins, all the same."""
    coordinator = Coordinator()
    coordinator.say = gone
    coordinator.join(member())
    assert [entry.node for entry in coordinator.living()] == ["pi"]
    drained: list[str] = []
    monkeypatch.setattr(coordinator, "driven", lambda: "" if drained else RUN)
    driver = SimpleNamespace(drain=drained.append)
    monkeypatch.setattr(coordinator, "driver_of", {RUN: driver}.__getitem__)
    with ShutdownSignals() as ending:
        os.kill(os.getpid(), signal.SIGHUP)
        assert ending.wait()
        ending.save(coordinator)
    assert drained == ["the coordinator was stopped"]


def test_signal_is_taken_while_the_main_thread_holds_the_lock_of_what_it_waits_for() -> None:
    """It does so for a moment before and after it sleeps; a handler that waits for the lock would never return."""
    with ShutdownSignals() as ending:
        with ending._asked._cond:  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGTERM)
        assert ending._asked.wait(CALL_S) and ending.wait()
