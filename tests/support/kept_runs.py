"""A coordinator that keeps the books of runs, with agents without torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from coordinator.client.submit import Client
from coordinator.run.requests import RunRequest
from coordinator.server.run_record import RunRecord
from coordinator.server.run_store import RunStore
from ringtune.job.job import Job
from ringtune.schedule.turns import Turn
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, FakeAgent, FakeCluster, job
from tests.support.tap import Tap

JOB = job(train__checkpoint_every=2)
LONG = job(train__checkpoint_every=2, train__rounds=500)


class Gate:
    """Holds the turns of nodes back until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, agent: FakeAgent, turns: list[Turn]) -> None:
        """Do the turns once the gate is open."""
        self.reached.set()
        assert self.open.wait(CALL_S)
        with contextlib.suppress(grpc.RpcError):  # the run may have been stopped meanwhile
            agent.stub.Report(agent.report(turns), timeout=CALL_S)


def breaking_when_it_trains(cluster: FakeCluster) -> tuple[str, Callable[[control_pb2.RunEvent], None]]:
    """An address of the coordinator, and a sink that breaks its connections, for ever, when the run trains."""
    tap = Tap(int(cluster.server.address.rpartition(":")[2]))

    def cut(event: control_pb2.RunEvent) -> None:
        if event.state == "training":
            tap.close()

    return f"127.0.0.1:{tap.port}", cut


@contextlib.contextmanager
def keeping(folder: Path, gate: Gate | None = None) -> Iterator[FakeCluster]:
    """Two nodes and a coordinator that keeps runs."""
    kept = RunStore(folder)
    agents = {name: {"on_grant": gate} for name in ("a", "b")} if gate else None
    with contextlib.closing(kept), FakeCluster("a", "b", agents=agents) as cluster:
        cluster.server.coordinator.kept = kept
        yield cluster


def ended(client: Client, run_id: str) -> RunRecord:
    """What is kept of a run once it is over."""
    for _ in client.events(run_id, wait=True, whole=False, with_files=False):
        pass
    return next(record for record in client.runs() if record.run_id == run_id)


def start(client: Client, wanted: Job = JOB) -> str:
    """Submit and leave."""
    return client.start(RunRequest(job=wanted, num_nodes=2, join_s=5.0))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run's folder; times and ids differ from run to run, so only those without them."""
    names = ("adapter/adapter.safetensors", "adapter/model_head.safetensors", "adapter/adapter_config.json", "job.toml")
    return {name: (folder / name).read_bytes() for name in names}
