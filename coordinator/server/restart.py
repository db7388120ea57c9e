"""The run that a coordinator resumes by itself, and the step that it resumes from. No I/O.

::

    running --(the coordinator ends)--> interrupted --(it starts again)--> resumed by another run:
                                           from the end of the last turn that all nodes had done,
                                           else from the newest checkpoint, else from the beginning

Where all parameters train, the run that has lost a node, or ends with a checkpoint as an owner is back, is resumed in
the same way, from its newest checkpoint: by ``RunHistory``. So is a resumed run that loses a node before a turn has
ended, from where it began.

Meanwhile nodes have released the run, and have written shards and their copies of the last turns to disk. The resuming
run has an id of its own, as with ``--resume``, so late messages of the former run are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Final

from coordinator.planner.limits import NO_CHOICES
from coordinator.run.requests import RunRequest
from coordinator.server.run_record import RunRecord, in_order
from ringtune.errors import UsageError
from ringtune.run_control.checkpoint import KEPT, CheckpointManifest, Resume, of_one_course
from ringtune.run_control.continuation import plan_of_checkpoint
from ringtune.schedule.migration import TURNS_KEPT
from ringtune.schedule.operation_tables import ScheduledTable, table_before
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2

MAX_IN_VAIN: Final = 3
"""Most resumptions in a row without a new checkpoint or turn: the run itself may crash the coordinator."""

NODES_S: Final = 300.0
"""Seconds that a resumed run waits for its nodes, which may have to start too."""


def resumed_by(records: Mapping[str, RunRecord], run_id: str) -> RunRecord | None:
    """Return the run that took up an interrupted one; None if there is none."""
    return next((record for record in records.values() if record.takes_up == run_id), None)


def last_of(records: Mapping[str, RunRecord], run_id: str) -> str:
    """Return the id of the last run in the chain of runs that took this one up; its own id without such a chain."""
    seen = {run_id}
    while (after := resumed_by(records, run_id)) is not None and after.run_id not in seen:
        run_id = after.run_id
        seen.add(run_id)
    return run_id


def run_to_resume(records: Mapping[str, RunRecord], *, now_unix_s: float, within_s: float) -> RunRecord | None:
    """Return the newest run if it is interrupted and was not resumed in vain ``MAX_IN_VAIN`` times; else None.

    An interruption more than ``within_s`` seconds ago is left to the user.
    """
    open_ends = in_order(record for record in records.values() if resumed_by(records, record.run_id) is None)
    last = open_ends[-1] if open_ends else None
    if last is None or last.state != "interrupted" or now_unix_s - last.ended_unix_s > within_s:
        return None
    return last if _num_in_vain(records, last) < MAX_IN_VAIN else None


def _num_in_vain(records: Mapping[str, RunRecord], last: RunRecord) -> int:
    """Count the resumptions in a row that made no new checkpoint and ended no new turn."""
    count = 0
    while (before := records.get(last.takes_up)) is not None and last.newest_step <= before.newest_step:
        count, last = count + 1, before
    return count


class RunHistory:
    """The events from which the coordinator resumes a run that has lost a node; an event sink.

    Such a run trains all parameters, which has no operations, or has ended no turn since it was resumed, so that the
    table is that of ``request``.

    Args:
        request: began the run.
        num_in_vain: resumptions in a row, up to this run, without a new checkpoint.
    """

    def __init__(self, request: RunRequest, *, num_in_vain: int = 0) -> None:
        self._request = request
        self._events: list[control_pb2.RunEvent] = []
        self.num_in_vain = num_in_vain

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Keep an event if the run may be resumed from it; of checkpoints the newest ``KEPT``."""
        kind = event.WhichOneof("event")
        if kind == "checkpoint_json":
            saved = [saved_event for saved_event in self._events if saved_event.WhichOneof("event") == kind]
            self._events = [saved_event for saved_event in self._events if saved_event not in saved[: 1 - KEPT]]
            self.num_in_vain = 0
        if kind in ("plan_json", "resumed_json", "checkpoint_json"):
            self._events.append(event)

    def resumption(self, record: RunRecord, join_s: float) -> RunRequest:
        """Return the request that resumes the run; it waits for its nodes for ``join_s`` seconds.

        Raises ``UsageError``: the run was resumed in vain ``MAX_IN_VAIN`` times.
        """
        if self.num_in_vain >= MAX_IN_VAIN:
            raise UsageError(
                f"it was resumed {MAX_IN_VAIN} times without a new checkpoint; --resume it when all are back"
            )
        return resume_request(self._request, record, self._events)._replace(join_s=join_s)


def resume_request(request: RunRequest, record: RunRecord, events: Iterable[control_pb2.RunEvent]) -> RunRequest:
    """Make the request that resumes an interrupted run; raises ``UsageError`` or ``RingTuneError``.

    ``request`` began the run; ``events`` are its own, without those of the runs that it resumes.

    Returns:
        A request to resume from the last turns and checkpoints, or to begin again with the same nodes.
    """
    plan = request.resume.plan if request.resume else None
    before = request.resume.manifests if request.resume else ()
    points = {(manifest.step, bool(manifest.shards)): manifest for manifest in before}
    tables, first_table = list[ScheduledTable](), None
    for event in events:
        match event.WhichOneof("event"):
            case "plan_json":
                plan = Plan.from_json(json.loads(event.plan_json))
            case "resumed_json":
                step = int(json.loads(event.resumed_json)["step"])
                points = {at: manifest for at, manifest in points.items() if at[0] <= step}
                first_table = next((point.operations for point in points.values() if point.step == step), None)
            case "operations_json":
                tables.append(ScheduledTable.from_json(json.loads(event.operations_json)))
            case "checkpoint_json" | "kept_turn_json":
                manifest = CheckpointManifest.parse(event.checkpoint_json or event.kept_turn_json)
                if not manifest.shards:  # it is written each turn, without the table that holds
                    table = table_before(tables, manifest.step) or first_table
                    manifest = dataclasses.replace(manifest, operations=table)
                points[manifest.step, bool(manifest.shards)] = manifest
    waiting = request._replace(join_s=max(request.join_s, NODES_S))
    newest = _newest(points.values())
    if plan is not None and newest:
        lengths = request.resume.lengths if request.resume else ()
        plan = plan_of_checkpoint(request.job, plan, [newest[0].plan_digest], lengths)
        manifests = of_one_course(request.job, plan, newest, lengths)
        resume = Resume(plan=plan, manifests=manifests, lengths=lengths)
        if resume.saved_step < 0:  # if nodes have lost the last turns, the run begins again with its first request
            return waiting._replace(resume=resume)
        return waiting._replace(resume=resume, plan=None, choices=NO_CHOICES)
    nodes = record.nodes or request.nodes
    if request.plan is None and not nodes and not request.num_nodes:
        raise UsageError("it had no nodes yet; submit it again")
    return waiting._replace(nodes=() if request.plan else nodes)


def _newest(points: Iterable[CheckpointManifest]) -> tuple[CheckpointManifest, ...]:
    """Return the newest checkpoints and ends of turns, as many as nodes keep; of equal steps the checkpoint first."""
    ordered = sorted(points, key=lambda point: (point.step, bool(point.shards)), reverse=True)
    saved = [point for point in ordered if point.shards][:KEPT]
    kept = [point for point in ordered if not point.shards][:TURNS_KEPT]
    return tuple(point for point in ordered if point in saved or point in kept)
