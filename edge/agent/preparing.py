"""Build a node's part of a run, and start its loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from edge.agent.active_run import ActiveRun
from edge.agent.snapshots import TakenOver
from edge.agent.torch_side import Workshop
from edge.agent_options import AgentOptions
from edge.machine import memory_budget
from edge.machine.threads import ComputeThread
from edge.run.loop import AgentRun
from edge.run.partners import NO_KEEPER, Link
from edge.run.reporter import Reporter
from edge.run.shared_clock import SharedClock
from edge.run.totals import Totals
from edge.shards.saver import GoesOn, open_saver
from ringtune.errors import RingTuneError
from ringtune.jobs.job import Job
from ringtune.schedule.stages.replicas import saves_head
from ringtune.v1 import control_pb2


def build_slice(
    active: ActiveRun,
    job: Job,
    options: AgentOptions,
    *,
    workshop: Workshop,
    ring: Any,
    dataset: Any,
    goes_on: GoesOn | None,
    taken: TakenOver | None = None,
    deadline_s: float,
) -> None:
    """Build the executor of a run, open its saver, and load what it goes on from; on the compute thread.

    Args:
        active: the run, which gets executor and saver.
        job: with the model's folder on this machine.
        options: of the agent.
        workshop: builds.
        ring: the servicer, which takes the run's frames from now on.
        dataset: that was loaded for this run before; None = load it.
        goes_on: the shard; None = the run begins, or moves.
        taken: what was taken over from its last placement, or off disks; None = nothing was.
        deadline_s: when the folder for shards has to be locked, on the monotonic clock.

    Raises:
        InterruptedRunError: the run was released meanwhile.
        RingTuneError: the slice can't be built, or the shard not be loaded.
    """
    memory_budget.reset_peak()
    # before the slice is built: peers that are faster may open their links meanwhile
    workshop.expect(ring, active, job)
    if active.cancelled.is_set():
        ring.forget(active)
        active.check_wanted()
    active.executor = workshop.build(options, job, active.plan, dataset)
    first_run = goes_on.run_id if goes_on else taken.shards_run if taken else active.run_id
    active.saver = open_saver(
        options.state,
        active.plan,
        active.node,
        first_run,
        is_resumed=goes_on is not None or (taken is not None and taken.is_resumed),
        keeps_state=job.keeps_state_on_disk,
        kept=options.kept,
        rows=active.executor.rows_digest(first_run),
        timeout_s=deadline_s - time.monotonic(),
    )
    if job.keeps_state_on_disk and active.saver is not None:
        active.inactive_state = active.executor.inactive_state
        active.inactive_state.keep_on_disk(active.saver.moments(), {"run": first_run, "node": active.node})
    offload = active.plan.course.offload
    if offload is not None and offload.merged and active.saver is not None:
        active.executor.offloading.keep_on_disk(active.saver.moments(), {"run": first_run, "node": active.node})
    if active.plan.placement.cache is not None:
        _open_cache(active)
    if taken is not None:
        if taken.is_resumed and active.saver is not None:
            active.saver.require_rows()
        workshop.take_over(active.executor, taken)
    if goes_on is not None and active.saver is not None:
        active.saver.load(
            goes_on.shard.step,
            goes_on.shard.sha256,
            active.executor,
            with_head=saves_head(active.plan.course, active.node, goes_on.holder),
            plan_digest=goes_on.plan_digest,
        )


def _open_cache(active: ActiveRun) -> None:
    """Let a node keep hidden states in its folder; where it can't, the run goes on and the node says why."""
    try:
        folder = active.saver.hidden() if active.saver is not None else None
        active.executor.prefixes.open(folder, active.start)
    except RingTuneError as error:
        active.executor.prefixes.open(None, active.start, problem=str(error))


def start_loop(
    active: ActiveRun,
    job: Job,
    *,
    workshop: Workshop,
    ring: Any,
    compute: ComputeThread,
    report: Callable[[control_pb2.ReportRequest], object],
    on_refused: Callable[[str], None],
    clock: SharedClock,
    totals: Totals,
) -> None:
    """Start the loop of a run on the compute thread; its links are open.

    Args:
        active: the run, which gets reporter and loop.
        job: of the run.
        workshop: makes the clock of what computing takes.
        ring: the servicer, which returns credits.
        compute: the thread.
        report: delivers one report to the coordinator or raises ``grpc.RpcError``.
        on_refused: told why the coordinator wants no more reports.
        clock: the coordinator's.
        totals: of the run so far.
    """
    active.reporter = Reporter(
        run_id=active.run_id,
        node=active.node,
        num_blocks=active.plan.course.num_blocks,
        send=report,
        on_refused=on_refused,
        clock=clock,
        numbers=totals.report_numbers,
    )
    links: dict[str, Link] = active.links
    active.run = AgentRun(
        plan=active.plan,
        node=active.node,
        executor=active.executor,
        links=links,
        ack=ring.ack,
        done_before=ring.done_before,
        reports=active.reporter,
        wait_s=job.runtime.wait_s,
        record=job.runtime.record,
        start=active.start,
        saver=active.saver,
        keeper=active.keeper or NO_KEEPER,
        worked=workshop.working_clock(active.executor),
        totals=totals,
    )
    compute.submit(active.run.loop)
