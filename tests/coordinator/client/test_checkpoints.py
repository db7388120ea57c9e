"""Manifests in the folder of a run: whole ones only, the last two, and what a run can go on from."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from coordinator.client.checkpoints import RunCheckpoints, cut_metrics, find_resume
from coordinator.client.run_folder import RunFolder
from ringtune.errors import IntegrityError, JobError, PlanError, StorageError, UsageError
from ringtune.run_control.continuation import job_digest
from ringtune.schedule.migration import without_owner
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from tests.contract.run_control.test_checkpoint import JOB, PLAN, manifest
from tests.support.plans import changed, make_plan


def write_run(path: Path, *steps: int) -> RunCheckpoints:
    """A folder as a run leaves it."""
    with RunFolder(path) as folder:
        folder.write_text("job.toml", JOB.to_toml())
        folder.write_text("plan.json", json.dumps(PLAN.to_json()))
        for step in range(20):
            folder.add_metrics(json.dumps({"step": step}))
        for step in steps:
            folder.add_checkpoint(manifest(step))
    return RunCheckpoints(path)


def damage(path: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_checkpoints_keep_the_last_two(tmp_path: Path) -> None:
    """Older manifests go when a newer one is on disk; nothing half written is left."""
    checkpoints = write_run(tmp_path, 4, 8, 12)
    assert checkpoints.steps() == (12, 8)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-12.json", "step-8.json"]


def test_checkpoints_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is not there, the old ones can be gone on from."""
    checkpoints = write_run(tmp_path, 4, 8)

    def full(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"step-12\.json: No space left on device"):
        checkpoints.add(manifest(12))
    assert find_resume(tmp_path, JOB, print).manifests == (manifest(8), manifest(4))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_metrics_on_a_full_disk_are_an_error_of_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written first finds the disk full."""
    with RunFolder(tmp_path) as folder:
        monkeypatch.setattr(folder, "_target", lambda name: Path("/dev/full"))
        with pytest.raises(StorageError, match="No space left on device"):
            folder.add_metrics("{}")


def test_find_resume_gives_the_checkpoints_newest_first(tmp_path: Path) -> None:
    """Plan and manifests, without a word."""
    write_run(tmp_path, 4, 8)
    notes: list[str] = []
    resume = find_resume(tmp_path, JOB, notes.append)
    assert (resume.plan, resume.manifests, notes) == (PLAN, (manifest(8), manifest(4)), [])


def test_find_resume_passes_a_damaged_manifest_over_and_says_so(tmp_path: Path) -> None:
    """The file is named, and the one before it is taken."""
    damage(write_run(tmp_path, 4, 8).path(8))
    notes: list[str] = []
    assert find_resume(tmp_path, JOB, notes.append).manifests == (manifest(4),)
    assert len(notes) == 1
    assert "step-8.json can't be used: the manifest is damaged" in notes[0]


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_in_the_place_of_a_manifest_is_passed_over(tmp_path: Path, kind: str) -> None:
    """The checkpoint before it is used; a run that goes on writes that step's manifest again."""
    checkpoints = write_run(tmp_path / "run", 4, 8)
    path = checkpoints.path(8)
    kept = path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    resume = find_resume(tmp_path / "run", JOB, print)
    assert resume is not None and resume.manifests == (manifest(4),)
    checkpoints.rewind_to(4)
    checkpoints.add(manifest(8))
    found = find_resume(tmp_path / "run", JOB, print)
    assert found is not None and found.manifests == (manifest(8), manifest(4))
    assert kept.is_file()


def test_find_resume_never_begins_anew_behind_damage(tmp_path: Path) -> None:
    """If every manifest is damaged the user decides; both are named."""
    checkpoints = write_run(tmp_path, 4, 8)
    damage(checkpoints.path(4))
    checkpoints.path(8).write_text("")
    with pytest.raises(IntegrityError, match=r"step-8\.json.*step-4\.json.*without --resume"):
        find_resume(tmp_path, JOB, print)


def test_find_resume_refuses_a_renamed_manifest(tmp_path: Path) -> None:
    """A copy under another step's name is not that step."""
    checkpoints = write_run(tmp_path, 4)
    checkpoints.path(4).rename(checkpoints.path(8))
    with pytest.raises(IntegrityError, match="it is of step 4"):
        find_resume(tmp_path, JOB, print)


def test_find_resume_refuses_another_job_by_its_keys(tmp_path: Path) -> None:
    """What differs is named with both values; patience may differ."""
    write_run(tmp_path, 4)
    with pytest.raises(JobError, match=r"train\.learning_rate was 0\.001, now 0\.5; train\.seed was 0, now 3"):
        find_resume(tmp_path, JOB.with_overrides({"train.seed": 3, "train.learning_rate": 0.5}), print)
    assert find_resume(tmp_path, JOB.with_overrides({"runtime.wait_s": 5.0}), print)


def test_find_resume_refuses_a_checkpoint_of_another_plan(tmp_path: Path) -> None:
    """A plan.json that was copied from another run."""
    write_run(tmp_path, 4)
    (tmp_path / "plan.json").write_text(json.dumps(changed(PLAN, seed=7).to_json()))
    with pytest.raises(PlanError, match="step 4 is of plan"):
        find_resume(tmp_path, JOB, print)


def test_find_resume_refuses_a_damaged_plan(tmp_path: Path) -> None:
    """Without the plan nothing fits."""
    write_run(tmp_path, 4)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"plan\.json can't be read"):
        find_resume(tmp_path, JOB, print)


def test_find_resume_of_a_run_without_checkpoint_begins_anew(tmp_path: Path) -> None:
    """Killed before the first one: the same command still leads to the result, and says what it does."""
    write_run(tmp_path)
    notes: list[str] = []
    assert find_resume(tmp_path, JOB, notes.append) is None
    assert "the run starts from the beginning" in notes[0]


@pytest.mark.parametrize("steps", [(), (4,), (4, 8)])
def test_find_resume_leaves_a_finished_run_alone(tmp_path: Path, steps: tuple[int, ...]) -> None:
    """With or without checkpoints: it says that the run is finished, and every file is as before."""
    write_run(tmp_path, *steps)
    (tmp_path / "report.json").write_text('{"steps": 8}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is finished, nothing was changed"):
        find_resume(tmp_path, JOB, print)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_find_resume_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """A misspelt --out begins nothing."""
    with pytest.raises(UsageError, match="has no run to resume"):
        find_resume(tmp_path / "nowhere", JOB, print)


def test_folder_goes_back_to_the_step_that_is_gone_on_from(tmp_path: Path) -> None:
    """Metrics of later steps and a torn line go, newer manifests too."""
    checkpoints = write_run(tmp_path, 4, 8)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    with RunFolder(tmp_path, resume=True) as folder:
        folder.rewind_to(4)
    assert checkpoints.steps() == (4,)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]


def test_folder_that_goes_back_drops_what_will_come_again(tmp_path: Path) -> None:
    """A decision or an evaluation of the step that is gone on from is made again; the step itself is not."""
    write_run(tmp_path, 4, 8)
    lines = [("evaluation", 2), ("train", 3), ("unfreeze", 4), ("train", 4), ("evaluation", 4), ("train", 5)]
    texts = [json.dumps({"kind": kind, "step": step}) for kind, step in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(text + "\n" for text in texts))
    cut_metrics(tmp_path / "metrics.jsonl", 4)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [texts[0], texts[1], texts[3]]


def test_cut_metrics_without_a_file_does_nothing(tmp_path: Path) -> None:
    """The user may have removed it."""
    cut_metrics(tmp_path / "metrics.jsonl", 4)
    assert not list(tmp_path.iterdir())


def test_folder_that_is_replaced_begins_without_checkpoints(tmp_path: Path) -> None:
    """--replace begins anew, the nodes' shards included; those of the earlier run are beside it."""
    out = tmp_path / "run"
    checkpoints = write_run(out, 4)
    (checkpoints.node_states() / "node-0").mkdir(parents=True)
    with RunFolder(out, replace=True) as folder:
        assert not folder.checkpoints.steps() and not folder.checkpoints.node_states().exists()
    assert folder.replaced is not None and (folder.replaced / "checkpoints/nodes/node-0").is_dir()
    assert find_resume(folder.replaced, JOB, print) is not None


def test_checkpoints_around_the_loss_of_an_owner(tmp_path: Path) -> None:
    """After the loss: those that were written since; with none since then, the plan of before, with the owner."""
    job = JOB.with_overrides({"train.max_steps": 20})
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=20)
    after = Plan(without_owner(plan.course, "b", 5), plan.placements)
    after = after.extended(Placement(slices=(Slice(node="a", start=0, stop=4),)), 5, placement_number=2)
    with RunFolder(tmp_path) as folder:
        folder.write_text("job.toml", job.to_toml())
        folder.write_text("plan.json", json.dumps(after.to_json()))
        for step in (4, 8):
            folder.add_checkpoint(manifest(step, plan_digest=plan.digest, job_digest=job_digest(job)))
    notes: list[str] = []
    resume = find_resume(tmp_path, job, notes.append)
    assert resume is not None and resume.plan.course == plan.course
    assert [one.step for one in resume.manifests] == [8, 4]
    assert notes == ["the newest checkpoint is from before the rows of b were left out: they are needed again"]
    newest = manifest(10, plan_digest=after.at(2).digest, job_digest=job_digest(job), placement_number=2)
    newest = dataclasses.replace(newest, shards=newest.shards[:1])
    RunCheckpoints(tmp_path).add(newest)
    notes.clear()
    resume = find_resume(tmp_path, job, notes.append)
    assert resume is not None and resume.plan == after
    assert resume.manifests == (newest,)
    assert notes == ["the checkpoint of step 8 is from before an owner was left out, so it is not used"]
