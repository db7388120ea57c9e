"""Give a draft what its job says of activations, and compare a given plan with that."""

from __future__ import annotations

import dataclasses

from coordinator.planner.draft import Draft
from ringtune.costs.activation_policy import job_velora
from ringtune.costs.profile import ModelFacts
from ringtune.jobs.job import Job
from ringtune.jobs.memory import AUTO, NONE


def with_activations(job: Job, draft: Draft, model: ModelFacts) -> Draft:
    """Give a draft the policy of its job for activations.

    With ``velora`` and ``both`` the course has VeLoRA in every block that may train; with ``auto`` the draft says how
    slices may have it, which is never beside operations. An evaluation keeps nothing.

    Raises:
        JobError: VeLoRA's layers do not train in this model, or have fewer inputs than parts.
    """
    activations, course = job.memory.activations, draft.course
    velora = job_velora(job, course, model)
    if activations == NONE or not course.num_steps:
        return draft
    draft = dataclasses.replace(draft, activations=activations)
    if activations == AUTO:
        return dataclasses.replace(draft, velora=None if job.operations.is_any else velora)
    return dataclasses.replace(draft, course=dataclasses.replace(course, velora=velora))
