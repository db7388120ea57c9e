"""Runs of the small job on agents without torch, over real gRPC."""

from __future__ import annotations

from pathlib import Path

from coordinator.client.follow import Outcome
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from tests.support.fake_agents import FakeCluster, job


def run(cluster: FakeCluster, folder: Path | None = None, *, num_nodes: int = 2, **changes: object) -> Outcome:
    """Submit the small job and follow it to its end."""
    with Client(cluster.server.address) as client:
        if folder is None:
            return client.run(
                RunRequest(job=job(**changes), num_nodes=num_nodes, join_s=0.5), progress=Progress(), folder=None
            )
        with RunFolder(folder) as files:
            return client.run(RunRequest(job=job(**changes), num_nodes=num_nodes), progress=Progress(), folder=files)
