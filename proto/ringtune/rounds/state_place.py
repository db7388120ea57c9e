"""Where the optimizer state of units that rest may be when a run goes on: memory and disk give the same bits.

It is the placement's matter, so ``hift.state`` may change from one to the other with ``--resume``. State that is
dropped belongs to the course: a run neither begins nor ends to drop it.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from ringtune.jobs.job import Job
from ringtune.schedule.methods.hift import DISK, MEMORY
from ringtune.schedule.plan import Plan

STATE_KEY: Final = "hift.state"
"""The key of a job that says where the state of units is that rest."""

_SAME_BITS: Final = (MEMORY, DISK)


def only_moves_state(before: Job, now: Job) -> bool:
    """Whether two jobs differ in no more than where state rests, as far as ``hift.state`` goes."""
    if before.hift is None or now.hift is None:
        return False
    return before.hift.state in _SAME_BITS and now.hift.state in _SAME_BITS


def with_state_where_asked(plan: Plan, job: Job) -> Plan:
    """Copy a plan so that its nodes keep the state of units that rest where the job wants it."""
    on_disk = job.keeps_state_on_disk
    placements = tuple(dataclasses.replace(one, state_on_disk=on_disk) for one in plan.placements)
    return dataclasses.replace(plan, placements=placements)


def state_places(job: Job, plan: Plan) -> tuple[tuple[Job, Plan], ...]:
    """List a job and its plan with state in each place that gives the same bits; as they are where there is one."""
    if job.hift is None or job.hift.state not in _SAME_BITS:
        return ((job, plan),)
    jobs = [job.with_overrides({STATE_KEY: state}) for state in _SAME_BITS]
    return tuple((one, with_state_where_asked(plan, one)) for one in jobs)
