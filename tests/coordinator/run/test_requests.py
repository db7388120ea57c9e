"""A request on its way from the submitter to the coordinator."""

from __future__ import annotations

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.limits import Choices
from coordinator.run.requests import RunRequest, run_request_from_proto, run_request_to_proto
from ringtune.costs.profile import Profile
from ringtune.errors import JobError
from ringtune.run_control.checkpoint import Resume
from ringtune.v1 import control_pb2
from tests.support.fake_agents import facts, job
from tests.support.saved_runs import plan

FULL = RunRequest(
    job=job(train__seed=3),
    plan_only=True,
    num_nodes=2,
    join_s=7.5,
    resume=Resume(plan=plan(), manifests=(), lengths=()),
    profile=Profile(nodes=(facts("a"), facts("b"))),
    plan=GivenPlan(plan=plan(), version="1.2.3", model_digest="ab" * 32),
    choices=Choices(microbatches=(1, 2), wire_dtypes=("float16",)),
    submitted_by="carol@desk",
    is_rehearsal=True,
    submission="0123456789abcdef",
    nodes=("a", "b"),
)


def test_run_request_arrives_as_it_was_sent() -> None:
    """Every part of it, and also that a part is not there."""
    plain = RunRequest(job=job())
    left_out = [name for name in RunRequest._fields if getattr(FULL, name) == getattr(plain, name)]
    assert left_out == ["evaluation"], "goes by a call of its own"
    for request in (FULL, plain):
        message = control_pb2.RunRequest.FromString(run_request_to_proto(request).SerializeToString())
        assert run_request_from_proto(message) == request


def test_run_request_without_a_job_is_refused() -> None:
    """What came from another program is read as strictly as a file."""
    with pytest.raises(JobError, match="the submitted job"):
        run_request_from_proto(control_pb2.RunRequest(job_toml="[model]\npaths = 1"))
