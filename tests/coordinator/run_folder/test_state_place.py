"""A HiFT run goes on with its optimizer state in memory or on disks, whichever it was; dropped state is another run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from coordinator.run_folder.checkpoints import find_resume
from coordinator.run_folder.folder import RunFolder
from ringtune.errors import JobError
from ringtune.jobs.job import Job
from ringtune.rounds.job_changes import job_digest
from ringtune.rounds.state_place import with_state_where_asked
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.plan import Plan
from tests.contract.rounds.test_checkpoint import JOB, PLAN, manifest
from tests.support.plans import changed


def hift_run(state: str) -> tuple[Job, Plan]:
    """The job and the plan of a run with its state there."""
    job = JOB.with_overrides({"train.method": "hift", "train.max_steps": 20, "hift.state": state})
    return job, with_state_where_asked(changed(PLAN, method=Hift()), job)


def write_run(path: Path, job: Job, plan: Plan, *steps: int) -> None:
    """A folder as a run leaves it, or goes on in it."""
    with RunFolder(path, resume=path.exists()) as folder:
        folder.write_job(job.to_toml())
        folder.write_text("plan.json", json.dumps(plan.to_json()))
        for step in steps:
            found = manifest(step, plan_digest=plan.digest, job_digest=job_digest(job))
            folder.add_checkpoint(found)


@pytest.mark.parametrize(("was", "now"), [("memory", "disk"), ("disk", "memory")])
def test_run_goes_on_with_its_state_elsewhere_and_back(tmp_path: Path, was: str, now: str) -> None:
    """The plan says where state is from here on; checkpoints of both places are known, also after going back."""
    before, after = hift_run(was), hift_run(now)
    write_run(tmp_path / "run", *before, 8)
    notes: list[str] = []
    resume = find_resume(tmp_path / "run", after[0], notes.append)
    assert resume is not None
    assert resume.plan == after[1] != before[1]
    assert (resume.lengths, [one.step for one in resume.manifests]) == ((), [8])
    assert len(notes) == 1
    assert "hift.state" in notes[0]
    write_run(tmp_path / "run", *after, 12)
    again = find_resume(tmp_path / "run", before[0], notes.append)
    assert again is not None
    assert (again.plan, [one.step for one in again.manifests]) == (before[1], [12, 8])


def test_run_gets_longer_and_its_state_moves_at_once(tmp_path: Path) -> None:
    """Both changes leave the checkpoints known."""
    before, (job, plan) = hift_run("memory"), hift_run("disk")
    write_run(tmp_path / "run", *before, 8)
    resume = find_resume(tmp_path / "run", job.with_overrides({"train.max_steps": 40}), print)
    assert resume is not None
    assert resume.plan == dataclasses.replace(plan, course=dataclasses.replace(plan.course, num_steps=40))


@pytest.mark.parametrize(("was", "now"), [("memory", "drop"), ("drop", "disk")])
def test_dropped_state_is_another_run(tmp_path: Path, was: str, now: str) -> None:
    """Forgetting moments changes the result, so the key is refused with both values."""
    write_run(tmp_path / "run", *hift_run(was), 8)
    with pytest.raises(JobError, match=rf"hift\.state was '{was}', now '{now}'"):
        find_resume(tmp_path / "run", hift_run(now)[0], print)


def test_other_keys_stay_refused_where_state_moves(tmp_path: Path) -> None:
    """Only what has to be mended is named."""
    write_run(tmp_path / "run", *hift_run("memory"), 8)
    other = hift_run("disk")[0].with_overrides({"train.seed": 9})
    with pytest.raises(JobError, match=r"another job: train\.seed was 0, now 9; give"):
        find_resume(tmp_path / "run", other, print)
