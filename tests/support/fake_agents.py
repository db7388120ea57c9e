"""Agents without torch: they answer the coordinator over real gRPC, and their "training" is instant."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy
from safetensors.numpy import save

from coordinator.client.follow import Outcome
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.run.events import EventSink
from coordinator.run.requests import RunRequest
from coordinator.run.run_text import is_step
from coordinator.screen.progress import Progress
from coordinator.server.coordinator import Coordinator
from coordinator.server.server import CoordinatorServer
from ringtune import __version__
from ringtune.costs.profile import NodeFacts
from ringtune.errors import FrameError, RingTuneError
from ringtune.job.job import Job, parse_job
from ringtune.schedule.actions import Op
from ringtune.schedule.lowering import legs
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, items
from ringtune.storage.chunks import cut_pieces
from ringtune.transport.codecs import GrantReader, scores_to_proto
from ringtune.transport.endpoints import CLIENT_OPTIONS, SERVER_OPTIONS, WIRE
from ringtune.transport.status import abort
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.choosing import DrawnTables
from tests.support.profiles import small_model

CALL_S = 30.0
"""The longest wait for what comes in milliseconds: a busy machine is no failure."""
LEASE_S = 600.0
"""Of members: fake agents send no heartbeats, so a test that stands still for so long would lose its nodes."""
MODEL = small_model(
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    vocab_size=32,
    embedding_bytes=500,
    head_bytes=100,
    adapter_block_bytes=12,
    digest="ab" * 32,
    head_class_bytes=0,
    pair_token_bytes=4 * (8 + 8),
)
JOB_TEXT = """
[model]
path = "model"
[train]
batch_size = 4
microbatches = 2
max_length = 8
local_iterations = 2
rounds = 2
[placement]
replicas = "never"
[recovery]
copies = "none"
[runtime]
wait_s = 20.0
lease_s = 600.0
"""


def job(**changes: object) -> Job:
    """A small job; keys with ``__`` for the dot, e.g. ``train__rounds=1``."""
    wanted = parse_job(JOB_TEXT, source="test")
    return wanted.with_overrides({key.replace("__", "."): value for key, value in changes.items()})


def facts(node: str, *, rows: int = 10, memory_bytes: int = 1 << 30, **changes: Any) -> NodeFacts:
    """Facts of a node with a tiny model and measured times."""
    values: dict[str, Any] = {
        "node": node,
        "train_rows": rows,
        "eval_rows": 5 if rows else 0,
        "labels": ("neg", "pos") if rows else (),
        "eval_labels": ("neg", "pos") if rows else (),
        "memory_bytes": memory_bytes,
        "threads": 1,
        "device": "cpu",
        "block_forward_s": 0.001,
        "block_graph_s": 0.0011,
        "block_backward_s": 0.0012,
        "activation_token_bytes": 250,
        "model": MODEL,
    }
    return NodeFacts(**{**values, **changes})


NO_TIMES: dict[str, Any] = {"block_forward_s": 0.0, "block_graph_s": 0.0, "block_backward_s": 0.0}


def _one_megabyte_a_second(request: control_pb2.MeasureLinkRequest) -> control_pb2.MeasureLinkReply:
    return control_pb2.MeasureLinkReply(
        rate_bytes_per_s=1e6, rate_low_bytes_per_s=9e5, rate_high_bytes_per_s=1.1e6, latency_s=0.001, samples=3
    )


def block_tensor(block: int) -> str:
    """The name of the one tensor that a fake node trains in a block."""
    return f"bert.encoder.layer.{block}.x"


def shard_digest(step: int) -> str:
    """The digest of every fake shard of a step."""
    return f"{step:064x}"


class FakeAgent(control_pb2_grpc.AgentServicer):
    """One node: does at once what it is told, and remembers it.

    Args:
        node: its name.
        coordinator: address to join and report to.
        rows: training rows; 0 = no owner.
        fails_at: ``inspect``, ``prepare``, ``grant``, ``collect`` or ``report`` -> the error that is raised there.
        on_grant: called with each grant's turns instead of reporting them done.
        facts_changes: changes to its facts.
        damaged: steps of which its shard is damaged.
        has_copies: whether it has copies of every block of each checkpoint that it is asked for.
        on_link: answers when it shall measure a link; 1 MB/s by default.
        host: of its address; another one is another machine.

    Attributes:
        inspected: what it was last asked about itself.
        on_inspect: called while it is asked.
        loss_of: mean loss after so many steps.
        drift: what its tensors gain in a step.
        wire: number of the messages that it knows.
    """

    def __init__(
        self,
        node: str,
        coordinator: str,
        *,
        rows: int = 10,
        fails_at: dict[str, RingTuneError] | None = None,
        on_grant: Callable[[FakeAgent, list[Turn]], None] | None = None,
        facts_changes: dict[str, Any] | None = None,
        damaged: Collection[int] = (),
        has_copies: bool = False,
        on_link: Callable[[control_pb2.MeasureLinkRequest], control_pb2.MeasureLinkReply] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.node = node
        self.plan: Plan | None = None
        self.grants: GrantReader | None = None
        self.run_id = ""
        self.log: list[str] = []
        self.loaded: dict[str, bytes] = {}
        self.released = threading.Event()
        self.is_finished = False
        self.granted = threading.Event()
        self._damaged = frozenset(damaged)
        self._has_copies = has_copies
        self.prepared = control_pb2.PrepareRequest()
        self.inspected = control_pb2.InspectRequest()
        self.on_inspect: Callable[[], object] = lambda: None
        self.loss_of: Callable[[int], float] = lambda step: 0.5
        self.drift, self._steps_done = 0, 0
        self._on_link = on_link or _one_megabyte_a_second
        self.keeps_from: list[int] = []
        self._numbers = itertools.count(1)
        self._at_work = threading.Condition()
        self._serves, self._num_grants = "", 0
        self._rows = rows
        self._fails_at = fails_at or {}
        self._on_grant = on_grant
        self._facts_changes = facts_changes or {}
        self._pool = ThreadPoolExecutor(max_workers=8)
        self._server = grpc.server(self._pool, options=SERVER_OPTIONS)
        control_pb2_grpc.add_AgentServicer_to_server(self, self._server)
        self.address = self.instance = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        self._server.start()
        self._channel = grpc.insecure_channel(coordinator, options=CLIENT_OPTIONS)
        self.stub = control_pb2_grpc.CoordinatorStub(self._channel)

    def join(self, instance: str = "") -> None:
        """Become a member, as this process or another one of the same name."""
        self.instance = instance or self.address
        self.stub.Join(
            control_pb2.JoinRequest(
                node=self.node,
                address=self.address,
                version=__version__,
                has_data=self._rows > 0,
                memory_bytes=1 << 30,
                device="cpu",
                threads=1,
                system="test",
                instance=self.instance,
                wire=WIRE,
            ),
            timeout=CALL_S,
        )

    def close(self) -> None:
        """Stop serving."""
        self._channel.close()
        self._server.stop(None).wait(CALL_S)
        self._pool.shutdown()

    # ---- what the coordinator calls ---------------------------------------------------------------

    def Inspect(self, request: Any, context: grpc.ServicerContext) -> control_pb2.InspectReply:
        """Made-up facts, once nothing is done any more for another run."""
        self._enter("inspect", context)
        with self._at_work:
            assert self._at_work.wait_for(lambda: not self._num_grants or self._serves == request.run_id, CALL_S)
            self._serves = self.run_id = request.run_id
        self.inspected = request
        self.on_inspect()
        times = {} if request.measure else NO_TIMES
        made = facts(**{"node": self.node, "rows": self._rows, **self._facts_changes, **times})
        states = [
            control_pb2.ShardState(
                step=shard.step,
                problem=f"node {self.node}: shard step-{shard.step} is damaged" if shard.step in self._damaged else "",
            )
            for shard in request.shards
        ]
        copies = [
            control_pb2.SavedPart(
                step=shard.step, attempt=request.checkpoint_run, blocks=range(made.model.num_blocks), has_head=True
            )
            for shard in (request.shards if self._has_copies else ())
        ]
        return control_pb2.InspectReply(facts_json=json.dumps(made.to_message()), shards=states, saved=copies)

    def MeasureLink(self, request: Any, context: grpc.ServicerContext) -> control_pb2.MeasureLinkReply:
        """A made-up rate."""
        self._enter(f"{'load' if request.computing_s else 'link'} {request.target}", context)
        return self._on_link(request)

    def Prepare(self, request: Any, context: grpc.ServicerContext) -> control_pb2.PrepareReply:
        """Remember the plan."""
        self._enter("prepare", context)
        self.prepared = request
        self._numbers = itertools.count(1)
        self.plan = Plan.from_json(json.loads(request.plan_json))
        self.grants = GrantReader(self.plan.course)
        return control_pb2.PrepareReply(hosted_bytes=1234)

    def Load(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> control_pb2.Empty:
        """Keep the files."""
        self._enter("load", context)
        for message in request_iterator:
            chunk = message.file
            self.loaded[chunk.path] = self.loaded.get(chunk.path, b"") + chunk.chunk
        return control_pb2.Empty()

    def Grant(self, request: Any, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Report the turns as done, or do what the test wants; a grant of a run that is over is refused."""
        with self._working(request.run_id, context):
            self._enter("grant", context)
            assert self.grants is not None
            turns = list(self.grants.turns(request))
            self.keeps_from.append(request.keep_from_step)
            self.granted.set()
            if self._on_grant is not None:
                self._on_grant(self, turns)
            else:
                self.stub.Report(self.report(turns), timeout=CALL_S)
        return control_pb2.Empty()

    def Collect(self, request: Any, context: grpc.ServicerContext) -> Iterator[control_pb2.FileChunk]:
        """A tensor for each hosted block, and the head if it is here."""
        self._enter("collect", context)
        for name, content in self.files(with_head=request.with_head).items():
            yield from cut_pieces(name, [content])

    def Release(self, request: Any, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Remember that the run is over."""
        with self._at_work:
            self._serves = "" if self._serves == request.run_id else self._serves
        self.log.append("release")
        self.is_finished = request.is_finished
        self.released.set()
        return control_pb2.Empty()

    # ---- what a node would have done --------------------------------------------------------------

    def report(self, turns: list[Turn]) -> control_pb2.ReportRequest:
        """A report that says that these turns are done: a step a second, 10 bytes for every send."""
        assert self.plan is not None
        request = control_pb2.ReportRequest(run_id=self.run_id, node=self.node, number=next(self._numbers))
        request.instance = self.instance
        for turn in turns:
            is_checkpoint = turn.kind is StepKind.CHECKPOINT
            if is_checkpoint:
                request.saved.add(turn=turn.index, step=turn.first_step, sha256=shard_digest(turn.first_step), bytes=9)
            for item in () if is_checkpoint else items(self.plan.course, turn):
                for leg in itertools.chain.from_iterable(legs(turn.settled(self.plan), item, self.node)):
                    if leg.op is Op.SEND:
                        request.traffic.add(seq=item.seq, target=leg.peer, payload=leg.payload, bytes=10)
                if item.owner == self.node:
                    step = request.steps.add(seq=item.seq, step=item.step, kind=item.kind.value)
                    step.at_unix_s = 1e9 + item.seq
                    for name, value in (
                        ("loss_sum", self.loss_of(item.step) * item.rows),
                        ("count", item.rows),
                        ("correct", 1.0),
                    ):
                        step.values.add(name=name, value=value)
                    request.spans.add(
                        action=f"H{item.seq}.0", start_unix_s=1e9 + item.seq, end_unix_s=1e9 + item.seq + 0.25
                    )
            request.scores.extend(
                scores_to_proto(turn.index, DrawnTables(self.plan).scores(self.plan, self.node, turn))
            )
            request.turns_done.append(turn.index)
            self._steps_done = turn.end_step
        return request

    def files(self, *, with_head: bool) -> dict[str, bytes]:
        """What Collect sends."""
        assert self.plan is not None
        piece, gained = self.plan.slice_of(self.node), self.drift * self._steps_done
        blocks = range(piece.start, piece.stop)
        tensors = {block_tensor(block): numpy.full(3, block + gained, dtype=numpy.float32) for block in blocks}
        figures = {"peak_rss_bytes": 7, "hosted_bytes": 1234, "cpu_s": 0.5, "peak_versions": 1, "peak_version_bytes": 0}
        found = {"adapter_config.json": b"{}", "totals.json": json.dumps(figures).encode()}
        users = self.plan.course.user_sets
        for number, user in enumerate(users):
            own = {name: value + 10 * number for name, value in tensors.items()}
            found[f"users/{user}/adapter.safetensors"] = save(own)
        if not users:
            found["adapter.safetensors"] = save(tensors)
        if with_head:
            found |= {
                "head_config.json": b"{}",
                "model_head.safetensors": save({"head": numpy.ones(25, dtype=numpy.float32)}),
            }
        return found

    @contextlib.contextmanager
    def _working(self, run_id: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Do something for a run; a call that comes late, behind the release or for an earlier run, is refused."""
        with self._at_work:
            if run_id != self._serves:
                abort(context, FrameError(f"node {self.node} has no run {run_id}; prepare it first"))
            self._num_grants += 1
        try:
            yield
        finally:
            with self._at_work:
                self._num_grants -= 1
                self._at_work.notify_all()

    def _enter(self, what: str, context: grpc.ServicerContext) -> None:
        self.log.append(what)
        error = self._fails_at.get(what)
        if error is not None:
            abort(context, error)


def end_lease(coordinator: Coordinator, node: str) -> None:
    """Let the lease of a node be over, as if nothing had come from it for so long."""
    with coordinator._lock:
        registry, now_s = coordinator._registry, coordinator._now_s()
        if node in registry._members:
            registry._members[node] = dataclasses.replace(registry._members[node], seen_at_s=now_s - registry.lease_s)


class FakeCluster:
    """A coordinator with fake agents, over real sockets, in one process."""

    def __init__(self, *names: str, lease_s: float = LEASE_S, agents: dict[str, dict[str, Any]] | None = None) -> None:
        self.server = CoordinatorServer("127.0.0.1:0", lease_s=lease_s)
        options = agents or {}
        self.agents = {name: FakeAgent(name, self.server.address, **options.get(name, {})) for name in names}

    def __enter__(self) -> FakeCluster:
        """Serve and join."""
        self.server.__enter__()
        for agent in self.agents.values():
            agent.join()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all."""
        self.server.__exit__(None, None, None)
        for agent in self.agents.values():
            agent.close()


def steps_of(path: Path) -> list[dict[str, Any]]:
    """The lines of steps in a metrics.jsonl."""
    return [line for line in read_lines(path) if is_step(line)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Notes(Progress):
    """Remembers what a user is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.states: list[str] = []

    def state(self, state: str) -> None:
        """Remember it."""
        self.states.append(state)

    def note(self, text: str) -> None:
        """Remember it."""
        self.texts.append(text)


def run(cluster: FakeCluster, folder: Path | None = None, *, num_nodes: int = 2, **changes: object) -> Outcome:
    """Submit the small job and follow it to its end."""
    join_s = 0.5 if folder is None else CALL_S
    return submit(cluster, RunRequest(job=job(**changes), num_nodes=num_nodes, join_s=join_s), folder)


def submit(
    cluster: FakeCluster,
    request: RunRequest,
    folder: Path | None = None,
    *,
    progress: Progress | None = None,
    sinks: Sequence[EventSink] = (),
) -> Outcome:
    """Submit a request and follow the run to its end, in the folder that it has, or goes on in."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(cluster.server.address))
        is_resumed = request.resume is not None
        files = stack.enter_context(RunFolder(folder, resume=is_resumed)) if folder is not None else None
        return client.run(request, progress=progress or Progress(), folder=files, sinks=sinks)
