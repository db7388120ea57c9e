"""Give a draft what its job says of activations, and compare a given plan with that."""

from __future__ import annotations

import dataclasses

from coordinator.planner.draft import Draft
from ringtune.costs.activation_policy import job_velora, proposed_velora
from ringtune.costs.profile import ModelFacts
from ringtune.jobs.job import Job
from ringtune.jobs.memory import AUTO
from ringtune.schedule.slice_policy import NONE


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
