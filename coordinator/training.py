"""A whole training run as one call: on this machine, or on a coordinator's nodes."""

from __future__ import annotations

from coordinator.local import LocalNodes, LocalSetup
from coordinator.progress import Progress
from coordinator.run_folder import RunFolder
from coordinator.server import CoordinatorServer
from coordinator.submit import Client, Submission
from ringtune.job import Job


def train_local(job: Job, num_nodes: int, *, folder: RunFolder, progress: Progress, join_s: float) -> Submission:
    """Train on processes of this machine, with a coordinator of its own; nothing is left behind.

    The run takes the same way as a remote one: over gRPC, from submitter to coordinator to agents.

    Raises:
        RingTuneError: whatever the run failed with.
    """
    setup = LocalSetup.of(job, num_nodes)
    with CoordinatorServer("127.0.0.1:0", lease_s=job.runtime.lease_s) as server:
        nodes = LocalNodes(
            setup, job, server.address, logs=folder.path / "logs", on_exit=server.coordinator.node_failed
        )
        with nodes, Client(server.address) as client:
            try:
                return client.run(job, progress=progress, folder=folder, num_nodes=num_nodes, join_s=join_s)
            finally:
                server.coordinator.stop("the submitter stopped the run", timeout_s=8.0)


def train_remote(
    job: Job,
    address: str,
    *,
    folder: RunFolder,
    progress: Progress,
    num_nodes: int,
    join_s: float,
    insecure: bool,
) -> Submission:
    """Train on the nodes of a running coordinator.

    Raises:
        RingTuneError: whatever the run failed with.
    """
    with Client(address, insecure=insecure) as client:
        return client.run(job, progress=progress, folder=folder, num_nodes=num_nodes, join_s=join_s)
