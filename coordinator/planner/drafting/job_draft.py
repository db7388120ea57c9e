"""What a job and its nodes agree on before anything is placed: model, labels, and the course that has to be placed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from coordinator.planner.draft import Draft
from coordinator.planner.fitting.activations import with_activations
from coordinator.planner.fitting.frozen import frozen_of
from ringtune.costs.profile import ModelFacts, NodeFacts
from ringtune.errors import DataError, JobError, ModelError
from ringtune.files.strict import nearest
from ringtune.jobs.job import Job
from ringtune.jobs.parts.hift import check_warmup
from ringtune.jobs.parts.recovery import NEXT
from ringtune.jobs.user_adapters import kinds_of
from ringtune.models.adapters.trim_support import may_trim
from ringtune.models.families import family_named
from ringtune.models.family import NAMED_TASKS, TAGGING
from ringtune.schedule.changing_hands.placements import why_it_stays
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner, users_text
from ringtune.schedule.methods.hift import DISK
from ringtune.schedule.slice_policy import NONE
from ringtune.schedule.whose_rows.users import users_of


def agreed_model(nodes: Sequence[NodeFacts]) -> ModelFacts:
    """Return the model that all nodes have.

    Raises:
        ModelError: two nodes have different ones.
    """
    first = nodes[0]
    for node in nodes[1:]:
        if node.model.digest != first.model.digest:
            raise ModelError(
                f"nodes {first.node} and {node.node} have different models ({first.model.digest[:12]}… and "
                f"{node.model.digest[:12]}…); copy the same folder to both"
            )
    return first.model


def agreed_labels(job: Job, nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """Sort the class names of a run: the job's ``data.labels``, or the union of the owners' names.

    A task without classes has none.

    Raises:
        DataError: fewer than two names, or a node has rows of a class outside them.
    """
    if job.model.task not in NAMED_TASKS:
        return ()
    labels = tuple(sorted(job.data.labels or {label for node in nodes for label in node.labels}))
    name, key = ("tag", "data.tags") if job.model.task == TAGGING else ("class", "data.label")
    if len(labels) < 2:
        names = "tags" if name == "tag" else "classes"
        raise DataError(f"the owners' data has the {names} {list(labels)}, a classifier needs two; check {key}")
    for node in nodes:
        for kind, found in (("training", node.labels), ("evaluation", node.eval_labels)):
            outside = sorted(set(found) - set(labels))
            if outside:
                names = "rows of class" if name == "class" else "words of tag"
                raise DataError(
                    f"node {node.node} has {kind} {names} {outside[0]!r}, those of this run are {', '.join(labels)}; "
                    "add it to data.labels or remove the rows"
                )
    return labels


def job_draft(job: Job, nodes: Sequence[NodeFacts], model: ModelFacts) -> Draft:
    """Make the course of a job on these nodes; the private blocks, which every owner runs itself, never train."""
    owners = tuple(_owner(job, node) for node in nodes if node.train_rows)
    if not owners:
        raise DataError("no node has training rows; give at least one its file with --data")
    train, private_blocks, family = job.train, job.privacy.private_blocks, family_named(model.model_type)
    configs = (job.adapter.config, *job.offload.chosen_adapters.values())
    course = Course(
        method=job.method,
        num_blocks=model.num_blocks,
        owners=owners,
        num_steps=train.num_steps([owner.train_rows for owner in owners]),
        local_iterations=train.local_iterations,
        batch_size=train.batch_size,
        microbatches=train.microbatches,
        max_length=model.fixed_tokens or train.max_length,
        hidden_size=model.hidden_size,
        eval_every=train.eval_every,
        checkpoint_every=train.checkpoint_every,
        wire_dtype=job.wire.dtype,
        labels=agreed_labels(job, nodes),
        seed=train.seed,
        turns=train.turns,
        frozen_blocks=private_blocks,
        frozen=frozen_of(job, nodes)[0],
        head_tokens=family.head_tokens(job.model.task),
        trims=bool(family.head_tokens(job.model.task)) and may_trim(family, configs, dropout=train.dropout),
    )
    if course.num_steps:
        check_warmup(train, course.num_steps, course.method.rate_at(course, course.num_steps - 1)[1])
    kinds_of(job, users_of(course))  # refuses an adapter of a user who is none of the run
    draft = Draft(
        course=course,
        private_blocks=private_blocks,
        state_on_disk=_state_on_disk(job),
        copies=job.recovery.copies == NEXT and not why_it_stays(course, ()),
        helper_of=named_helpers(job, nodes),
        manner=job.offload.manner,
    )
    return with_activations(job, draft, model)


def _owner(job: Job, node: NodeFacts) -> Owner:
    if job.data.user and not node.users:
        raise DataError(
            f"the job says data.user = {job.data.user!r}, and nothing is known of the users of node {node.node}; "
            "measure anew with this job"
        )
    users = node.users if job.data.user else ()
    return Owner(node=node.node, train_rows=node.train_rows, eval_rows=node.eval_rows, users=users)


def check_same_users(owner: Owner, facts: NodeFacts, before: str, advice: str) -> None:
    """Refuse an owner whose rows are of other users than a plan says.

    Args:
        owner: of the plan.
        facts: of the node, as it is now.
        before: what comes before the plan's users in the message.
        advice: what can be done.

    Raises:
        DataError: names the node, and both.
    """
    if owner.users and facts.users != owner.users:
        raise DataError(
            f"node {owner.node} has rows of {users_text(facts.users, but=owner.users)}, {before} "
            f"{users_text(owner.users, but=facts.users)}; {advice}"
        )


def named_helpers(job: Job, nodes: Sequence[NodeFacts]) -> Mapping[str, str]:
    """The helper of each host that a job names.

    Raises:
        JobError: a name is that of no node; names the nearest.
    """
    known = [node.node for node in nodes]
    for host, helper in job.offload.helpers.items():
        for name in (host, helper):
            if name not in known:
                advice = nearest(name, known)
                raise JobError(f"offload.mode.{host} = {helper!r}: no node of this run has the name {name!r}; {advice}")
    return job.offload.helpers


def as_job_says(job: Job, draft: Draft, model: ModelFacts, nodes: Sequence[NodeFacts]) -> Draft:
    """Copy a draft with what another job says of method, frozen weights, activations and optimizer state."""
    ways = frozen_of(job, nodes)
    frozen = draft.course.frozen if draft.course.frozen in ways else ways[0]
    course = dataclasses.replace(draft.course, method=job.method, frozen=frozen, velora=None)
    bare = dataclasses.replace(
        draft, course=course, state_on_disk=_state_on_disk(job), activations=NONE, velora=None, may_project=False
    )
    return with_activations(job, bare, model)


def _state_on_disk(job: Job) -> bool:
    return job.hift is not None and job.hift.state == DISK
