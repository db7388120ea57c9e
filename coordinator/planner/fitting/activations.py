"""Give a draft what its job says of activations, and compare a given plan with that."""

from __future__ import annotations

import dataclasses

from coordinator.planner.draft import Draft
from ringtune.costs.activation_policy import job_velora, proposed_velora
from ringtune.costs.profile import ModelFacts
from ringtune.errors import PlanError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.memory import AUTO
from ringtune.schedule.plan import Plan
from ringtune.schedule.slice_policy import BOTH, NONE, RECOMPUTE, SlicePolicy
from ringtune.schedule.turns.versions import ever_trained


def with_activations(job: Job, draft: Draft, model: ModelFacts) -> Draft:
    """Give a draft the policy of its job for activations.

    With ``velora`` and ``both`` the course has VeLoRA in every block that may train; with ``auto`` the draft says how
    slices may have it, which is never beside operations. An evaluation keeps nothing.

    Raises:
        JobError: VeLoRA's layers do not train in this model, or have fewer inputs than parts.
    """
    activations, course = job.memory.activations, draft.course
    velora = job_velora(job.velora, job.adapter.config, course, model)
    if activations == NONE or not course.num_steps:
        return draft
    draft = dataclasses.replace(draft, activations=activations)
    if activations == AUTO:
        if job.operations.is_any:
            return draft
        proposed = velora or proposed_velora(job.adapter.config, course, model)
        return dataclasses.replace(draft, velora=proposed, may_project=velora is not None)
    return dataclasses.replace(draft, course=dataclasses.replace(course, velora=velora))


def check_given_activations(job: Job, plan: Plan, model: ModelFacts) -> None:
    """Refuse a given plan whose slices save activations in another way than the job says.

    With ``auto`` they may run any blocks again, and have VeLoRA where the job allows it.

    Raises:
        PlanError: names the key, and what plan and job say.
        JobError: the job's VeLoRA does not fit the model.
    """
    activations, course = job.memory.activations, plan.course
    anew = "change it, or plan anew with 'ringtune plan JOB --save FILE'"
    wanted = job_velora(job.velora, job.adapter.config, course, model)
    if activations == AUTO and course.velora is not None and wanted is not None:
        wanted = dataclasses.replace(wanted, blocks=course.velora.blocks)
    if course.velora != wanted and not (activations == AUTO and course.velora is None):
        has = "other settings of VeLoRA" if course.velora and wanted else "VeLoRA" if course.velora else "no VeLoRA"
        raise PlanError(f"the plan has {has}, the job says memory.activations = {activations!r} with [velora]; {anew}")
    for piece in plan.placement.hosts if activations != AUTO and course.num_steps else ():
        has = SlicePolicy.of(plan, piece.start, piece.stop).name
        lowest = ever_trained(course).lowest
        if piece.stop > lowest and (has in (RECOMPUTE, BOTH)) != (activations in (RECOMPUTE, BOTH)):
            raise PlanError(
                f"the plan has the policy {has!r} for activations at node {piece.node}, the job says "
                f"memory.activations = {activations!r}; {anew}"
            )
