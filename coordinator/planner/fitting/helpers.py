"""Helpers as a job names them: what a given plan has to have of them, and who is named without need."""

from __future__ import annotations

from ringtune.errors import PlanError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.offload import AUTO
from ringtune.schedule.helped import helped, helpers_by_host
from ringtune.schedule.helping.offload import IN_STEP, Manner
from ringtune.schedule.plan import Plan


def check_given_helpers(job: Job, plan: Plan) -> None:
    """Refuse a given plan with other helpers than its job names; where the job lets the planner choose, any will do.

    Raises:
        PlanError: says who helps whom in the plan and in the job.
    """
    wish = job.offload
    if wish.mode == AUTO:
        _check_manner(job, plan)
        return
    if helped(plan, wish.helpers, wish.manner) != plan:
        raise PlanError(
            f"the plan has {_text(helpers_by_host(plan))}, the job says offload.mode = {_text(wish.helpers)} with "
            f"{_manner_text(wish.manner)}; plan anew, or change [offload]"
        )


def _check_manner(job: Job, plan: Plan) -> None:
    offload = plan.course.offload
    has = offload.manner if offload else IN_STEP
    helps = bool(plan.placement.helpers)
    if (helps or job.offload.manner.has_users) and has != job.offload.manner:
        text = f"helpers with {_manner_text(has)}" if helps else "no helpers"
        raise PlanError(
            f"the plan has {text}, the job says {_manner_text(job.offload.manner)}; plan anew, or change [offload]"
        )


def unhelped_note(job: Job, plan: Plan) -> str:
    """Say which hosts a job names helpers for although none of their blocks trains; empty if there are none."""
    idle = [host for host in job.offload.helpers if host not in helpers_by_host(plan)]
    return (
        f"offload.mode names helpers for {', '.join(idle)}, where no block trains: nobody helps there" if idle else ""
    )


def _manner_text(manner: Manner) -> str:
    more = [word for word, is_so in (("merged", manner.merged), ("overlap", manner.overlap)) if is_so]
    more += [f"users {manner.users}"] if manner.has_users else []
    return ", ".join([f"interval {manner.interval}", f"pairs in {manner.pairs}", *more])


def _text(helper_of: object) -> str:
    return str(helper_of) if helper_of else "no helpers"
