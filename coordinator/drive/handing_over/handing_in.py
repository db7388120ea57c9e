"""The end of a run that went well: send the submitter its result and its report."""

from __future__ import annotations

import json
from collections.abc import Mapping

from coordinator.drive.handing_over.handed_in import HandedIn
from coordinator.drive.requests import RunRequest
from coordinator.planner.job_time import JobTime
from coordinator.planner.planned import Planned
from coordinator.records.books import RunBooks
from coordinator.records.events import EventSink
from ringtune.rounds import rounds
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2


def hand_results_in(
    request: RunRequest,
    books: RunBooks,
    handed_in: HandedIn,
    state: rounds.BestKeepingRounds,
    emit: EventSink,
    *,
    part: Plan,
    planned: Planned,
    predicted: JobTime | None,
    run_id: str,
    wall_s: float,
    phases_s: Mapping[str, float],
) -> None:
    """Send adapter or model, and report, of a run to the submitter.

    Args:
        request: what was asked for.
        books: of the run.
        handed_in: what the nodes sent.
        state: the state machine, which is done.
        emit: sends an event.
        part: of the plan that holds at the end.
        planned: the plan as it was made.
        predicted: how long its steps were thought to take; None = nothing was predicted.
        run_id: of the run.
        wall_s: seconds since it was asked for.
        phases_s: seconds of each phase.

    Raises:
        IntegrityError: what the nodes sent is not as the plan has it.
    """
    for node, totals in handed_in.last.totals():
        books.ledger.add_totals(node, totals)
    if request.evaluation is None and not handed_in.settle(state.best, state.last_step):
        handed_in.last.send(request.job, emit, part=part)
    report = books.ledger.report(
        rows=books.rows,
        run_id=run_id,
        wall_s=wall_s,
        phases_s=phases_s,
        predicted_bytes=planned.memory_bytes,
        unfreeze_at=state.unfreeze_at,
        predicted_steps_s=predicted.steps_s if predicted else None,
        operations=books.operations_report(),
        best=state.best,
    )
    emit(control_pb2.RunEvent(report_json=json.dumps(report)))
