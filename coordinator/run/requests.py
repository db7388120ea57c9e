"""Requests to a coordinator: run, measurement, evaluation; and the request of a run as a message.

An evaluation has a call of its own, since its files follow.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.limits import NO_CHOICES, Choices
from coordinator.run.members import Member
from coordinator.run.result_files import saved_part
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import DataError, IntegrityError, UsageError
from ringtune.ids import check_node_name
from ringtune.job.job import Job, parse_job, result_of
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.plan import Plan
from ringtune.storage.chunks import cut_pieces, write_files
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.strict import read_object
from ringtune.techniques.initial_adapter import INITIAL_FILE, MAX_INITIAL_BYTES
from ringtune.texts import MAX_NAME, printable
from ringtune.v1 import control_pb2

_MAX_SUBMISSION: Final = 64
_MAX_NODES: Final = 4096
MAX_CHOICES: Final = 64
"""Most numbers of micro-batches among which the planner may choose: each is a plan of its own."""


class Evaluation(NamedTuple):
    """The evaluation of a saved adapter on the rows of one owner, or of all owners.

    Attributes:
        owner: the node with the evaluated rows; empty = all nodes with evaluation rows.
        folder: with the files of the saved adapter, until the run is over.
    """

    owner: str
    folder: Path

    def narrow(self, facts: Mapping[str, NodeFacts]) -> dict[str, NodeFacts]:
        """Copy the nodes' facts without the data of nodes that are not evaluated; raises ``DataError``."""
        if not self.owner:
            if not any(node.eval_rows for node in facts.values()):
                raise DataError("no node has rows to evaluate on; start one with --eval-data, or give --data FILE")
            return {name: node if node.eval_rows else _without_data(node) for name, node in facts.items()}
        if self.owner not in facts or not facts[self.owner].eval_rows:
            raise DataError(f"node {self.owner} has no rows to evaluate on; start it with --eval-data")
        return {name: node if name == self.owner else _without_data(node) for name, node in facts.items()}


class RunRequest(NamedTuple):
    """A request for a run, from its beginning or from a checkpoint.

    Attributes:
        num_nodes: number of members to wait for; 0 = the present ones.
        join_s: time limit of that wait, seconds.
        evaluation: evaluate a saved adapter, train nothing.
        resume: checkpoints to resume from; None = begin.
        profile: times to plan with; None = the nodes measure.
        plan: a given plan, used unchanged; None = make one.
        choices: limits of the planner's choice.
        is_rehearsal: only times are of interest, the result is thrown away.
        submission: random; by it the submitter finds a run of which it has no id yet.
        nodes: names of exactly the nodes to take; empty = ``num_nodes`` members.
        initial: the file of initial values (``adapter.from``) of a run that trains; None = the job has none.
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
    initial: Pieces | None = None

    @property
    def kind(self) -> str:
        """``run``, ``plan``, ``evaluation`` or ``rehearsal``."""
        if self.is_rehearsal:
            return "rehearsal"
        return "evaluation" if self.evaluation is not None else "plan" if self.plan_only else "run"

    def saved_for(self, node: str, plan: Plan) -> dict[str, Pieces] | None:
        """Return the files with a node's initial values of an evaluation; None for training."""
        if self.evaluation is None:
            return None
        is_owner = plan.owner(node) is not None
        return saved_part(
            self.evaluation.folder,
            result_of(self.job),
            plan.slice_of(node),
            is_owner=is_owner,
            private_blocks=plan.placement.private_blocks,
        )

    @property
    def is_training(self) -> bool:
        """Whether it trains a result to keep."""
        return not self.plan_only and self.evaluation is None and not self.is_rehearsal

    @property
    def needs_times(self) -> bool:
        """Whether nodes and links are measured: no profile is given, and it is no evaluation, which is short."""
        return self.profile is None and self.evaluation is None


class MeasureRequest(NamedTuple):
    """A request to measure nodes and links.

    Attributes:
        is_fresh: measure even where a node has stored times.
        one_by_one: measure nodes of one machine one after another.
    """

    job: Job
    num_nodes: int
    join_s: float
    with_links: bool = True
    is_fresh: bool = False
    one_by_one: bool = False


def invited(living: Sequence[Member], evaluation: Evaluation | None) -> tuple[Member, ...]:
    """Filter the members for a run: all but guests, and the guest with the evaluated rows."""
    owner = evaluation.owner if evaluation else ""
    return tuple(member for member in living if not member.is_guest or member.node == owner)


def _without_data(facts: NodeFacts) -> NodeFacts:
    return dataclasses.replace(facts, train_rows=0, eval_rows=0, labels=(), eval_labels=(), users=())


def run_request_to_proto(request: RunRequest) -> control_pb2.RunRequest:
    """Encode a request without the file of initial values; evaluations have no such message."""
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


def run_request_messages(request: RunRequest) -> Iterator[control_pb2.RunRequest]:
    """Yield the messages of a request: the request itself, and pieces of the file of initial values."""
    yield run_request_to_proto(request)
    for chunk in cut_pieces(INITIAL_FILE, request.initial) if request.initial is not None else ():
        yield control_pb2.RunRequest(initial=chunk)


def receive_run_request(messages: Iterator[control_pb2.RunRequest], make_folder: Callable[[], Path]) -> RunRequest:
    """Decode the messages of a request; ``make_folder`` makes an empty folder for a file of initial values.

    Raises:
        RingTuneError: a part is invalid.
        IntegrityError: the file is missing, damaged, or another one than the job says.
    """
    request = run_request_from_proto(next(messages, control_pb2.RunRequest()))
    if not request.job.adapter.sha256 or not request.is_training:
        return request
    source, names, folder = "the submitter", [INITIAL_FILE], make_folder()
    chunks = (message.initial for message in messages)
    write_files(chunks, folder, names=names, max_bytes=MAX_INITIAL_BYTES, source=source)
    return with_initial(request, folder / INITIAL_FILE)


def with_initial(request: RunRequest, file: Path) -> RunRequest:
    """Copy a request with its file of initial values, if its job has some; raises ``IntegrityError``."""
    sha256 = request.job.adapter.sha256
    if not sha256 or not request.is_training:
        return request
    if not file.is_file() or (content := FilePieces(file)).sha256() != sha256:
        raise IntegrityError(f"{file.name} has not the digest {sha256[:12]} of adapter.sha256; submit the run again")
    return request._replace(initial=content)


def read_run_request(content: bytes) -> RunRequest:
    """Decode a request that was kept on disk; raises ``RingTuneError``."""
    try:
        return run_request_from_proto(control_pb2.RunRequest.FromString(content))
    except DecodeError as error:
        raise IntegrityError(f"the request of the run is not readable: {error}; submit it again") from error


def run_request_from_proto(message: control_pb2.RunRequest) -> RunRequest:
    """Decode a request; raises ``RingTuneError``."""
    profile, plan = message.profile_json, message.plan_json
    if not math.isfinite(message.join_s):
        raise UsageError(f"nodes are waited for until a time, not for {message.join_s:g} seconds; give a number")
    if len(message.submission) > _MAX_SUBMISSION or len(message.nodes) > _MAX_NODES:
        raise UsageError(
            f"a run names {_MAX_NODES:,} nodes at most and a submission of {_MAX_SUBMISSION} characters, not "
            f"{len(message.nodes):,} and {len(message.submission):,}; use one version on all machines"
        )
    microbatches, wire_dtypes = tuple(dict.fromkeys(message.microbatches)), tuple(dict.fromkeys(message.wire_dtypes))
    if max(len(microbatches), len(wire_dtypes)) > MAX_CHOICES:
        raise UsageError(
            f"the planner chooses among at most {MAX_CHOICES} numbers of micro-batches, not {len(microbatches):,}, and "
            f"as many types for the wire, not {len(wire_dtypes):,}; name fewer"
        )
    return RunRequest(
        job=parse_job(message.job_toml, source="the submitted job"),
        plan_only=message.plan_only,
        num_nodes=message.num_nodes,
        join_s=message.join_s,
        resume=Resume.parse(message.resume_json) if message.resume_json else None,
        profile=Profile.from_json(read_object(profile, "the profile")) if profile else None,
        plan=GivenPlan.from_json(read_object(plan, "the plan")) if plan else None,
        choices=Choices(microbatches, wire_dtypes),
        submitted_by=printable(" ".join(message.submitted_by.split()), most=MAX_NAME),
        is_rehearsal=message.rehearsal,
        submission=message.submission,
        nodes=tuple(dict.fromkeys(map(check_node_name, message.nodes))),
    )
