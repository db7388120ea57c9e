"""A link that is too slow for the deadline of a run is refused in planning, not by a node in the first step."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.planner.make_plan import make_plan
from coordinator.planner.waits import check_waits
from ringtune.costs.profile import Profile
from ringtune.errors import PlanError
from ringtune.jobs.job import Job
from ringtune.schedule.plan import Plan
from tests.coordinator.planner.test_replicas import boards, job_of


def planned(rate: float, **changes: object) -> tuple[Job, Plan, Profile]:
    """A plan for three boards, and their profile with links of another rate."""
    job = job_of(placement__replicas="never", **changes)
    facts, links = boards((1, 1, 1))
    found = make_plan(job, facts, links=links)
    slow = tuple(dataclasses.replace(link, rate_bytes_per_s=rate) for link in links)
    return job, found.plan, Profile(nodes=tuple(facts.values()), links=slow)


def test_waits_are_long_enough_for_links_of_a_common_rate() -> None:
    """1 Mbit/s and the default of five minutes."""
    check_waits(*planned(125e3))


def test_waits_that_a_message_outlasts_are_refused() -> None:
    """Both times and the link are named; a longer wait is a remedy, and so are smaller messages."""
    with pytest.raises(PlanError, match=r"from n\d to n\d \(0.008 Mbit/s\), but nodes wait for .*wait_s = 300 s"):
        check_waits(*planned(1e3))
    check_waits(*planned(1e3, runtime__wait_s=100_000))


def test_waits_at_links_that_nobody_measured_are_not_judged() -> None:
    """What is assumed of them may be far from the truth."""
    job, plan, profile = planned(1e3)
    links = tuple(dataclasses.replace(link, is_assumed=True) for link in profile.links)
    check_waits(job, plan, dataclasses.replace(profile, links=links))
