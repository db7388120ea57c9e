"""A whole measurement as one call: on this machine, or on a coordinator's nodes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from coordinator.screen.progress import Progress
from coordinator.server.server import CoordinatorServer
from coordinator.submit.client import Client
from coordinator.submit.local import LocalNodes, LocalSetup
from ringtune.costs.profile import Profile
from ringtune.jobs.job import Job


class MeasureOptions(NamedTuple):
    """How to measure; see ``Client.measure``."""

    join_s: float
    with_links: bool = True
    is_fresh: bool = False
    one_by_one: bool = False


def measure_local(job: Job, num_nodes: int, options: MeasureOptions, *, progress: Progress) -> Profile:
    """Measure processes of this machine, with a coordinator of its own; they remember it in their own folders.

    Raises:
        RingTuneError: whatever it failed with.
    """
    setup = LocalSetup.of(job, num_nodes)
    with (
        CoordinatorServer("127.0.0.1:0", lease_s=job.runtime.lease_s) as server,
        tempfile.TemporaryDirectory(prefix="ringtune-") as logs,
    ):
        failed = server.coordinator.node_failed
        with (
            LocalNodes(setup, job, server.address, logs=Path(logs), on_exit=failed),
            Client(server.address) as client,
        ):
            try:
                return client.measure(job, progress=progress, num_nodes=num_nodes, **options._asdict())
            finally:
                server.coordinator.stop("the user stopped the measurement", timeout_s=8.0)


def measure_remote(
    job: Job, address: str, options: MeasureOptions, *, progress: Progress, num_nodes: int, insecure: bool
) -> Profile:
    """Measure the nodes of a running coordinator.

    Raises:
        RingTuneError: whatever it failed with.
    """
    with Client(address, insecure=insecure) as client:
        return client.measure(job, progress=progress, num_nodes=num_nodes, **options._asdict())
