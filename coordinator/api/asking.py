"""Put together what a run is asked for, for the command line and for the Python API."""

from __future__ import annotations

from pathlib import Path

from coordinator.drive.requests import RunRequest
from coordinator.estimates.facts import estimate
from coordinator.planner.alternatives import Choices
from coordinator.planner.given.given_plan import GivenPlan, require_members
from coordinator.planner.given.given_profile import read_profile
from coordinator.run_folder.checkpoints import find_resume
from coordinator.run_folder.folder import files_of_run, require_inputs_elsewhere, require_no_run, require_run_folder
from coordinator.submit.connection import Connection
from coordinator.submit.fetching import bring_up_to_date
from coordinator.submit.local.local_nodes import node_name
from coordinator.submit.submission import Submission
from ringtune.jobs.job import Job
from ringtune.jobs.rows import check_rows


def make_submission(
    job: Job,
    out: Path | None,
    *,
    local: int,
    coordinator: str,
    insecure: bool,
    nodes: int,
    join_s: float,
    replace: bool,
    resume: bool,
    profile: Path | None,
    plan: GivenPlan | None,
    choices: Choices,
    coordinator_wait_s: float,
) -> tuple[Submission, list[str]]:
    """Put together what is to be trained, and where.

    Args:
        job: that is wanted.
        out: folder of the run; None = it will be fetched into one.
        local: nodes to start on this machine; 0 = those of ``coordinator``.
        coordinator: ``host:port``; empty with ``local``.
        insecure: whether it may be on another machine, without encryption.
        nodes: wait until so many have joined it; 0 = take those that are there.
        join_s: how long to wait for them, in seconds.
        replace: whether the files of a run in ``out`` may be put aside.
        resume: whether the run in ``out`` goes on.
        profile: file of times that were measured before.
        plan: to be carried out; None = plan.
        choices: what the planner may choose in place of the job's values.
        coordinator_wait_s: how long to wait for a coordinator that is away, in seconds.

    Returns:
        What to submit, and sentences for the user.

    Raises:
        RingTuneError: profile, plan or folder can't be used; or with ``local`` the model or the rows.
    """
    given = read_profile(profile) if profile else None
    if plan is not None and local:
        require_members(plan.plan, [node_name(index, local) for index in range(local)])
    if out is not None:
        _require_usable(out, job, replace=replace, resume=resume)
    notes = []
    if local:  # as the nodes would read it all, before they are started and anything is written
        notes = check_rows(job.model.task, job.data) if resume else estimate(job, local).notes
    if resume and out is not None and coordinator:
        with Connection(coordinator, insecure=insecure) as client:
            notes += filter(None, [bring_up_to_date(client, out)])
    start = find_resume(out, job, notes.append) if resume and out is not None else None
    request = RunRequest(
        job=job,
        num_nodes=local or nodes,
        join_s=join_s,
        resume=start,
        profile=given,
        plan=plan,
        choices=choices,
    )
    submission = Submission(
        request=request,
        local=local,
        coordinator=coordinator,
        insecure=insecure,
        replace=replace or resume,
        coordinator_wait_s=coordinator_wait_s,
    )
    return submission, notes


def _require_usable(out: Path, job: Job, *, replace: bool, resume: bool) -> None:
    """Refuse a folder that the run can't have, before anything is started or written.

    Raises:
        UsageError: it holds something else, or a run that may not be replaced, or the job's rows or model lie where
            the run writes.
        StorageError: something else than a folder is there.
    """
    if not resume:
        require_run_folder(out)
        require_no_run(out, files_of_run(out), replace=replace)
    require_inputs_elsewhere(out, job)
