"""A whole training run as one call: on this machine, or on a coordinator's nodes."""

from __future__ import annotations

from coordinator.run_folder.folder import RunFolder
from coordinator.screen.progress import Progress
from coordinator.server.server import CoordinatorServer
from coordinator.submit.client import Client, Submission
from coordinator.submit.interrupts import Interrupts
from coordinator.submit.local import LocalNodes, LocalSetup, node_name
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import IntegrityError, UsageError
from ringtune.jobs.job import Job
from ringtune.rounds.checkpoint import Resume
from ringtune.schedule.plan import Plan


def train_local(
    job: Job,
    num_nodes: int,
    *,
    folder: RunFolder,
    progress: Progress,
    join_s: float,
    resume: Resume | None = None,
    profile: Profile | None = None,
    interrupts: Interrupts | None = None,
) -> Submission:
    """Train on processes of this machine, with a coordinator of its own; nothing is left behind.

    The run takes the same way as a remote one: over gRPC, from submitter to coordinator to agents.

    Raises:
        RingTuneError: whatever the run failed with.
    """
    setup = LocalSetup.of(job, num_nodes)
    if resume is not None:
        require_nodes(resume.plan, setup)
    with CoordinatorServer("127.0.0.1:0", lease_s=job.runtime.lease_s) as server:
        nodes = LocalNodes(
            setup,
            job,
            server.address,
            logs=folder.path / "logs",
            on_exit=server.coordinator.node_failed,
            states=folder.checkpoints.node_states(),
        )
        with nodes, Client(server.address) as client:
            try:
                return client.run(
                    job,
                    progress=progress,
                    folder=folder,
                    num_nodes=num_nodes,
                    join_s=join_s,
                    resume=resume,
                    profile=profile,
                    interrupts=interrupts,
                )
            finally:
                server.coordinator.stop("the submitter stopped the run", timeout_s=8.0)


def require_nodes(plan: Plan, setup: LocalSetup) -> None:
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
    if setup.num_owners != len(plan.owners):
        raise UsageError(
            f"{len(plan.owners)} nodes owned data when the run began, --local {setup.num_nodes} would share it among "
            f"{setup.num_owners}; give the same number"
        )


def train_remote(
    job: Job,
    address: str,
    *,
    folder: RunFolder,
    progress: Progress,
    num_nodes: int,
    join_s: float,
    insecure: bool,
    resume: Resume | None = None,
    profile: Profile | None = None,
    interrupts: Interrupts | None = None,
) -> Submission:
    """Train on the nodes of a running coordinator.

    Raises:
        RingTuneError: whatever the run failed with.
    """
    with Client(address, insecure=insecure) as client:
        return client.run(
            job,
            progress=progress,
            folder=folder,
            num_nodes=num_nodes,
            join_s=join_s,
            resume=resume,
            profile=profile,
            interrupts=interrupts,
        )


def plan_remote(
    job: Job, address: str, *, num_nodes: int, join_s: float, insecure: bool
) -> tuple[Plan, dict[str, NodeFacts]]:
    """Let the nodes of a running coordinator measure themselves, and plan for them.

    Raises:
        RingTuneError: whatever inspecting or planning failed with.
    """
    with Client(address, insecure=insecure) as client:
        came = client.run(job, progress=Progress(), folder=None, plan_only=True, num_nodes=num_nodes, join_s=join_s)
    if came.plan is None or came.profile is None:
        raise IntegrityError("the coordinator sent no plan; use one version on all machines")
    return came.plan, {node.node: node for node in came.profile.nodes}
