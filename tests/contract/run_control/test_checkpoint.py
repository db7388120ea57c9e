"""Manifests: damage is seen, strangers are refused by name, and the newest whole checkpoint is chosen."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ringtune.errors import IntegrityError, PlanError, UsageError
from ringtune.job.job import Job, Model
from ringtune.run_control.checkpoint import CheckpointManifest, Resume, Shard
from ringtune.run_control.continuation import changed_keys, job_digest
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.turns import NOTHING_KNOWN, Evaluations, Unfreezing
from tests.support.cases import cases
from tests.support.choosing import make_choice, table_of
from tests.support.moves import moving
from tests.support.plans import changed, make_method, make_plan, unfreezing_after

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=20)
JOB = Job(model=Model(path="model"))
RUN = "r20260101-000000-00000000"


def manifest(step: int = 4, **changes: Any) -> CheckpointManifest:
    """A checkpoint of the plan."""
    values: dict[str, Any] = {
        "run_id": RUN,
        "plan_digest": PLAN.digest,
        "job_digest": job_digest(JOB),
        "model_digest": "ab" * 32,
        "step": step,
        "holder": "a",
        "shards": tuple(Shard(node=node, sha256="cd" * 32, size_bytes=10) for node in PLAN.nodes),
    }
    return CheckpointManifest(**{**values, **changes})


@cases(
    ("name", "value"),
    [
        ("unfreezing", Unfreezing(num_turns=2, recent=(0.1 + 0.2,), best=1 / 3, waited_steps=2)),
        ("evaluations", Evaluations(step=4, best=0.5, best_step=2, waited=1)),
    ],
)
def test_manifest_keeps_what_is_known_of_losses_and_evaluations(name: str, value: Any) -> None:
    """Every bit of them decides; and a manifest that was written without them keeps its digest."""
    known = manifest(**{name: value})
    assert CheckpointManifest.parse(json.dumps(known.to_json())) == known
    assert known.digest != manifest().digest
    older = {key: each for key, each in manifest().to_json().items() if key != name}
    assert CheckpointManifest.from_json(older) == manifest()


def test_manifest_of_a_version_with_the_former_key_keeps_its_digest() -> None:
    """Version 0.2.0 called the placement number ``epoch``; the digest is what it wrote for this manifest."""
    moved = manifest(placement_number=1, plan_digest="ab" * 32, job_digest="ab" * 32)
    assert moved.digest == "80904aa77d09e3561fd5006493ae2e422277152951c8d5d1906681b489f09b93"
    older = {"epoch" if name == "placement_number" else name: value for name, value in moved.to_json().items()}
    assert older["epoch"] == moved.to_json()["placement_number"] == 1
    assert CheckpointManifest.from_json(older) == moved


def test_resume_of_a_run_that_decides_needs_its_losses() -> None:
    """A manifest without them, or with those of another step, is of another run."""
    plan = changed(PLAN, method=make_method(unfreeze="auto"))
    known = unfreezing_after(plan.course, [1.0, 0.5])
    fits = manifest(plan_digest=plan.digest, unfreezing=known)
    Resume(plan=plan, manifests=(fits,)).check(JOB)
    for wrong in (dataclasses.replace(fits, unfreezing=NOTHING_KNOWN), dataclasses.replace(fits, step=6)):
        with pytest.raises(PlanError, match="the checkpoint is of another run"):
            Resume(plan=plan, manifests=(wrong,)).check(JOB)


def test_manifest_keeps_the_operation_table_in_force() -> None:
    """It is read again as it was, counts in the digest, and one without it is as it was before there were tables."""
    plan = changed(PLAN, choice=make_choice())
    saved = manifest(plan_digest=plan.digest, operations=table_of(plan.course, 1))
    assert CheckpointManifest.parse(json.dumps(saved.to_json())) == saved
    assert saved.digest != dataclasses.replace(saved, operations=table_of(plan.course, 2)).digest
    assert "operations" not in manifest().to_json()
    spoiled = json.loads(json.dumps(saved.to_json()))
    spoiled["operations"]["rows"][0][2] = "!"
    with pytest.raises(IntegrityError, match="the manifest is damaged"):
        CheckpointManifest.from_json(spoiled)


def test_resume_of_a_run_that_chooses_needs_its_table() -> None:
    """A manifest without one, or with one of another course, is of another run."""
    plan = changed(PLAN, choice=make_choice())
    fits = manifest(plan_digest=plan.digest, operations=table_of(plan.course, 1))
    Resume(plan=plan, manifests=(fits,)).check(JOB)
    other = make_plan([("a", 0, 3), ("b", 3, 5)], ["a"], num_blocks=5)
    for wrong, message in (
        (None, "has no table of operations"),
        (table_of(changed(other, choice=make_choice()).course, 1), "it has to be 8 of"),
    ):
        with pytest.raises(PlanError, match=message):
            Resume(plan=plan, manifests=(dataclasses.replace(fits, operations=wrong),)).check(JOB)


@cases("at", range(0, 600, 23))
def test_manifest_with_any_damage_is_refused(at: int) -> None:
    """A flipped bit or a missing end never passes for a checkpoint."""
    text = json.dumps(manifest().to_json()).encode()
    at %= len(text)
    flipped = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
    for damaged in (flipped, text[:at]):
        with pytest.raises(IntegrityError, match="damaged"):
            CheckpointManifest.parse(damaged.decode(errors="replace"))


@cases("run_id", ["../x", "", "r20260101-000000-0000000/"])
def test_manifest_with_a_name_that_could_be_a_path_is_refused(run_id: str) -> None:
    """Run id and node names become parts of paths on the nodes."""
    value = dataclasses.asdict(manifest()) | {"run_id": run_id}
    with pytest.raises(IntegrityError, match="run id"):
        CheckpointManifest.from_json(value)


def test_resume_reads_what_it_wrote() -> None:
    """There and back."""
    resume = Resume(plan=PLAN, manifests=(manifest(8), manifest(4)))
    assert Resume.parse(resume.to_text()) == resume
    resume.check(JOB)


def test_resumed_run_that_can_not_move_leaves_later_placements_out() -> None:
    """Resumed elsewhere, and then again from a checkpoint of before: the placement in between is of no part of it."""
    hift = changed(PLAN, method=Hift())
    for plan, after in ((hift, 1), (PLAN, 2)):
        resume = Resume(plan=moving(plan, (2, [("a", 0, 4)])), manifests=(manifest(),))
        assert len(resume.rest(0).placements) == len(resume.whole(0).placements) == after
        assert [one.placement_number for one in resume.whole(1).placements] == [0, 1]
        assert resume.rest(1).placements == resume.plan.placements[1:]


@cases(
    ("changes", "message"),
    [
        ({"job_digest": "00"}, "step 4 is of another job"),
        ({"plan_digest": "00"}, "step 4 is of plan 00"),
        ({"shards": manifest().shards[:1]}, "a shard of every node"),
        ({"step": 3}, "turn boundary"),
        ({"holder": "b"}, "no owner"),
    ],
)
def test_resume_refuses_a_checkpoint_of_something_else(changes: dict[str, Any], message: str) -> None:
    """Another job, plan or set of nodes is refused by name."""
    with pytest.raises(PlanError, match=message):
        Resume(plan=PLAN, manifests=(manifest(**changes),)).check(JOB)


def test_resume_refuses_mixed_runs_and_nothing() -> None:
    """Checkpoints of two runs in one folder, or none at all."""
    other = manifest(8, run_id="r20260101-000000-11111111")
    with pytest.raises(PlanError, match="different runs"):
        Resume(plan=PLAN, manifests=(other, manifest())).check(JOB)
    value = json.loads(Resume(plan=PLAN, manifests=(other,)).to_text())
    with pytest.raises(UsageError, match="no checkpoint"):  # the coordinator asks whose run it is before it checks it
        Resume.parse(json.dumps({**value, "manifests": []}))


@cases("text", ["", "[]", "{}", '{"plan": {}, "manifests": [1]}', '{"plan": 1, "manifests": []}'])
def test_resume_that_is_not_readable_is_refused(text: str) -> None:
    """Nothing that comes over the wire is trusted."""
    with pytest.raises((IntegrityError, PlanError)):
        Resume.parse(text)


@cases("length", [{"rounds": "5"}, {"epochs": []}, {"weeks": 5}, 5])
def test_resume_with_a_length_that_is_none_is_refused(length: object) -> None:
    """What has another type would fail in the middle of planning."""
    value = json.loads(Resume(plan=PLAN, manifests=(manifest(),)).to_text())
    with pytest.raises(IntegrityError, match="a length that the run had is damaged"):
        Resume.parse(json.dumps(value | {"lengths": [length]}))


def test_manifest_of_the_end_of_a_turn_has_no_shards_and_says_who_trained_it() -> None:
    """It reads what it wrote; one that does not say who trained it has the digest that it had."""
    kept = manifest(8, shards=(), attempt=manifest().run_id)
    assert CheckpointManifest.parse(json.dumps(kept.to_json())) == kept
    assert (kept.name, manifest(8).name) == ("the end of step 8", "the checkpoint of step 8")
    assert "attempt" not in manifest().to_json()
    resume = Resume(plan=PLAN, manifests=(kept, manifest(4)))
    resume.check(JOB)
    assert (resume.saved_step, Resume(plan=PLAN, manifests=(kept,)).saved_step) == (4, -1)
    with pytest.raises(IntegrityError, match="run id"):
        CheckpointManifest.from_json({**kept.to_json(), "attempt": "../x"})


def test_job_digest_is_that_of_versions_that_did_not_have_every_key() -> None:
    """A checkpoint of before goes on; what such a key says otherwise is another job."""
    job = Job(model=Model(path="m"))
    assert job_digest(job) == "e0c2301db82f3bd4e7fbb7590fc88e8873d8925effa59bd345bf3d83b1164441"
    assert job_digest(job.with_overrides({"train.turns": "rows"})) != job_digest(job)
    assert changed_keys(job, job.with_overrides({"train.turns": "rows"})) == ("train.turns",)


def test_job_digest_ignores_only_what_can_not_change_the_result() -> None:
    """Patience and threads may change between the parts of a run, and nothing else."""
    assert job_digest(JOB.with_overrides({"runtime.wait_s": 1.0})) == job_digest(JOB)
    assert job_digest(JOB.with_overrides({"train.seed": 1})) != job_digest(JOB)
    assert changed_keys(JOB, JOB.with_overrides({"train.max_steps": 3, "runtime.lease_s": 1.0})) == (
        "train.max_steps",
        "train.rounds",
    )
