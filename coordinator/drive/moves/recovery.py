"""How a run is driven that goes on when nodes are lost: its state machine, and what is done in a recovery."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import Any

from coordinator.drive.hearing.reports import Reports
from coordinator.drive.moves.moving import MoveDriving
from coordinator.drive.moves.replanning import Replanning
from coordinator.drive.requests import RunRequest
from coordinator.drive.status_board import StatusBoard
from coordinator.records.books import RunBooks
from coordinator.records.run_clock import now_unix_s
from ringtune.errors import PlanError
from ringtune.jobs.parts.recovery import SKIP
from ringtune.quantities import format_seconds
from ringtune.rounds import rounds


def rounds_of(request: RunRequest, *, awaits_nodes: bool = True) -> rounds.BestKeepingRounds:
    """Make the state machine that a request wants: where the plan has copies it goes on without lost nodes.

    Args:
        request: what is asked for.
        awaits_nodes: whether lost nodes may come back, so that it waits for one that it can't do without.
    """
    runtime, plan_only = request.job.runtime, request.plan_only
    if request.evaluation is not None:
        return rounds.BestKeepingRounds(None, plan_only=plan_only, plan_s=runtime.plan_s, wait_s=runtime.wait_s)
    recovery = request.job.recovery
    return rounds.RecoveringRounds(
        None,
        plan_only=plan_only,
        plan_s=runtime.plan_s,
        wait_s=runtime.wait_s,
        leaves_out=recovery.owners == SKIP,
        patience_evals=request.job.train.patience_evals,
        keeps_best=request.job.train.keep_best,
        awaits_s=recovery.wait_s if awaits_nodes and request.is_training else 0.0,
    )


def await_nodes(command: rounds.AwaitNodes, board: StatusBoard, now_s: float) -> str:
    """Show on the board for whom the run waits; return the sentence for the user."""
    nodes, why, until_s = command
    left_s = max(0.0, until_s - now_s)
    board.awaits(nodes, why, time.monotonic() + left_s)
    return (
        f"the run waits for node {', '.join(nodes)}, {format_seconds(left_s)} at most (recovery.wait_s): {why}; "
        "start it again with its name and its data, or stop the run and --resume it later"
    )


def recover(
    command: rounds.LogMove | rounds.PlaceAgain | rounds.LogRecovery,
    moving: MoveDriving | None,
    books: RunBooks | None,
    replanning: Replanning | None,
    reports: Reports,
    answers: SimpleQueue[Any],
) -> str:
    """Look for a placement without lost nodes, or write a move or a recovery down and grant in its placement.

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
    if isinstance(command, rounds.LogMove):
        told = moving.log(command)
        books.moved(command, now_unix_s())
        books.pace = replanning.moved(command)
        return told
    told = moving.recovered(command)
    books.recovered(command, now_unix_s())
    books.pace = replanning.recovered(command)
    reports.forgive()
    return told
