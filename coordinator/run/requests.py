"""Requests that a coordinator takes: a run, a measurement and an evaluation; the request of a run as a message.

An evaluation has a call of its own, since its files follow.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.limits import NO_CHOICES, Choices
from coordinator.run.members import Member
from coordinator.run.result_files import saved_part
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import DataError, IntegrityError
from ringtune.job.job import Job, parse_job, result_of
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import Pieces
from ringtune.storage.strict import read_object
from ringtune.v1 import control_pb2


class Evaluation(NamedTuple):
    """The evaluation of a saved adapter on the rows of one owner, or of all owners.

    Attributes:
        owner: the node with the evaluation rows that count; rows of others are left alone. Empty = all who have some.
        folder: with the files of the saved adapter, until the run is over.
    """

    owner: str
    folder: Path

    def narrow(self, facts: Mapping[str, NodeFacts]) -> dict[str, NodeFacts]:
        """Copy the nodes' facts so that only nodes with evaluation rows that count have data.

        Raises:
            DataError: the owner takes no part or has no rows to evaluate on, or no node has any.
        """
        if not self.owner:
            if not any(node.eval_rows for node in facts.values()):
                raise DataError("no node has rows to evaluate on; start one with --eval-data, or give --data FILE")
            return {name: node if node.eval_rows else _without_data(node) for name, node in facts.items()}
        if self.owner not in facts or not facts[self.owner].eval_rows:
            raise DataError(f"node {self.owner} has no rows to evaluate on; start it with --eval-data")
        return {name: node if name == self.owner else _without_data(node) for name, node in facts.items()}


class RunRequest(NamedTuple):
    """A request to run a job, on so many nodes, from the start or from a checkpoint.

    Attributes:
        job: what is wanted.
        plan_only: stop after planning.
        num_nodes: wait until so many have joined; 0 = take those that are there.
        join_s: how long to wait for them, seconds.
        evaluation: evaluate a saved adapter, train nothing.
        resume: what to resume from; None = begin.
        profile: times to plan with; None = the nodes measure.
        plan: to carry out as it is; None = plan.
        choices: what the planner may choose from.
        submitted_by: user and host.
        is_rehearsal: only to learn what actions take; what it trains is thrown away.
        submission: random; the submitter finds the run again by it without having its id.
        nodes: exactly these; none = ``num_nodes`` says how many.
    """

    job: Job
    plan_only: bool = False
    num_nodes: int = 0
    join_s: float = 60.0
    evaluation: Evaluation | None = None
    resume: Resume | None = None
    profile: Profile | None = None
    plan: GivenPlan | None = None
    choices: Choices = NO_CHOICES
    submitted_by: str = ""
    is_rehearsal: bool = False
    submission: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What it is, in a word."""
        if self.is_rehearsal:
            return "rehearsal"
        return "evaluation" if self.evaluation is not None else "plan" if self.plan_only else "run"

    def saved_for(self, node: str, plan: Plan) -> dict[str, Pieces] | None:
        """Return what a node is to begin with instead of initial values; None where it trains."""
        if self.evaluation is None:
            return None
        is_owner = plan.owner(node) is not None
        return saved_part(self.evaluation.folder, result_of(self.job), plan.slice_of(node), is_owner=is_owner)

    @property
    def is_training(self) -> bool:
        """Whether it trains something to keep, rather than only plan, evaluate or rehearse."""
        return not self.plan_only and self.evaluation is None and not self.is_rehearsal

    @property
    def needs_times(self) -> bool:
        """Whether the nodes have to measure themselves: nobody gave times, and an evaluation is short without them."""
        return self.profile is None and self.evaluation is None


class MeasureRequest(NamedTuple):
    """A request to measure nodes and links.

    Attributes:
        job: defines model, sizes and adapter.
        num_nodes: wait until so many have joined; 0 = take those that are there.
        join_s: how long to wait for them, seconds.
        with_links: whether links are measured too.
        is_fresh: anew even where a node remembers.
        one_by_one: nodes of one machine one after another.
    """

    job: Job
    num_nodes: int
    join_s: float
    with_links: bool = True
    is_fresh: bool = False
    one_by_one: bool = False


def invited(living: Sequence[Member], evaluation: Evaluation | None) -> tuple[Member, ...]:
    """Filter the members that a run may take: all but guests, and the guest with the rows that are evaluated."""
    owner = evaluation.owner if evaluation else ""
    return tuple(member for member in living if not member.is_guest or member.node == owner)


def _without_data(facts: NodeFacts) -> NodeFacts:
    return dataclasses.replace(facts, train_rows=0, eval_rows=0, labels=(), eval_labels=(), users=())


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
