"""How a run is driven that goes on when nodes are lost: its state machine, and what is done in a recovery."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from coordinator.drive.moving import MoveDriving
from coordinator.drive.replanning import Replanning
from coordinator.drive.reports import Reports
from coordinator.drive.requests import RunRequest
from coordinator.records.books import RunBooks
from coordinator.records.run_clock import now_unix_s
from ringtune.errors import PlanError
from ringtune.jobs.parts.recovery import SKIP
from ringtune.rounds import rounds


def rounds_of(request: RunRequest) -> rounds.Rounds:
    """Make the state machine that a request wants: where the plan has copies it goes on without lost nodes."""
    runtime, plan_only = request.job.runtime, request.plan_only
    if request.evaluation is not None:
        return rounds.Rounds(None, plan_only=plan_only, plan_s=runtime.plan_s, wait_s=runtime.wait_s)
    leaves_out = request.job.recovery.owners == SKIP
    return rounds.RecoveringRounds(
        None,
        plan_only=plan_only,
        plan_s=runtime.plan_s,
        wait_s=runtime.wait_s,
        leaves_out=leaves_out,
        patience_evals=request.job.train.patience_evals,
    )


def recover(
    command: rounds.PlaceAgain | rounds.LogRecovery,
    moving: MoveDriving | None,
    books: RunBooks | None,
    replanning: Replanning | None,
    reports: Reports,
    answers: SimpleQueue[Any],
) -> str:
    """Look for a placement without lost nodes, or write a recovery down and grant in its placement from now on.

    Returns:
        A sentence for the user.

    Raises:
        PlanError: there is no plan yet.
    """
    if moving is None or books is None or replanning is None:
        raise PlanError("a run recovers that has no plan yet; please report this")
    if isinstance(command, rounds.PlaceAgain):
        replanning.place_again(command, answers.put)
        return f"node {', '.join(command.lost)} is lost; the others go back to the end of step {command.step}"
    told = moving.recovered(command)
    books.recovered(command, now_unix_s())
    books.pace = replanning.recovered(command)
    reports.forgive()
    return told
