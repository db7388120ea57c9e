"""Stand-ins for torch and the network, instant and without sockets: a ring of ``AgentRun``, and two agents."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edge.agent.active_run import ActiveRun
from edge.agent.agent import Agent
from edge.checkpoint.snapshots import HEAD, MigratedState, Snapshot
from edge.machine.libraries import ComputeThread
from edge.options import AgentOptions
from edge.profiler.timing import TimingRequest
from edge.runtime import reporter as rp
from edge.runtime.loop import AgentRun
from ringtune.engine.events import HeadArrived, ParcelArrived, TensorArrived
from ringtune.errors import FrameError
from ringtune.job.job import Job, Model
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.lowering import links as plan_links
from ringtune.schedule.operation_tables import BlockScores
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn, turn_sequence
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors
from ringtune.v1 import control_pb2
from tests.support.plans import make_plan

WAIT_S = 60.0


class FakeExecutor:
    """Computes nothing; keeps a log of what it was asked."""

    def __init__(
        self,
        on_action: Callable[[Action], None] = lambda action: None,
        scores: Callable[[int], tuple[BlockScores, ...]] = lambda turn: (),
    ) -> None:
        self.hosted_bytes, self.copied = 7, ""
        self.run_figures = {"peak_versions": 2, "peak_version_bytes": 5}
        self.techniques: dict[str, Any] = {}
        self.log: list[Any] = []
        self.head_log: list[str] = []
        self.held: dict[tuple[str, int, int], Any] = {}
        self.turns: set[int] = set()
        self._on_action = on_action
        self.take_scores = scores

    def copy_digest(self, unit: int, stop: int) -> str:
        """A digest that shows after which action it was taken."""
        return f"{unit} after {self.log[-1]}"

    def grant(self, turn: Turn) -> None:
        """A turn begins."""
        self.turns.add(turn.index)

    def forget_turn(self, index: int) -> str:
        """A turn ends."""
        self.turns.remove(index)
        return ""

    def run(self, action: Action) -> tuple[tuple[str, float], ...]:
        """Pretend to compute."""
        self._on_action(action)
        self.log.append(action)
        return (("correct", 1.0), ("count", 1.0), ("loss_sum", 0.5)) if action.op is Op.HEAD else ()

    def put_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> None:
        """A tensor comes in."""
        self.held[key.payload, key.seq, key.micro] = tensor

    def take_tensor(self, key: TensorKey) -> tuple[Any, Any]:
        """A tensor goes out."""
        return f"{key.payload}{key.seq}.{key.micro}", None

    def head_blob(self) -> Pieces:
        """The head goes out."""
        self.head_log.append("sent")
        return Pieces.of(b"head")

    def load_head_blob(self, data: Pieces) -> None:
        """The head comes in."""
        self.head_log.append("came")
        self.log.append(bytes(data))

    def take_parcel(self, key: TensorKey) -> Pieces:
        """A parcel goes out."""
        return Pieces.of(f"{key.seq}/{key.boundary}".encode())

    def put_parcel(self, key: TensorKey, data: Pieces) -> None:
        """A parcel comes in."""
        self.log.append(bytes(data))

    def drop_head_state(self) -> None:
        """The head went out, and is not needed here any more."""
        self.head_log.append("dropped")

    def load_saved(self, folder: Path) -> None:
        """A saved adapter comes in."""
        self.log.append({path.name: path.read_bytes() for path in folder.iterdir()})

    def rows_digest(self, run_id: str) -> str:
        """Of no rows."""
        return ""

    def shard(self, metadata: Mapping[str, str], *, with_head: bool) -> Pieces:
        """A checkpoint's part."""
        self.head_log += ["saved"] if with_head else []
        head = Pieces.of(metadata["step"].encode())
        return write_tensors(
            {HEAD: TensorPieces("U8", (head.size_bytes,), head)} if with_head else {}, metadata=metadata
        )

    def adapter_files(self, *, with_head: bool, with_private: bool) -> dict[str, Pieces]:
        """The results."""
        files = {"adapter.safetensors": b"a" * 3, **({"model_head.safetensors": b"h"} if with_head else {})}
        return {name: Pieces.of(content) for name, content in files.items()}


class KeptReports:
    """Keeps what a run reports, and wakes who waits for it."""

    def __init__(self) -> None:
        self.entries: list[rp.Entry] = []
        self._changed = threading.Condition()

    def put(self, entry: rp.Entry) -> None:
        """Keep an entry."""
        with self._changed:
            self.entries.append(entry)
            self._changed.notify_all()

    def wait_for(self, predicate: Callable[[Sequence[rp.Entry]], bool]) -> bool:
        """Wait until the entries satisfy ``predicate``."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self.entries), WAIT_S)

    def of(self, kind: type) -> list[Any]:
        """The entries of one kind."""
        return [entry for entry in list(self.entries) if isinstance(entry, kind)]


class DirectLink:
    """A link that hands over at once, on the caller's thread, to who receives now; says that a tensor has 100 bytes."""

    waiting: Action | None = None

    def __init__(self, source: str, receiver: Callable[[], Any]) -> None:
        self._source, self._receiver = source, receiver
        self.is_closed = False

    def send_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> int:
        """Deliver a tensor."""
        self._deliver(TensorArrived(key, self._source), (tensor, mask))
        return 100

    def send_parcel(self, key: TensorKey, data: Pieces) -> int:
        """Deliver a parcel."""
        self._deliver(ParcelArrived(key, self._source), data)
        return data.size_bytes

    def send_head(self, turn: int, data: Pieces) -> int:
        """Deliver a head."""
        self._deliver(HeadArrived(turn, self._source), data)
        return data.size_bytes

    def _deliver(self, event: TensorArrived | ParcelArrived | HeadArrived, content: Any) -> None:
        if (receiver := self._receiver()) is not None:
            receiver.on_arrival(event, content)

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class FakeRing:
    """All nodes of a plan as runs with fake executors, linked directly."""

    def __init__(
        self,
        plan: Plan,
        *,
        executors: dict[str, FakeExecutor] | None = None,
        wait_s: float = 300.0,
        record: bool = False,
        savers: Mapping[str, Any] | None = None,
        start: StartPoint | None = None,
    ) -> None:
        self.plan = plan
        self.start_point = start
        self.executors = {node: (executors or {}).get(node) or FakeExecutor() for node in plan.nodes}
        self.reports = {node: KeptReports() for node in plan.nodes}
        self.runs: dict[str, AgentRun] = {}
        self._threads = {node: ComputeThread(f"compute-{node}") for node in plan.nodes}
        for node in plan.nodes:
            targets = [target for source, target in plan_links(plan, start) if source == node]
            links = {target: DirectLink(node, partial(self.runs.__getitem__, target)) for target in targets}
            stand_ins: dict[str, Any] = {
                "executor": self.executors[node],
                "links": links,
                "reports": self.reports[node],
            }
            self.runs[node] = AgentRun(
                plan=plan,
                node=node,
                ack=partial(self._ack, node),
                **stand_ins,
                wait_s=wait_s,
                record=record,
                saver=(savers or {}).get(node),
                start=start,
            )

    def _ack(self, node: str, source: str, boundary: int) -> None:
        self.runs[source].on_credits(node, boundary, 1)

    def start(self, *nodes: str) -> None:
        """Start these nodes' loops, all by default."""
        for node in nodes or self.plan.nodes:
            self._threads[node].submit(self.runs[node].loop)

    def grant_all(self) -> tuple[Turn, ...]:
        """Grant every turn of the plan."""
        turns = tuple(turn_sequence(self.plan.course, start=self.start_point))
        for run in self.runs.values():
            run.grant(turns)
        return turns

    def wait_done(self, num_turns: int) -> bool:
        """Wait until every node has reported every turn."""
        return all(
            reports.wait_for(lambda entries: sum(isinstance(entry, rp.TurnDone) for entry in entries) == num_turns)
            for reports in self.reports.values()
        )

    def close(self) -> bool:
        """Stop all; whether every loop ended."""
        for run in self.runs.values():
            run.stop("the test ends")
        ended = [thread.close(WAIT_S) for thread in self._threads.values()]
        return all(ended)


PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=4)
JOB = Job(model=Model(path="model")).to_toml()
RUN = "r20260101-000000-00000000"
OTHER = "r20260101-000000-11111111"
ADDRESSES = {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}


class FakeServicer:
    """Takes what comes for the run that is expected."""

    def __init__(self) -> None:
        self.active: ActiveRun | None = None
        self.network: dict[str, FakeServicer] = {}
        self.turns: list[Turn] = []
        self.done_turns = 0

    def granted(self, turns: Iterable[Turn]) -> None:
        """Frames of these turns may come."""
        self.turns += turns

    def done_before(self, index: int) -> None:
        """No more frames of earlier turns."""
        self.done_turns = index

    def forget(self, sink: ActiveRun | None = None) -> None:
        """Take nothing any more of this run, or of any."""
        if sink is None or self.active is sink:
            self.active = None

    def ack(self, source: str, boundary: int) -> None:
        """A credit for ``source``."""
        active = self.network[source].active
        if active is not None and active.run is not None and self.active is not None:
            active.run.on_credits(self.active.node, boundary, 1)


class AgentLink(DirectLink):
    """Delivers to the run that the servicer of its target expects."""

    def __init__(self, source: ActiveRun, target: FakeServicer) -> None:
        super().__init__(source.node, lambda: target.active)
        self._run_id = source.run_id

    def open(self, timeout_s: float) -> None:
        """Refuse unless the target expects the run."""
        active = self._receiver()
        if active is None or active.run_id != self._run_id:
            raise FrameError("no such run here")


class FakeSnapshot(Snapshot):
    """Says whose blocks it has."""

    def __init__(self, node: str, metadata: Mapping[str, str]) -> None:
        self.node, self.metadata = node, dict(metadata)
        self.head: Pieces | None = Pieces.of(f"head of {node}".encode())

    def part(self, start: int, stop: int) -> Pieces:
        """Which blocks."""
        blocks = {f"{self.node}/{block}.up": TensorPieces("U8", (0,), Pieces.of(b"")) for block in range(start, stop)}
        return write_tensors(blocks)


class FakeWorkshop:
    """Builds fake executors and links."""

    def __init__(self, name: str, network: dict[str, FakeServicer]) -> None:
        self.network = network
        self.servicer = FakeServicer()
        self.servicer.network = network
        network[name] = self.servicer
        self.links: list[AgentLink] = []
        self.built: list[Any] = []
        self.on_build: Callable[[], None] = lambda: None
        self.executor = FakeExecutor()

    def audit(self, options: AgentOptions, run_id: str, job: Job, plan: Plan, executor: Any) -> Any:
        """No run of these agents is audited."""
        raise AssertionError("a run without [audit] has nothing of it")

    def snapshot(self, active: ActiveRun, metadata: Mapping[str, str]) -> FakeSnapshot:
        """What it is of, and of whom."""
        return FakeSnapshot(active.node, metadata)

    def kept_file(self, executor: Any, blocks: tuple[int, ...], of: Mapping[str, str]) -> bytes:
        """Which blocks, and what they are of."""
        return f"{blocks} {dict(of)}".encode()

    def load_migrated(self, executor: Any, taken: MigratedState) -> None:
        """Logged by the executor."""
        executor.log += [sorted(TensorFile(file, where="it").infos) for file in taken.files]
        if taken.head is not None:
            executor.load_head_blob(taken.head)

    def preload(self) -> None:
        """Nothing to load."""

    def inspect(
        self, options: AgentOptions, job: Job, *, timing: TimingRequest | None, memory_bytes: int, dataset: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Facts that show what came in, and a dataset."""
        facts = {"node": options.name, "path": job.model.path, "memory_bytes": memory_bytes, "timing": timing}
        return facts, f"rows of {options.name}"

    def build(self, options: AgentOptions, job: Job, plan: Plan, dataset: Any) -> Any:
        """The fake executor."""
        self.on_build()
        self.built.append(dataset)
        return self.executor

    def working_clock(self, executor: Any) -> Callable[[], float]:
        """No quota holds here."""
        return lambda: 0.0

    def ring_servicer(self) -> Any:
        """The fake servicer."""
        return self.servicer

    def expect(self, servicer: Any, active: ActiveRun, job: Job) -> None:
        """Take this run."""
        servicer.active = active

    def connect(self, active: ActiveRun, target: str, address: str) -> Any:
        """A fake link."""
        link = AgentLink(active, self.network[target])
        self.links.append(link)
        return link


class TwoAgents:
    """Agents a and b with what they report."""

    def __init__(self, **options: Any) -> None:
        self.network: dict[str, FakeServicer] = {}
        self.shops = {name: FakeWorkshop(name, self.network) for name in "ab"}
        self.requests: list[control_pb2.ReportRequest] = []
        self._changed = threading.Condition()
        self.agents = {name: self._agent(name, **options) for name in "ab"}

    def _agent(self, name: str, **options: Any) -> Agent:
        settings = AgentOptions(coordinator="127.0.0.1:9", name=name, **options)
        return Agent(settings, lambda servicer: None, self._report, load_workshop=lambda: self.shops[name])

    def _report(self, request: control_pb2.ReportRequest) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def wait_for(self, predicate: Callable[[list[control_pb2.ReportRequest]], bool]) -> None:
        """Wait until the reports satisfy ``predicate``."""
        with self._changed:
            assert self._changed.wait_for(lambda: predicate(self.requests), WAIT_S)

    def prepare(self, name: str, run_id: str = RUN, *, addresses: dict[str, str] = ADDRESSES, **options: Any) -> int:
        """Prepare one agent."""
        plan_json = options.pop("plan_json", json.dumps(PLAN.to_json()))
        timeout_s = options.pop("timeout_s", WAIT_S)
        return self.agents[name].prepare(
            run_id, 0, plan_json=plan_json, job_toml=JOB, addresses=addresses, timeout_s=timeout_s
        )

    def prepare_all(self) -> None:
        """Prepare both at the same time, as the coordinator does."""
        helper = threading.Thread(target=self.prepare, args=("b",))
        helper.start()
        self.prepare("a")
        helper.join(WAIT_S)

    def close(self) -> None:
        """End both agents."""
        for agent in self.agents.values():
            assert agent.close(WAIT_S)
