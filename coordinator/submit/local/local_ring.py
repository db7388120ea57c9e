"""Run a ring on this machine while a command needs it: a coordinator, agents as processes, and a client."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from coordinator.server.coordinator import Coordinator
from coordinator.server.server import CoordinatorServer
from coordinator.submit.client import Client
from coordinator.submit.local.local_nodes import OWN_COORDINATOR, LocalNodes, LocalSetup, node_name
from ringtune.errors import UsageError
from ringtune.jobs.job import Job
from ringtune.schedule.plan import Plan
from ringtune.schedule.whose_rows.leaving_out import all_owners

_STOP_S = 8.0


@contextlib.contextmanager
def local_ring(
    job: Job,
    num_nodes: int,
    *,
    logs: Path | None = None,
    states: Path | None = None,
    goes_on: Plan | None = None,
    beside: Callable[[Coordinator], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[Client]:
    """Start a coordinator, agents and a client, and end them all with the context.

    A run takes the same way as a remote one: over gRPC, from submitter to coordinator to agents.

    Args:
        job: names the data, and how many nodes own it.
        num_nodes: how many.
        logs: folder for what they print; None = it is not kept.
        states: folder in which each node gets one for its parts of checkpoints; None = their own default.
        goes_on: the plan of the run to go on with; None = begin.
        beside: made with the coordinator before a node joins, and ended after the nodes.

    Raises:
        RingTuneError: it can't be started here.
    """
    setup = LocalSetup.of(job, num_nodes)
    if goes_on is not None:
        _require_nodes(goes_on, setup)
    with contextlib.ExitStack() as stack:
        logs = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringtune-")))
        server = stack.enter_context(CoordinatorServer("127.0.0.1:0", lease_s=job.runtime.lease_s))
        server.coordinator.awaits_nodes = False  # nobody would start one again
        stack.enter_context(beside(server.coordinator))
        failed = server.coordinator.node_failed
        nodes = LocalNodes(
            setup, job, server.address, logs=logs, on_exit=failed, options=[OWN_COORDINATOR], states=states
        )
        stack.enter_context(nodes)
        client = stack.enter_context(Client(server.address))
        stack.callback(server.coordinator.stop, "the submitter stopped it", _STOP_S)
        yield client


def _require_nodes(plan: Plan, setup: LocalSetup) -> None:
    """Refuse to go on with other local nodes than the run began with.

    Raises:
        UsageError: names the nodes that are missing, or says how many owned data.
    """
    names = [node_name(index, setup.num_nodes) for index in range(setup.num_nodes)]
    missing = [node for node in plan.nodes if node not in names]
    if missing:
        raise UsageError(
            f"the run began with the nodes {', '.join(plan.nodes)}; --local {setup.num_nodes} lacks "
            f"{', '.join(missing)}, give the same number"
        )
    num_owners = len(all_owners(plan.course))
    if setup.num_owners != num_owners:
        raise UsageError(
            f"{num_owners} nodes owned data when the run began, --local {setup.num_nodes} would share it "
            f"among {setup.num_owners}; give the same number"
        )
