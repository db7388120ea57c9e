"""The request to run a job as a message: the submitter writes it, the coordinator reads it.

An evaluation goes by a call of its own, since its files follow.
"""

from __future__ import annotations

import json

from google.protobuf.message import DecodeError

from coordinator.drive.requests import RunRequest
from coordinator.planner.alternatives import Choices
from coordinator.planner.given.given_plan import GivenPlan
from ringtune.costs.profile import Profile
from ringtune.errors import IntegrityError
from ringtune.files.strict import read_object
from ringtune.jobs.job import parse_job
from ringtune.rounds.checkpoint import Resume
from ringtune.v1 import control_pb2


def run_request_to_proto(request: RunRequest) -> control_pb2.RunRequest:
    """Write a request that evaluates nothing."""
    return control_pb2.RunRequest(
        job_toml=request.job.to_toml(),
        plan_only=request.plan_only,
        num_nodes=request.num_nodes,
        join_s=request.join_s,
        resume_json=request.resume.to_text() if request.resume else "",
        profile_json=json.dumps(request.profile.to_json()) if request.profile else "",
        plan_json=json.dumps(request.plan.to_json()) if request.plan else "",
        microbatches=request.choices.microbatches,
        wire_dtypes=request.choices.wire_dtypes,
        submitted_by=request.submitted_by,
        rehearsal=request.is_rehearsal,
        submission=request.submission,
        nodes=request.nodes,
    )


def read_run_request(content: bytes) -> RunRequest:
    """Read a request that was kept on a disk.

    Raises:
        RingTuneError: a part of it is wrong or not readable.
    """
    try:
        return run_request_from_proto(control_pb2.RunRequest.FromString(content))
    except DecodeError as error:
        raise IntegrityError(f"with what the run began is not readable: {error}; submit it again") from error


def run_request_from_proto(message: control_pb2.RunRequest) -> RunRequest:
    """Read a request.

    Raises:
        RingTuneError: a part of it is wrong or not readable.
    """
    profile, plan = message.profile_json, message.plan_json
    return RunRequest(
        job=parse_job(message.job_toml, source="the submitted job"),
        plan_only=message.plan_only,
        num_nodes=message.num_nodes,
        join_s=message.join_s,
        resume=Resume.parse(message.resume_json) if message.resume_json else None,
        profile=Profile.from_json(read_object(profile, "the profile")) if profile else None,
        plan=GivenPlan.from_json(read_object(plan, "the plan")) if plan else None,
        choices=Choices(tuple(message.microbatches), tuple(message.wire_dtypes)),
        submitted_by=message.submitted_by,
        is_rehearsal=message.rehearsal,
        submission=message.submission,
        nodes=tuple(message.nodes),
    )
