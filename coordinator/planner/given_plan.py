"""Plans and profiles given by the user: read, and refused if they do not fit the run.

A run carries out a saved plan unchanged: ring, slices, order of turns, micro-batches, wire dtype and credits. These may
differ from the job's own values; everything else must agree with job and members.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.planner.make_plan import agreed_model, check_same_rows, job_draft, refuse_if_full
from coordinator.planner.planned import Planned, with_copies
from ringtune import __version__
from ringtune.costs.measurement import check_profile, job_shape
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import ModelError, PlanError, UsageError
from ringtune.job.job import Job
from ringtune.schedule.course import Course
from ringtune.schedule.migration import first_step
from ringtune.schedule.plan import Plan
from ringtune.storage.durable import is_claimed, require_own
from ringtune.storage.strict import read_json
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.base import ANEW
from ringtune.transport.endpoints import is_compatible

_MEASURED = (
    "block_forward_s",
    "block_graph_s",
    "block_backward_s",
    "activation_token_bytes",
    "lowest_token_bytes",
    "hardware",
    "shape",
    "work_times",
    "has_messages",
    "rested_s",
    "handling_s",
    "message_s_per_byte",
)


def read_profile(path: Path) -> Profile:
    """Read a ``profile.json``; raises ``PlanError``."""
    with _reading(f"the profile {path}", "make it with 'ringtune measure'"):
        return Profile.from_json(read_json(path))


@contextlib.contextmanager
def _reading(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"can't read {what}: {error}; {remedy}") from error
    except ValueError as error:
        raise PlanError(f"{what} is not JSON: {error}; {remedy}") from error
    except PlanError as error:
        raise PlanError(f"{what}: {error}") from error


def require_profile_place(path: Path) -> None:
    """Refuse a path that has anything but an earlier profile; raises ``UsageError``."""
    _require_own(
        path,
        "profile that 'ringtune measure' saved",
        lambda table: table.keys() == {"schema", "nodes", "links"} and isinstance(table["nodes"], list),
    )


def with_given_times(facts: Mapping[str, NodeFacts], given: Profile) -> Profile:
    """Merge the present facts of nodes with the times and links of a given profile; raises ``PlanError``.

    ``facts`` are of every node that takes part, not measured.
    """
    missing = sorted(set(facts) - set(given.by_name))
    if missing:
        raise PlanError(f"the profile lacks node {', '.join(missing)}; measure anew with 'ringtune measure'")
    nodes = []
    for name in sorted(facts):
        times = {key: getattr(given.by_name[name], key) for key in _MEASURED}
        nodes.append(dataclasses.replace(facts[name], **times))
    links = tuple(link for link in given.links if link.source in facts and link.target in facts)
    return Profile(nodes=tuple(nodes), links=links)


def check_given(given: Profile, facts: Mapping[str, NodeFacts], job: Job, plan: Plan) -> None:
    """Refuse a given profile that was measured for another model or another shape of batches; raises ``PlanError``."""
    model = facts[plan.nodes[0]].model
    used = Profile(nodes=tuple(node for node in given.nodes if node.node in facts))
    shape = job_shape(job, fixed_tokens=model.fixed_tokens)
    check_profile(used, plan.course, model_digest=model.digest, shape=shape)


_CHOSEN = ("microbatches", "wire_dtype", "owners")
_JOB_KEYS = {
    "num_steps": "train.rounds, train.epochs or train.max_steps",
    "num_blocks": "model.path",
    "hidden_size": "model.path",
    "labels": "data.labels",
    "method": "train.method, [unfreeze]",
    "frozen_blocks": "privacy.private_blocks",
    "initial": "adapter.from",
    "invertible": "adapter.config",
    "packed": "train.packing",
    "compute": "train.compute",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenPlan:
    """A plan with the version and model that it was made for.

    Attributes:
        version: of the ringtune that made it; empty if the file has none, as ``plan.json`` of a run.
        model_digest: of its model; empty if the file has none.
    """

    plan: Plan
    version: str = ""
    model_digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as dictionaries, lists, numbers and strings."""
        return {"version": self.version, "model_digest": self.model_digest, "plan": self.plan.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GivenPlan:
        """Read a plan file of ``ringtune plan``, or the bare plan of a run; raises ``PlanError``."""
        if not isinstance(value.get("plan"), Mapping):
            return GivenPlan(plan=Plan.from_json(value))
        version, digest = value.get("version", ""), value.get("model_digest", "")
        if not (isinstance(version, str) and isinstance(digest, str)):
            raise PlanError(f"version and model_digest of a plan have to be text; {ANEW}")
        return GivenPlan(plan=Plan.from_json(value["plan"]), version=version, model_digest=digest)


def read_given_plan(path: Path) -> GivenPlan:
    """Read the file of ``ringtune plan --save`` or ``--json``, or the ``plan.json`` of a run; raises ``PlanError``."""
    remedy = "make it with 'ringtune plan JOB --save FILE'"
    with _reading(f"the plan {path}", remedy):
        value = read_json(path)
        if not isinstance(value, Mapping):
            raise PlanError(f"it is no table; {remedy}")
        given = GivenPlan.from_json(value)
        _check_version(given)
        return given


def require_plan_place(path: Path) -> None:
    """Refuse a path that has anything but an earlier plan with its digest; raises ``UsageError``."""
    _require_own(
        path,
        "plan as 'ringtune plan' saved it",
        lambda table: (
            table.get("event") == "plan" and isinstance(table.get("plan"), dict) and "digest" in table["plan"]
        ),
    )


def _require_own(path: Path, what: str, is_own: Callable[[Mapping[str, Any]], bool]) -> None:
    """Refuse a path with a file that ``is_own`` does not accept, or with a file of a run."""

    def is_table(path: Path) -> bool:
        table = read_json(path)
        return isinstance(table, Mapping) and is_own(table)

    require_own(path, what, is_table)
    if os.path.lexists(path) and is_claimed(path.parent, "run"):
        raise UsageError(f"{path} belongs to the run in {path.parent}; give a name outside of its folder")


def _check_version(given: GivenPlan) -> None:
    if given.version and not is_compatible(given.version):
        raise PlanError(f"it was made by ringtune {given.version}, this is {__version__}; {ANEW}")


def require_members(plan: Plan, members: Collection[str]) -> None:
    """Refuse a plan with nodes that are not members; raises ``PlanError``."""
    missing = [node for node in plan.nodes if node not in members]
    if missing:
        raise PlanError(
            f"the plan is for the nodes {', '.join(plan.nodes)}; {', '.join(missing)} not among {', '.join(members)}: "
            f"give the same nodes, or {ANEW}"
        )


def accept_plan(given: GivenPlan, job: Job, facts: Mapping[str, NodeFacts]) -> Planned:
    """Check a given plan against the job and the members, with facts of every member by name.

    Returns:
        The plan, with the memory that its nodes need.

    Raises:
        PlanError: it is of another version or other nodes, or the job says something else than the plan.
        ModelError: it is of another model, or the members have different ones.
        DataError: an owner has other rows than the plan says.
        CapacityError: a node has less memory than it needs.
    """
    plan = given.plan
    _check_version(given)
    require_members(plan, sorted(facts))
    nodes = [facts[node] for node in sorted(plan.nodes)]
    model = agreed_model(nodes)
    if given.model_digest and given.model_digest != model.digest:
        raise ModelError(
            f"the plan is for model {given.model_digest[:12]}…, the nodes have {model.digest[:12]}…; {ANEW}"
        )
    for node in plan.nodes:
        check_same_rows(facts[node], plan.owner(node), "the plan says", f"give it the same data, or {ANEW}")
    _check_course(plan, job_draft(job, nodes, model).course)
    for technique in TECHNIQUES:
        technique.check_plan(job, plan, model)
    _check_placements(plan)
    private = job.privacy.private_blocks
    if plan.placement.private_blocks != private:
        raise PlanError(
            f"the plan has {plan.placement.private_blocks} private blocks, the job says privacy.private_blocks = "
            f"{private}; {ANEW}"
        )
    return with_copies(job, refuse_if_full(job, plan, facts), facts, lambda copied: refuse_if_full(job, copied, facts))


def _check_course(plan: Plan, drafted: Course) -> None:
    """Refuse a course that differs from the job's in anything that the planner may not choose."""
    course, drafted = plan.course, drafted.fitted(plan.placement.slices)
    chosen = {*_CHOSEN, *(name for technique in TECHNIQUES for name in technique.course_fields)}
    for name in [entry.name for entry in dataclasses.fields(course) if entry.compare and entry.name not in chosen]:
        has, says = getattr(course, name), getattr(drafted, name)
        if has != says:
            key = _JOB_KEYS.get(name, f"train.{name}")
            raise PlanError(f"the plan has {name} = {has}, the job says {says} ({key}); change it, or {ANEW}")


def _check_placements(plan: Plan) -> None:
    """Refuse a plan without its first placement, and placements that begin after the last step."""
    first, course = plan.placement, plan.course
    if first.placement_number:
        raise PlanError(
            f"the plan begins with placement {first.placement_number}: it is a part of a plan; give the whole one"
        )
    for placement in plan.placements:
        if (step := first_step(course, placement)) and step >= course.num_steps:
            raise PlanError(
                f"placement {placement.placement_number} of the plan holds from turn {placement.first_turn} on, which "
                f"is step {step}, but the run has {course.num_steps}; leave it out, or {ANEW}"
            )
