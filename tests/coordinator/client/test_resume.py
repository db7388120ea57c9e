"""Checkpoints of whole runs over gRPC: manifests in a folder, saving, resuming, and optimizer state on disks."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import queue
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from coordinator.client import submit
from coordinator.client.checkpoints import RunCheckpoints, cut_metrics, find_resume, force_to_disk
from coordinator.client.follow import Outcome
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client, Interrupts
from coordinator.run.driver import Driver
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from coordinator.server.coordinator import Coordinator
from ringtune.errors import (
    FrameError,
    IntegrityError,
    InterruptedRunError,
    JobError,
    ModelError,
    PeerLostError,
    PlanError,
    RingTuneError,
    StorageError,
    UsageError,
)
from ringtune.job.job import Job, load_job
from ringtune.run_control import events as rd
from ringtune.run_control.checkpoint import Resume
from ringtune.run_control.continuation import Length, job_digest, with_state_where_asked
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.migration import with_owner, without_owner
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.storage.strict import MAX_JSON_BYTES
from ringtune.v1 import control_pb2
from tests.contract.run_control.test_checkpoint import JOB as CHECKPOINT_JOB
from tests.contract.run_control.test_checkpoint import PLAN, manifest
from tests.support.fake_agents import CALL_S, MODEL, FakeAgent, FakeCluster, Notes, job, shard_digest, steps_of
from tests.support.plans import changed, make_plan
from tests.support.saved_runs import contents

JOB = job(train__checkpoint_every=2)


def run(
    cluster: FakeCluster,
    out: Path,
    *,
    resume: Resume | None = None,
    notes: Notes | None = None,
    job: Job = JOB,
    **more: Any,
) -> Outcome:
    """Run the job, or go on with it."""
    with RunFolder(out, resume=resume is not None) as folder, Client(cluster.server.address) as client:
        return client.run(RunRequest(job=job, resume=resume, **more), progress=notes or Progress(), folder=folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 8 steps, of which tests get copies."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with FakeCluster("a", "b") as cluster:
        run(cluster, out)
    return out


@pytest.fixture
def done(whole: Path, tmp_path: Path) -> Path:
    """The folder of a finished run of 8 steps."""
    return shutil.copytree(whole, tmp_path / "out")


@pytest.fixture
def stopped(done: Path) -> Path:
    """The folder of a run as it was after step 6, with some lines of metrics more."""
    return stop(done)


def stop(out: Path) -> Path:
    """Make the folder of a finished run one of a run that was stopped after step 6."""
    checkpoints = RunCheckpoints(out)
    (last, before), _ = checkpoints.read()
    shards = tuple(replace(shard, sha256=shard_digest(4)) for shard in before.shards)
    checkpoints.path(last.step).unlink()
    checkpoints.add(replace(before, step=4, shards=shards))
    (out / "report.json").unlink()
    assert checkpoints.steps() == (6, 4)
    return out


def test_run_writes_manifests_with_the_digests_of_every_node(tmp_path: Path) -> None:
    """The last two are kept, and nodes are told which shards they may drop."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path)
        manifests, damaged = RunCheckpoints(tmp_path).read()
        assert damaged == ()
        assert [manifest.step for manifest in manifests] == [8, 6]
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-6.json", "step-8.json"]
        for manifest in manifests:
            assert [(shard.node, shard.sha256) for shard in manifest.shards] == [
                (node, shard_digest(manifest.step)) for node in ("a", "b")
            ]
        assert all(step in (0, 2, 4, 6) for agent in cluster.agents.values() for step in agent.keeps_from)


def test_note_of_a_manifest_comes_to_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its answer; without it nodes would keep all shards of a run."""
    noted: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    driver_of = lambda _, run_id: SimpleNamespace(noted=lambda step: noted.put((run_id, step)))  # noqa: E731 - one call
    monkeypatch.setattr(Coordinator, "driver_of", driver_of)
    with FakeCluster("a") as cluster, Client(cluster.server.address) as client:
        client._note_saved("r20260101-000000-00000000", 4)
        assert noted.get(timeout=CALL_S) == ("r20260101-000000-00000000", 4)


def test_run_goes_on_with_the_same_plan_and_leaves_one_line_a_step(stopped: Path) -> None:
    """Nodes get the shard of the newest checkpoint; metrics have every step once."""
    newest = RunCheckpoints(stopped).steps()[0]
    resume = find_resume(stopped, JOB, print)
    assert resume is not None
    notes = Notes()
    with FakeCluster("a", "b", "c") as cluster:
        run(cluster, stopped, resume=resume, notes=notes)
        for name in ("a", "b"):
            prepared = cluster.agents[name].prepared
            assert (prepared.shard.step, prepared.shard.sha256) == (newest, shard_digest(newest))
            assert prepared.checkpoint_run == resume.manifests[0].run_id
            assert prepared.start_holder == resume.manifests[0].holder
        assert cluster.agents["c"].log == []
    assert notes.texts == [f"resuming after step {newest}"]
    assert [line["step"] for line in steps_of(stopped / "metrics.jsonl")] == list(range(1, 9))
    assert RunCheckpoints(stopped).steps()[0] == 8
    assert json.loads((stopped / "plan.json").read_text())["digest"] == resume.plan.digest
    report = json.loads((stopped / "report.json").read_text())
    assert [(part["first_step"], part["steps"]) for part in report["parts"]] == [(1, newest)]
    assert (report["steps"], report["whole"]["steps"]) == (8 - newest, 8)


@pytest.mark.parametrize("how", ["lost", "broken link", "full disk"])
def test_resumed_run_that_loses_a_host_before_a_turn_has_ended_is_resumed_without_it(tmp_path: Path, how: str) -> None:
    """From the same checkpoint, of which others have copies: else a host could end any run that is resumed."""
    wanted, out = job(train__checkpoint_every=2, train__max_steps=8, recovery__copies="next"), tmp_path / "out"
    agents: dict[str, dict[str, Any]] = {"a": {"has_copies": True}, "b": {"rows": 0}, "c": {"rows": 0}}

    def lose(agent: FakeAgent, turns: list[Turn]) -> None:
        driver = cluster.server.coordinator._driver
        assert driver is not None
        failed = rd.NodeFailed("a", "DeadlineError", "node a waited for node b", "b")
        if how == "broken link":
            driver.participants.queue.put(rd.LinkFailed(failed, 0))
        else:
            error = PeerLostError("node b is lost") if how == "lost" else StorageError("node b has a full disk")
            cluster.server.coordinator.node_failed("b", error)

    with FakeCluster("a", "b", agents=agents) as cluster:
        run(cluster, out, job=wanted)
    resume, notes = find_resume(stop(out), wanted, print), Notes()
    agents["b"]["on_grant"] = lose
    with FakeCluster(*agents, agents=agents) as cluster:
        run(cluster, out, job=wanted, resume=resume, notes=notes)
        plan, prepared = cluster.agents["a"].plan, cluster.agents["a"].prepared
    assert plan is not None and "b" not in plan.nodes and prepared.saved.step == 6
    assert [line["step"] for line in steps_of(out / "metrics.jsonl")] == list(range(1, 9))
    assert any(text.startswith("the run goes back to the checkpoint of step 6: ") for text in notes.texts)


def test_resumed_run_without_copies_ends_with_the_loss_of_an_owner_without_blocks(done: Path) -> None:
    """As the run that was not resumed would; it went back to the checkpoint, and waited there."""
    wanted, resume = JOB.with_overrides({"recovery.wait_s": 0.1}), find_resume(stop(done), JOB, print)
    assert resume is not None
    plan, notes = changed(resume.plan, slices=[("a", 0, 4), ("b", 4, 4)]), Notes()
    manifests = tuple(replace(each, plan_digest=plan.digest) for each in resume.manifests)

    def lose(agent: FakeAgent, turns: list[Turn]) -> None:
        cluster.server.coordinator.node_failed("b", PeerLostError("node b is lost"))

    with (
        FakeCluster("a", "b", agents={"b": {"on_grant": lose}}) as cluster,
        pytest.raises(PeerLostError, match=r"^node b is lost$"),
    ):
        run(cluster, done, job=wanted, resume=Resume(plan=plan, manifests=manifests), notes=notes)
    assert len(notes.texts) == 1


def test_run_falls_back_to_the_checkpoint_before_a_damaged_shard(stopped: Path) -> None:
    """The shard is named, and the newer manifest is forgotten."""
    newest, before = RunCheckpoints(stopped).steps()
    notes = Notes()
    with FakeCluster("a", "b", agents={"b": {"damaged": [newest]}}) as cluster:
        run(cluster, stopped, resume=find_resume(stopped, JOB, print), notes=notes)
        assert cluster.agents["a"].prepared.shard.step == before
    assert notes.texts == [
        f"the checkpoint of step {newest} can't be used: node b: shard step-{newest} is damaged; no joined node "
        "has the trained tensors of block 3, which node b had, or copies of them",
        f"resuming after step {before}",
    ]
    assert [line["step"] for line in steps_of(stopped / "metrics.jsonl")] == list(range(1, 9))


def test_run_does_not_go_on_with_other_data_or_another_model(stopped: Path) -> None:
    """What changed on a node is named."""
    with (
        FakeCluster("a", "b", agents={"b": {"rows": 9}}) as cluster,
        pytest.raises(RingTuneError, match="node b has 9 training"),
    ):
        run(cluster, stopped, resume=find_resume(stopped, JOB, print))
    other = {"facts_changes": {"model": replace(MODEL, digest="cd" * 32)}}
    with (
        FakeCluster("a", "b", agents={"a": other, "b": other}) as cluster,
        pytest.raises(ModelError, match="the run began with"),
    ):
        run(cluster, stopped, resume=find_resume(stopped, JOB, print))


def test_drained_run_ends_with_a_checkpoint_and_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was granted is finished and saved; the error is that of an interrupted run."""
    asked = threading.Event()
    interrupts = Interrupts()

    def slow(agent: FakeAgent, turns: list[Turn]) -> None:
        if agent.node == "a" and not asked.is_set():
            asked.set()
            interrupts._on_signal(2, None)
        assert drained.wait(CALL_S)
        agent.stub.Report(agent.report(turns), timeout=CALL_S)

    drained = threading.Event()
    wanted = job(train__rounds=50, train__checkpoint_every=0)
    with FakeCluster("a", "b", agents={name: {"on_grant": slow} for name in ("a", "b")}) as cluster:
        original = Driver.drain

        def drain(driver: Driver, reason: str) -> None:
            original(driver, reason)
            drained.set()

        monkeypatch.setattr(Driver, "drain", drain)
        with (
            RunFolder(tmp_path) as folder,
            Client(cluster.server.address) as client,
            pytest.raises(InterruptedRunError, match="stopped by the user, with a checkpoint") as stopped,
        ):
            client.run(RunRequest(job=wanted), progress=Progress(), folder=folder, interrupts=interrupts)
    (step,) = RunCheckpoints(tmp_path).steps()
    assert str(stopped.value) == f"stopped by the user, with a checkpoint of step {step}"
    assert 0 < step < 200
    assert [line["step"] for line in steps_of(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))


def test_run_that_is_stopped_before_it_trains_claims_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the line for the user nor the error speaks of one; also where the client does not know the run yet."""
    interrupts, notes = Interrupts(), Notes()
    asked, told, take = threading.Event(), threading.Event(), Outcome.__call__

    def stop() -> None:
        if not asked.is_set():
            asked.set()
            interrupts._on_signal(2, None)

    def note(text: str) -> None:
        notes.texts.append(text)
        told.set()

    def late(outcome: Outcome, event: control_pb2.RunEvent) -> None:
        assert told.wait(CALL_S)
        take(outcome, event)

    monkeypatch.setattr(notes, "note", note)
    monkeypatch.setattr(Outcome, "__call__", late)
    with FakeCluster("a", "b") as cluster:
        cluster.agents["a"].on_inspect = stop
        cluster.agents["b"].on_inspect = lambda: cluster.agents["a"].released.wait(CALL_S)
        with (
            RunFolder(tmp_path) as folder,
            Client(cluster.server.address) as client,
            pytest.raises(InterruptedRunError, match=r"^stopped by the user; there is no checkpoint$"),
        ):
            client.run(RunRequest(job=JOB, num_nodes=2), progress=notes, folder=folder, interrupts=interrupts)
    assert notes.texts == ["stopping; nothing is being trained now, so no checkpoint is added"]


def test_ctrl_c_before_a_run_that_is_refused_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the id of the run ends with the command, long before its deadline."""
    interrupts, notes, submitted = Interrupts(), Notes(), Client._submit
    monkeypatch.setattr(submit, "CALL_S", 10 * CALL_S)

    def stop(client: Client, request: RunRequest) -> Any:
        interrupts._on_signal(2, None)
        return submitted(client, request)

    monkeypatch.setattr(Client, "_submit", stop)
    with FakeCluster() as cluster, Client(cluster.server.address) as client:
        with pytest.raises(JobError, match="shorter than this coordinator's"):
            client.run(RunRequest(job=job(runtime__lease_s=1.0)), progress=notes, folder=None, interrupts=interrupts)
        await_drains()
    assert notes.texts == ["stopping; nothing is being trained now, so no checkpoint is added"]


def await_drains() -> None:
    """Wait for the threads that ask for the end of a run; an error of one fails the test."""
    for thread in [one for one in threading.enumerate() if one.name == "drain"]:
        thread.join(CALL_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("asked", ["not", "and refused", "and not answered"])
def test_ctrl_c_as_a_run_ends_is_no_error(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """The thread of the signal may ask for the end of a run that is over, or the command close its connection."""
    interrupts, notes, texts = Interrupts(), Notes(), list[str]()
    asks, closed = threading.Event(), threading.Event()

    def stop(event: control_pb2.RunEvent) -> None:
        if event.done:
            interrupts._on_signal(2, None)
            if asked == "and refused":
                await_drains()
            assert asked == "not" or asks.wait(CALL_S)

    def note(text: str) -> None:
        if text.startswith("stopping") and asked == "not":
            assert closed.wait(CALL_S)
        texts.append(text)

    def none(coordinator: Coordinator, run_id: str) -> NoReturn:
        asks.set()
        assert asked == "and refused" or closed.wait(CALL_S)
        raise FrameError(f"run {run_id} is not driven here")

    monkeypatch.setattr(notes, "note", note)
    monkeypatch.setattr(Coordinator, "driver_of", none)
    with FakeCluster("a", "b") as cluster:
        with Client(cluster.server.address) as client:
            request = RunRequest(job=JOB, num_nodes=2)
            assert client.run(request, progress=notes, folder=None, interrupts=interrupts, sinks=(stop,)).is_done
        closed.set()
        await_drains()
    assert texts[-1].startswith("stopping")


def go_on(out: Path, wanted: Job, *, notes: Notes | None = None, **more: Any) -> FakeCluster:
    """Go on with a run, for another job."""
    resume = find_resume(out, wanted, (notes or Notes()).note)
    with FakeCluster("a", "b", **more) as cluster, Client(cluster.server.address) as client:
        with RunFolder(out, resume=resume is not None) as folder:
            client.run(RunRequest(job=wanted, resume=resume), progress=notes or Progress(), folder=folder)
        return cluster


def test_finished_run_is_made_longer_from_its_last_checkpoint(done: Path) -> None:
    """Its steps are not done again; what it had trained is put away; nodes are told which plan wrote the shards."""
    before = json.loads((done / "plan.json").read_text())
    notes = Notes()
    cluster = go_on(done, JOB.with_overrides({"train.rounds": 3}), notes=notes)
    assert notes.texts == ["the run had 8 steps and gets 12", "resuming after step 8"]
    assert cluster.agents["a"].prepared.checkpoint_plan == before["digest"]
    assert [line["step"] for line in steps_of(done / "metrics.jsonl")] == list(range(1, 13))
    assert json.loads((done / "report.json").read_text())["whole"]["steps"] == 12
    assert (done / "parts/1/report.json").is_file() and (done / "parts/1/adapter/adapter.safetensors").is_file()
    assert RunCheckpoints(done).steps() == (12, 10)
    again = go_on(done, JOB.with_overrides({"train.max_steps": 16}))
    assert again.agents["a"].prepared.shard.step == 12
    assert len(RunCheckpoints(done).lengths()) == 2


def test_longer_run_that_is_refused_changes_no_file(done: Path) -> None:
    """Neither its job nor its profile replaces what is there; once it has a plan both do."""
    wanted = JOB.with_overrides({"train.rounds": 3})
    before = contents(done)
    with pytest.raises(RingTuneError, match="node b has 9 training"):
        go_on(done, wanted, agents={"b": {"rows": 9}})
    assert contents(done) == before
    go_on(done, wanted, agents={"b": {"facts_changes": {"device": "another"}}})
    assert load_job(done / "job.toml").train.rounds == 3
    assert '"another"' in (done / "profile.json").read_text()


def test_run_that_was_stopped_while_it_got_longer_goes_on(done: Path) -> None:
    """Before its first new checkpoint too: the old ones are known by their length."""
    wanted = JOB.with_overrides({"train.rounds": 3})
    with pytest.raises(RingTuneError, match="no such luck"):
        go_on(done, wanted, agents={"a": {"fails_at": {"grant": RingTuneError("no such luck")}}})
    assert json.loads((done / "plan.json").read_text())["course"]["num_steps"] == 12
    assert RunCheckpoints(done).steps() == (8, 6)
    go_on(done, wanted)
    assert [line["step"] for line in steps_of(done / "metrics.jsonl")] == list(range(1, 13))


def test_finished_run_is_left_alone_by_a_job_of_its_own_length_or_less(done: Path) -> None:
    """Nothing is changed in its folder, also of a run that was shorter once."""
    with pytest.raises(UsageError, match="is finished"):
        find_resume(done, JOB, print)
    RunCheckpoints(done).add_length(Length(rounds=1))
    before = contents(done)
    for rounds, message in ((2, "is finished"), (1, "a run can get longer, not shorter")):
        with pytest.raises(RingTuneError, match=message):
            find_resume(done, JOB.with_overrides({"train.rounds": rounds}), print)
    with pytest.raises(RingTuneError, match=r"train\.seed was 0, now 3"):
        find_resume(done, JOB.with_overrides({"train.rounds": 3, "train.seed": 3}), print)
    assert contents(done) == before


def test_coordinator_takes_no_other_job_for_a_longer_one(done: Path) -> None:
    """A submitter that claims a length that the run never had is refused."""
    wanted = JOB.with_overrides({"train.rounds": 3})
    resume = find_resume(done, wanted, print)
    assert resume is not None
    for wrong in (replace(resume, lengths=()), replace(resume, lengths=(Length(rounds=7),))):
        with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client:
            with pytest.raises(PlanError, match="of another job"):
                client.run(RunRequest(job=wanted, resume=wrong), progress=Progress(), folder=None)
            assert cluster.agents["a"].log == []


def test_run_whose_lengths_are_damaged_does_not_go_on(tmp_path: Path) -> None:
    """The file is named; what only looks like a length is refused too."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/lengths.json").write_text('[{"rounds": "5"}]')
    with pytest.raises(IntegrityError, match=r"lengths\.json .*a length .* rounds has to be a whole number"):
        RunCheckpoints(tmp_path).lengths()


def test_last_turn_that_was_cut_short_is_done_again_to_its_end(tmp_path: Path) -> None:
    """Its checkpoint is within a turn of the longer run, so the one before it counts."""
    short = JOB.with_overrides({"train.max_steps": 7})
    with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client, RunFolder(tmp_path) as folder:
        client.run(RunRequest(job=short), progress=Progress(), folder=folder)
    assert RunCheckpoints(tmp_path).steps() == (7, 6)
    notes = Notes()
    cluster = go_on(tmp_path, JOB.with_overrides({"train.max_steps": 10}), notes=notes)
    assert "the checkpoint of step 7 is within a turn of 2 steps of the longer run" in notes.texts
    assert cluster.agents["a"].prepared.shard.step == 6
    assert [line["step"] for line in steps_of(tmp_path / "metrics.jsonl")] == list(range(1, 11))


def hift_run(state: str) -> tuple[Job, Plan]:
    """The job and the plan of a run with its state there."""
    job = CHECKPOINT_JOB.with_overrides({"train.method": "hift", "train.max_steps": 20, "hift.state": state})
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


def test_another_job_is_refused_by_its_keys(tmp_path: Path) -> None:
    """Both values, and only of what has to be mended: patience and where state is may differ, a forgotten state not."""
    learning = {"train.seed": 3, "train.learning_rate": 0.5}
    plain, memory = (CHECKPOINT_JOB, PLAN), hift_run("memory")
    for at, (before, after, message) in enumerate(
        (
            (plain, plain[0].with_overrides(learning), r"learning_rate was 0\.001, now 0\.5; train\.seed was 0, now 3"),
            (memory, hift_run("disk")[0].with_overrides({"train.seed": 9}), r": train\.seed was 0, now 9; give"),
            (memory, hift_run("drop")[0], r"hift\.state was 'memory', now 'drop'"),
            (hift_run("drop"), hift_run("disk")[0], r"hift\.state was 'drop', now 'disk'"),
        )
    ):
        write_run(tmp_path / f"{at}", *before, 8)
        with pytest.raises(JobError, match=message):
            find_resume(tmp_path / f"{at}", after, print)
        assert find_resume(tmp_path / f"{at}", before[0].with_overrides({"runtime.wait_s": 5.0}), print)


def write_checkpoints(path: Path, *steps: int) -> RunCheckpoints:
    """A folder as a run leaves it."""
    with RunFolder(path) as folder:
        folder.write_text("job.toml", CHECKPOINT_JOB.to_toml())
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


def test_checkpoints_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is not there, the old ones can be gone on from."""
    checkpoints = write_checkpoints(tmp_path, 4, 8)

    def full(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"step-12\.json: No space left on device"):
        checkpoints.add(manifest(12))
    notes: list[str] = []
    resume = find_resume(tmp_path, CHECKPOINT_JOB, notes.append)
    assert (resume.plan, resume.manifests, notes) == (PLAN, (manifest(8), manifest(4)), [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_metrics_on_a_full_disk_are_an_error_of_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written first finds the disk full."""
    with RunFolder(tmp_path) as folder:
        monkeypatch.setattr(folder, "_target", lambda name: Path("/dev/full"))
        with pytest.raises(StorageError, match="No space left on device"):
            folder.add_metrics("{}")


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "damaged", "large", "binary"])
def test_manifest_that_is_damaged_or_no_file_is_passed_over(tmp_path: Path, kind: str) -> None:
    """The checkpoint before it is used; a run that goes on writes that step's manifest again."""
    checkpoints = write_checkpoints(tmp_path / "run", 4, 8)
    path = checkpoints.path(8)
    kept, notes = path.rename(tmp_path / "elsewhere"), list[str]()
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":  # zeros without a place on the disk
        path.touch()
        os.truncate(path, MAX_JSON_BYTES + 1)
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
    else:
        shutil.copy(kept, path)
        damage(path)
    resume = find_resume(tmp_path / "run", CHECKPOINT_JOB, notes.append)
    assert resume is not None and resume.manifests == (manifest(4),)
    assert len(notes) == 1 and "step-8.json can't be used: " in notes[0]
    assert kind != "large" or notes[0].endswith("used: it has more than 134,217,728 bytes")
    checkpoints.rewind_to(4)
    checkpoints.add(manifest(8))
    found = find_resume(tmp_path / "run", CHECKPOINT_JOB, print)
    assert found is not None and found.manifests == (manifest(8), manifest(4))
    assert kept.is_file()


def test_find_resume_never_begins_anew_behind_damage(tmp_path: Path) -> None:
    """If every manifest is damaged the user decides; both are named."""
    checkpoints = write_checkpoints(tmp_path, 4, 8)
    damage(checkpoints.path(4))
    checkpoints.path(8).write_text("")
    with pytest.raises(IntegrityError, match=r"step-8\.json.*step-4\.json.*without --resume"):
        find_resume(tmp_path, CHECKPOINT_JOB, print)


def test_find_resume_refuses_a_plan_or_a_manifest_of_something_else(tmp_path: Path) -> None:
    """A plan.json that was copied from another run, or is damaged; a manifest under another step's name."""
    checkpoints = write_checkpoints(tmp_path, 4)
    for text, error, message in (
        (json.dumps(changed(PLAN, seed=7).to_json()), PlanError, "step 4 is of plan"),
        ("{", IntegrityError, r"plan\.json can't be read"),
    ):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(error, match=message):
            find_resume(tmp_path, CHECKPOINT_JOB, print)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_json()))
    checkpoints.path(4).rename(checkpoints.path(8))
    with pytest.raises(IntegrityError, match="it is of step 4"):
        find_resume(tmp_path, CHECKPOINT_JOB, print)


def test_find_resume_of_a_run_without_checkpoint_begins_anew(tmp_path: Path) -> None:
    """Killed before the first one: the same command still leads to the result, and says what it does."""
    write_checkpoints(tmp_path)
    notes: list[str] = []
    assert find_resume(tmp_path, CHECKPOINT_JOB, notes.append) is None
    assert "the run starts from the beginning" in notes[0]


def test_find_resume_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """It is a wrong command line."""
    with pytest.raises(UsageError, match="has no run to resume"):
        find_resume(tmp_path / "nowhere", CHECKPOINT_JOB, print)
    # The user may have removed it
    cut_metrics(tmp_path / "metrics.jsonl", 4)
    assert not list(tmp_path.iterdir())


def test_folder_goes_back_to_the_step_that_is_gone_on_from(tmp_path: Path) -> None:
    """Metrics of later steps and a torn line go, newer manifests too."""
    checkpoints = write_checkpoints(tmp_path, 4, 8)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    with RunFolder(tmp_path, resume=True) as folder:
        folder.rewind_to(4)
    assert checkpoints.steps() == (4,)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]


def test_folder_that_goes_back_drops_what_will_come_again(tmp_path: Path) -> None:
    """A decision or an evaluation of the step that is gone on from is made again; the step itself is not."""
    write_checkpoints(tmp_path, 4, 8)
    lines = [("evaluation", 2), ("train", 3), ("unfreeze", 4), ("train", 4), ("evaluation", 4), ("train", 5)]
    texts = [json.dumps({"kind": kind, "step": step}) for kind, step in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(text + "\n" for text in texts))
    cut_metrics(tmp_path / "metrics.jsonl", 4)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [texts[0], texts[1], texts[3]]


def test_folder_that_is_replaced_begins_without_checkpoints(tmp_path: Path) -> None:
    """--replace begins anew, the nodes' shards included; those of the earlier run are beside it."""
    out = tmp_path / "run"
    checkpoints = write_checkpoints(out, 4)
    (checkpoints.node_states() / "node-0").mkdir(parents=True)
    with RunFolder(out, replace=True) as folder:
        assert not folder.checkpoints.steps() and not folder.checkpoints.node_states().exists()
    assert folder.replaced is not None and (folder.replaced / "checkpoints/nodes/node-0").is_dir()
    assert find_resume(folder.replaced, CHECKPOINT_JOB, print) is not None


def test_checkpoints_around_the_loss_of_an_owner(tmp_path: Path) -> None:
    """After the loss: those that were written since; with none since then, the plan of before, with the owner."""
    job = CHECKPOINT_JOB.with_overrides({"train.max_steps": 20})
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
    assert notes == ["the checkpoint of step 8 is from before an owner was lost or came back, so it is not used"]
    # Back since step 14: with a checkpoint from before, the plan of before; b is there, and is taken in again
    again = Plan(with_owner(after.course, "b", 7, 20), after.placements)
    again = again.extended(again.placements[-1], 7, placement_number=3)
    (tmp_path / "plan.json").write_text(json.dumps(again.to_json()))
    notes.clear()
    resume = find_resume(tmp_path, job, notes.append)
    assert resume is not None and resume.plan.course == after.course and resume.manifests == (newest,)
    assert notes[0] == "the newest checkpoint is from before b came back"
    last = manifest(14, plan_digest=again.at(3).digest, job_digest=job_digest(job), placement_number=3)
    RunCheckpoints(tmp_path).add(dataclasses.replace(last, shards=last.shards[:2]))
    resume = find_resume(tmp_path, job, notes.append)
    assert resume is not None and resume.plan == again and [one.step for one in resume.manifests] == [14]


def test_run_whose_shards_are_all_damaged_does_not_begin_anew(stopped: Path) -> None:
    """Both checkpoints are named, and stay where they are."""
    steps = RunCheckpoints(stopped).steps()
    with (
        FakeCluster("a", "b", agents={"a": {"damaged": steps}}) as cluster,
        pytest.raises(IntegrityError, match="No other checkpoint is left"),
    ):
        run(cluster, stopped, resume=find_resume(stopped, JOB, print))
    assert RunCheckpoints(stopped).steps() == steps


def test_pipe_in_the_place_of_the_metrics_is_refused_at_once(tmp_path: Path) -> None:
    """A resume would wait for a writer without end."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    for use in (functools.partial(cut_metrics, step=4), force_to_disk):
        with pytest.raises(StorageError, match=r"metrics\.jsonl: it is a pipe or device, no file"):
            use(tmp_path / "metrics.jsonl")
