"""Two agents with stand-ins for everything that needs torch or sockets, and what they report."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from edge.agent.active_run import ActiveRun
from edge.agent.agent import Agent
from edge.checkpoint.snapshots import MigratedState, Snapshot
from edge.options import AgentOptions
from edge.profiler.timing import TimingRequest
from ringtune.engine.events import HeadArrived, ParcelArrived, TensorArrived
from ringtune.errors import FrameError
from ringtune.job.job import Job, Model
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, TensorPieces, write_tensors
from ringtune.v1 import control_pb2
from tests.support.fakes import WAIT_S, FakeExecutor
from tests.support.plans import make_plan

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


class FakeLink:
    """Delivers to the servicer of its target."""

    waiting = None

    def __init__(self, source: ActiveRun, target: FakeServicer) -> None:
        self._source = source
        self._target = target
        self.is_closed = False

    def open(self, timeout_s: float) -> None:
        """Refuse unless the target expects the run."""
        active = self._target.active
        if active is None or active.run_id != self._source.run_id:
            raise FrameError("no such run here")

    def send_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> int:
        """Deliver."""
        if self._target.active is not None:
            self._target.active.on_arrival(TensorArrived(key, self._source.node), (tensor, mask))
        return 10

    def send_parcel(self, key: TensorKey, data: Pieces) -> int:
        """Deliver."""
        if self._target.active is not None:
            self._target.active.on_arrival(ParcelArrived(key, self._source.node), data)
        return data.size_bytes

    def send_head(self, turn: int, data: Pieces) -> int:
        """Deliver."""
        if self._target.active is not None:
            self._target.active.on_arrival(HeadArrived(turn, self._source.node), data)
        return data.size_bytes

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


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
        self.links: list[FakeLink] = []
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
        link = FakeLink(active, self.network[target])
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
