"""Which runs can be made longer, and under which digests their checkpoints are known."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.job.job import Job
from ringtune.run_control.continuation import Length, digests, job_digest, longer, num_steps_of
from ringtune.schedule.course import HelperSettings
from ringtune.schedule.plan import Plan
from ringtune.techniques.offload import helped
from tests.support.cases import cases
from tests.support.fake_agents import job
from tests.support.plans import changed, make_plan


def plan_of(wanted: Job) -> Plan:
    """A plan of two owners for a job."""
    made = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_blocks=4, max_length=8, hidden_size=8)
    made = changed(made, num_steps=0, local_iterations=wanted.train.local_iterations, method=wanted.method)
    return changed(made, num_steps=num_steps_of(wanted, made))


@cases(
    ("changes", "message"),
    [
        ({"train__rounds": 1}, "the run has 8 steps and the job asks for 4; a run can get longer, not shorter"),
        ({"train__rounds": 5, "train__lr_schedule": "linear"}, "train.lr_schedule = 'linear' ends with the last step"),
        ({"train__rounds": 5, "train__lr_schedule": "cosine"}, "train.lr_schedule = 'cosine' ends with the last step"),
        ({"train__rounds": 5, "unfreeze__at": "auto"}, "unfreeze.at = 'auto' decides nothing near the last step"),
    ],
)
def test_run_that_depends_on_its_length_is_not_made_longer(changes: dict[str, object], message: str) -> None:
    """The key is named; a shorter run is none that goes on."""
    short = job(**{**changes, "train__rounds": 2})
    with pytest.raises(JobError, match=message):
        longer(plan_of(short), job(**changes))


@cases(("interval", "is_possible"), [(1, True), (3, False), (4, True)])
def test_run_whose_helpers_updated_early_at_its_end_is_not_made_longer(interval: int, is_possible: bool) -> None:
    """Of 8 steps an interval of 3 leaves two for an update that a longer run does not have; one of 4 leaves none."""
    settings = {"train__method": "all", "offload__mode": {"a": "b"}, "offload__interval": interval}
    short, long = job(train__rounds=2, **settings), job(train__rounds=5, **settings)
    plan = helped(plan_of(short), {"a": "b"}, HelperSettings(interval=interval))
    if is_possible:
        assert longer(plan, long).course.num_steps == 20
        return
    with pytest.raises(JobError, match=r"offload.interval = 3 had its last update early, at step 8, so a longer run"):
        longer(plan, long)


def test_checkpoints_are_known_by_every_length_that_the_run_had() -> None:
    """Rounds, steps and epochs alike; another job is not known whatever its length."""
    earlier = [job(train__rounds=2), job(train__max_steps=12), job(train__epochs=9)]
    now = job(train__rounds=5)
    found = digests(now, plan_of(now), [Length.of(entry) for entry in earlier])
    assert found == {job_digest(entry): {plan_of(entry).digest} for entry in (*earlier, now)}
    assert job_digest(job(train__rounds=2, train__seed=9)) not in found
