"""Which interrupted run a coordinator takes up, how often, and from where."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.limits import Choices
from coordinator.run.requests import RunRequest
from coordinator.server.restart import MAX_IN_VAIN, NODES_S, last_of, resume_request, resumed_by, run_to_resume
from coordinator.server.run_record import RunRecord
from ringtune.errors import UsageError
from ringtune.run_control.checkpoint import CheckpointManifest, Resume, Shard
from ringtune.run_control.continuation import Length, job_digest
from ringtune.v1 import control_pb2
from tests.support.fake_agents import job
from tests.support.plans import two_nodes

JOB = job()
PLAN = two_nodes()
NOW_S = 1_000_000.0


def run_id(number: int) -> str:
    """The id of the n-th run."""
    return f"r20260102-00{number:04d}-00000000"


def interrupted(number: int, *, saved_step: int = 4, **changes: Any) -> RunRecord:
    """A run that was under way when its coordinator ended, ten seconds ago."""
    values: dict[str, Any] = {
        "first_run": run_id(1),
        "model": "tiny",
        "method": "ringada",
        "submitted_by": "ann@desk",
        "started_unix_s": NOW_S - 1000 + number,
        "state": "interrupted",
        "ended_unix_s": NOW_S - 10,
        "num_steps": 8,
        "saved_step": saved_step,
        **changes,
    }
    return RunRecord(run_id=run_id(number), **values)


def chosen(*records: RunRecord, within_s: float = 60.0) -> str:
    """The run that is taken up; empty if none is."""
    found = run_to_resume({record.run_id: record for record in records}, now_unix_s=NOW_S, within_s=within_s)
    return found.run_id if found else ""


def test_newest_run_is_taken_up_if_it_was_interrupted() -> None:
    """One that was stopped, failed or is done ended by itself or by a word; an older one was given up by its user."""
    assert chosen() == ""
    assert chosen(interrupted(1)) == run_id(1)
    assert chosen(interrupted(1), interrupted(2)) == run_id(2)
    for state in ("done", "stopped", "failed"):
        assert chosen(interrupted(1), interrupted(2, state=state)) == ""


def test_interruption_that_is_too_old_is_left_to_the_user() -> None:
    """Ten seconds ago: within a minute, not within five seconds; 0 = never."""
    assert chosen(interrupted(1), within_s=60.0) == run_id(1)
    assert chosen(interrupted(1), within_s=5.0) == ""
    assert chosen(interrupted(1), within_s=0.0) == ""


def test_run_that_was_taken_up_is_not_taken_up_again() -> None:
    """Also if the clock went back between the two, as on a board that wakes up without one."""
    late = interrupted(2, takes_up=run_id(1), started_unix_s=1.0)
    assert chosen(interrupted(1), late) == run_id(2)
    assert chosen(interrupted(1), replace(late, state="failed")) == ""
    records = {record.run_id: record for record in (interrupted(1), late, interrupted(3, takes_up=run_id(2)))}
    assert resumed_by(records, run_id(1)) == late
    assert resumed_by(records, run_id(3)) is None
    assert last_of(records, run_id(1)) == run_id(3) == last_of(records, run_id(3))


def test_run_is_taken_up_some_times_without_a_new_checkpoint() -> None:
    """After three times in vain it may be the run that ends coordinators; a checkpoint in between counts anew."""

    def attempts(*saved_steps: int) -> list[RunRecord]:
        first = interrupted(1, saved_step=saved_steps[0])
        return [
            first,
            *(
                interrupted(number, saved_step=step, takes_up=run_id(number - 1))
                for number, step in enumerate(saved_steps[1:], 2)
            ),
        ]

    assert MAX_IN_VAIN == 3
    assert chosen(*attempts(4, 4, 4)) == run_id(3)
    assert chosen(*attempts(4, 4, 4, 4)) == ""
    assert chosen(*attempts(4, 4, 4, 6)) == run_id(4)
    assert chosen(*attempts(-1, -1, -1, -1)) == "", "without checkpoints it begins anew each time"


def manifest(step: int) -> CheckpointManifest:
    """A checkpoint."""
    return CheckpointManifest(
        run_id=run_id(1),
        plan_digest=PLAN.digest,
        job_digest=job_digest(JOB),
        model_digest="m",
        step=step,
        holder=PLAN.nodes[0],
        shards=tuple(Shard(node=node, sha256="0" * 64, size_bytes=1) for node in PLAN.nodes),
    )


def saved(step: int) -> control_pb2.RunEvent:
    """The event of a checkpoint."""
    return control_pb2.RunEvent(checkpoint_json=json.dumps(manifest(step).to_json()))


PLANNED = control_pb2.RunEvent(plan_json=json.dumps(PLAN.to_json()))
REQUEST = RunRequest(job=JOB, num_nodes=2, join_s=5.0, choices=Choices((2, 4), ()), submitted_by="ann@desk")


def test_run_goes_on_from_its_newest_checkpoints_with_its_own_plan() -> None:
    """The two newest; what was chosen in planning is in the plan."""
    events = [PLANNED, saved(2), saved(4), saved(6)]
    found = resume_request(REQUEST, interrupted(1), events)
    assert found.resume == Resume(plan=PLAN, manifests=(manifest(6), manifest(4)))
    assert (found.plan, found.choices, found.join_s) == (None, Choices((), ()), NODES_S)
    assert (found.job, found.submitted_by) == (JOB, "ann@desk")


def test_run_that_went_on_before_goes_on_from_what_came_before_it() -> None:
    """Until it has a checkpoint of its own; newer ones than that from which it went on were damaged."""
    lengths = (Length.of(JOB),)
    before = REQUEST._replace(resume=Resume(plan=PLAN, manifests=(manifest(6), manifest(4)), lengths=lengths))
    at_once = resume_request(before, interrupted(2), [])
    assert at_once.resume == before.resume
    resumed = control_pb2.RunEvent(resumed_json=json.dumps({"step": 4, "passed_over": ["6 is damaged"]}))
    later = resume_request(before, interrupted(2), [PLANNED, resumed, saved(8)])
    assert later.resume == Resume(plan=PLAN, manifests=(manifest(8), manifest(4)), lengths=lengths)


def kept(step: int, *, attempt: int = 1, **changes: Any) -> control_pb2.RunEvent:
    """The event of a turn that every node kept."""
    found = replace(manifest(step), shards=(), attempt=run_id(attempt), **changes)
    return control_pb2.RunEvent(kept_turn_json=json.dumps(found.to_json()))


def steps_of(request: RunRequest) -> list[tuple[int, bool]]:
    """The steps that a request may go on from, and whether each is a checkpoint."""
    assert request.resume is not None
    return [(one.step, bool(one.shards)) for one in request.resume.manifests]


def test_run_goes_on_from_the_newest_turn_that_all_nodes_kept() -> None:
    """As many turns as nodes keep, with the checkpoints between them; of one step the checkpoint comes first."""
    events = [PLANNED, *(kept(step) for step in (1, 2, 3)), saved(3), *(kept(step) for step in (4, 5))]
    found = resume_request(REQUEST, interrupted(1), [*events, kept(6), saved(6)])
    assert steps_of(found) == [(6, True), (6, False), (5, False), (4, False), (3, True)]
    assert (found.plan, found.choices) == (None, Choices((), ()))
    resumed = control_pb2.RunEvent(resumed_json=json.dumps({"step": 4, "saved_step": 3, "passed_over": []}))
    later = resume_request(
        REQUEST._replace(resume=found.resume), interrupted(2), [PLANNED, resumed, kept(5, attempt=2)]
    )
    assert steps_of(later) == [(5, False), (4, False), (3, True)]
    assert later.resume is not None and later.resume.manifests[0].attempt == run_id(2)


def test_run_without_a_checkpoint_goes_on_from_its_last_turns_or_begins_as_it_was_asked_to() -> None:
    """What its nodes have lost is planned and trained anew, so what was asked stays in the request."""
    given = GivenPlan(plan=PLAN)
    found = resume_request(REQUEST._replace(plan=given), interrupted(1, saved_step=-1), [PLANNED, kept(2), kept(4)])
    assert steps_of(found) == [(4, False), (2, False)]
    assert (found.plan, found.choices) == (given, REQUEST.choices)


def test_turns_that_end_count_as_progress_of_a_run_that_is_taken_up() -> None:
    """A run without checkpoints that comes further each time is taken up again; one that does not is left."""

    def attempts(*kept_steps: int) -> list[RunRecord]:
        first = interrupted(1, saved_step=-1, kept_step=kept_steps[0])
        return [
            first,
            *(
                interrupted(number, saved_step=-1, kept_step=step, takes_up=run_id(number - 1))
                for number, step in enumerate(kept_steps[1:], 2)
            ),
        ]

    assert chosen(*attempts(4, 6, 8, 10, 12)) == run_id(5)
    assert chosen(*attempts(4, 4, 4, 4)) == ""


def test_run_without_a_checkpoint_begins_anew_with_its_nodes() -> None:
    """Those that were asked about themselves, or of the given plan; a number of nodes where none was there yet."""
    begun = interrupted(1, saved_step=-1, nodes=("a", "b"))
    anew = resume_request(REQUEST._replace(num_nodes=0), begun, [PLANNED])
    assert (anew.resume, anew.nodes, anew.choices, anew.join_s) == (None, ("a", "b"), REQUEST.choices, NODES_S)
    given = GivenPlan(plan=PLAN)
    with_plan = resume_request(REQUEST._replace(plan=given, join_s=1e6), begun, [PLANNED])
    assert (with_plan.plan, with_plan.nodes, with_plan.join_s) == (given, (), 1e6)
    again = resume_request(anew, interrupted(2, saved_step=-1), [])
    assert again.nodes == ("a", "b"), "it was interrupted once more before they were there"
    waiting = interrupted(1, saved_step=-1)
    assert resume_request(REQUEST, waiting, []).num_nodes == 2
    with pytest.raises(UsageError, match="had no nodes yet; submit it again"):
        resume_request(REQUEST._replace(num_nodes=0), waiting, [])
