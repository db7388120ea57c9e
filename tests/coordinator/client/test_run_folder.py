"""The folder of a run: complete files only, checked paths, nothing lost by accident; read back for an evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event

from coordinator.api import train as training
from coordinator.client.detached_runs import fetched_folder, start_in_background
from coordinator.client.local_nodes import AgentTemplate
from coordinator.client.run_files import NAME, RunParts, TablesFile, TensorBoardLog, require_tensorboard, scalars
from coordinator.client.run_folder import (
    RunFolder,
    files_of_run,
    locked_for_resume,
    read_metrics,
    require_inputs_elsewhere,
)
from coordinator.client.saved_run import RunLocation, evaluation_job, read_report, read_run
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.errors import (
    BusyError,
    IntegrityError,
    InvalidInputError,
    JobError,
    PlanError,
    RingTuneError,
    StorageError,
    UsageError,
)
from ringtune.job.job import load_job
from ringtune.schedule.course import FrozenWeights
from ringtune.schedule.operation_tables import ScheduledTable, tables_from_json
from ringtune.techniques.activation_checkpointing import Memory
from ringtune.v1 import control_pb2
from ringtune.v1.control_pb2 import FileChunk
from tests.contract.run_control.test_checkpoint import manifest
from tests.contract.test_hints import parse
from tests.support.choosing import make_choice, table_of
from tests.support.disk import log_of_syncs
from tests.support.fake_agents import job
from tests.support.page_runs import metrics, step_line
from tests.support.plans import changed, make_plan
from tests.support.saved_runs import LABELS, contents, own_weights_instead, whole_model_instead, write_run


def digest(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


def chunk(path: str, content: bytes, *, sha256: str = "") -> FileChunk:
    """A piece of a file; with a digest it is the last one."""
    return FileChunk(path=path, chunk=content, last=bool(sha256), sha256=sha256)


def test_folder_gives_a_file_its_name_when_it_is_complete(tmp_path: Path) -> None:
    """Until the last chunk the file is called .part; then the digest is checked and it gets its name."""
    with RunFolder(tmp_path) as folder:
        assert folder.add_chunk(chunk("adapter/a.safetensors", b"one")) is None
        assert not (tmp_path / "adapter/a.safetensors").exists()
        path = folder.add_chunk(chunk("adapter/a.safetensors", b"two", sha256=digest(b"onetwo")))
        with pytest.raises(IntegrityError, match="arrived damaged"):
            folder.add_chunk(chunk("adapter/b.safetensors", b"one", sha256=digest(b"two")))
    assert path == tmp_path / "adapter/a.safetensors"
    assert path.read_bytes() == b"onetwo"
    assert not (tmp_path / "adapter/b.safetensors").exists()


def test_folder_of_a_user_is_on_the_disk_before_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a run with a report has the folders of all its users."""
    with RunFolder(tmp_path) as folder:
        log = log_of_syncs(monkeypatch)
        for user in ("anna", "ben"):
            folder.add_chunk(chunk(f"users/{user}/a.safetensors", b"one", sha256=digest(b"one")))
        file = ["a.safetensors.part", "a.safetensors.part -> a.safetensors"]
        assert log == [tmp_path.name, "users", *file, "anna", "users", *file, "ben"]


def test_folder_keeps_files_apart_that_grow_together(tmp_path: Path) -> None:
    """Chunks of several files may come mixed."""
    with RunFolder(tmp_path) as folder:
        folder.add_chunk(chunk("trace.json", b"a"))
        folder.add_chunk(chunk("recordings/a.jsonl", b"x"))
        folder.add_chunk(chunk("trace.json", b"b", sha256=digest(b"ab")))
        folder.add_chunk(chunk("recordings/a.jsonl", b"y", sha256=digest(b"xy")))
    assert (tmp_path / "trace.json").read_bytes() == b"ab"
    assert (tmp_path / "recordings/a.jsonl").read_bytes() == b"xy"


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "", "a//b", "a/b/c/d/e", "users/../x", "users/.x/y", ".x", "x.part", "a\n"]
)
def test_folder_refuses_paths_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    """The coordinator can't write outside of the folder."""
    with RunFolder(tmp_path / "run") as folder, pytest.raises(IntegrityError, match="not allowed"):
        folder.add_chunk(chunk(name, b"", sha256=digest(b"")))


def test_folder_refuses_to_follow_a_link(tmp_path: Path) -> None:
    """A link inside the folder that leads out of it is not written through."""
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with RunFolder(tmp_path / "run") as folder:
        (tmp_path / "run/adapter").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(IntegrityError, match="not allowed"):
            folder.add_chunk(chunk("adapter/x", b"", sha256=digest(b"")))


@pytest.mark.parametrize("name", ["adapter", "best", "checkpoints", "checkpoints/nodes", "parts", "fetching"])
def test_folder_with_a_link_in_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    """A resumed run would remove folders and manifests elsewhere."""
    with RunFolder(tmp_path / "run") as folder:
        folder.write_text("plan.json", "{}")
    (tmp_path / "elsewhere/7").mkdir(parents=True)
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"{name} is a link"), RunFolder(tmp_path / "run", resume=True) as folder:
        folder.rewind_to(0)
    with (
        pytest.raises(UsageError, match=f"{name} is a link"),
        fetched_folder(tmp_path / "run", replace=True, goes_on=True),
    ):
        pass
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["7"]


def test_folder_writes_through_no_link(tmp_path: Path) -> None:
    """Neither a growing file, nor one that is appended to, nor a log."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with RunFolder(tmp_path / "run") as folder:
        for name in ("trace.json.part", "metrics.jsonl", "run.log"):
            (tmp_path / "run" / name).symlink_to(victim)
        folder.add_chunk(chunk("trace.json", b"{}", sha256=digest(b"{}")))
        with pytest.raises(IntegrityError, match="not allowed"):
            folder.add_metrics("{}")
        with pytest.raises(UsageError, match="symbolic link, which is not followed; remove it"):
            start_in_background(tmp_path / "run", ["--version"])
        with pytest.raises(StorageError, match="symbolic link, which is not followed; remove it"):
            AgentTemplate(tmp_path / "run/run.log", {}).__enter__()
    assert victim.read_text() == "mine" and (tmp_path / "run/trace.json").read_text() == "{}"


def test_folder_that_was_made_for_a_run_that_never_began_goes(tmp_path: Path) -> None:
    """Of the refused run only the job was written."""

    def refuse(folder: RunFolder) -> None:
        folder.write_text("job.toml", "")
        raise PlanError("no")

    with pytest.raises(PlanError), RunFolder(tmp_path / "run") as folder:
        refuse(folder)
    assert not list(tmp_path.iterdir())


def test_folder_of_a_run_that_never_had_a_plan_is_used_again(tmp_path: Path) -> None:
    """A run that was refused early does not stand in the way of the next try."""
    with RunFolder(tmp_path) as folder:
        folder.write_text("job.toml", "first")
    with RunFolder(tmp_path) as folder:
        folder.write_text("job.toml", "second")
    assert folder.replaced is None and (tmp_path / "job.toml").read_text() == "second"


def test_job_file_of_the_user_is_never_written_over(tmp_path: Path) -> None:
    """One that says the same stays with its comments; another is put aside and named; the run's own is replaced."""
    out, wanted, said = tmp_path / "run", job(), list[str]()
    file, longer = out / "job.toml", job(train__rounds=7)
    commented = "# which I have tuned\n" + wanted.to_toml()
    with RunFolder(out) as folder:
        folder.write_job(wanted.to_toml())
    with RunFolder(out, resume=True, say=said.append) as folder:
        folder.write_job(longer.to_toml())
        folder.write_job(wanted.to_toml())
    assert said == [] and file.read_text() == wanted.to_toml()
    for _ in range(2):
        file.write_text(commented)
        with RunFolder(out, resume=True, say=said.append) as folder:
            folder.write_job(wanted.to_toml())
            assert said == [] and file.read_text() == commented
    with RunFolder(out, resume=True, say=said.append) as folder:
        folder.write_job(longer.to_toml())
    (aside,) = tmp_path.glob("run.replaced-*")
    assert said == [f"what was changed after the run wrote it is in {aside}: job.toml"]
    assert (aside / "job.toml").read_text() == commented and file.read_text() == longer.to_toml()


def test_file_of_the_user_in_the_place_of_a_result_is_put_aside(tmp_path: Path) -> None:
    """It came while the run trained; one beside it stays, and the run's own is written over."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out, say=said.append) as folder:
        (out / "adapter").mkdir()
        for name in ("README.md", "notes.txt"):
            (out / "adapter" / name).write_text("mine")
        for content in (b"one", b"two"):
            folder.add_chunk(chunk("adapter/README.md", content, sha256=digest(content)))
    (aside,) = tmp_path.glob("run.replaced-*")
    assert said == [f"what was changed after the run wrote it is in {aside}: adapter/README.md"]
    assert (aside / "adapter/README.md").read_text() == (out / "adapter/notes.txt").read_text() == "mine"
    assert (out / "adapter/README.md").read_text() == "two"


def test_job_file_that_is_no_job_is_put_aside(tmp_path: Path) -> None:
    """That of a refused run, broken by an edit; where checkpoints need it it is named instead."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out) as folder:
        folder.write_job(job().to_toml())
    (out / "job.toml").write_text("[train")
    with RunFolder(out, say=said.append) as folder:
        folder.write_job(job().to_toml())
    (aside,) = tmp_path.glob("run.replaced-*")
    assert len(said) == 1 and (aside / "job.toml").read_text() == "[train"
    (out / "job.toml").write_text("[train")
    with RunFolder(out, resume=True) as folder:
        folder.add_checkpoint(manifest(4))
    with RunFolder(out, resume=True) as folder, pytest.raises(JobError, match=r"run/job\.toml"):
        folder.write_job(job().to_toml())
    assert (out / "job.toml").read_text() == "[train"


@pytest.mark.parametrize("replace", [True, False])
def test_job_file_is_there_before_a_run_in_the_background_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    """Also where it is read from the folder and an earlier run is put aside; a user's file is named."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out) as folder:
        folder.write_job(job().to_toml())
        if replace:
            folder.write_text("plan.json", "{}")
    (out / "job.toml").write_text("# mine\n" + job().to_toml())
    request = RunRequest(job=job(train__rounds=7))

    def started(folder: Path, words: list[str]) -> tuple[None, None]:
        assert load_job(folder / "job.toml").train.rounds == 7
        return None, None

    monkeypatch.setattr(training, "start_in_background", started)
    face = training.RunDisplay(show=Progress, resume_hint=str, say=said.append)
    training._in_background(request, RunFolder(out, replace=replace, say=said.append), face, {})
    assert load_job(out / "job.toml").train.rounds == 7
    (aside,) = tmp_path.glob("run.replaced-*")
    assert (aside / "job.toml").read_text().startswith("# mine")
    assert len(said) == 1 and str(aside) in said[0]
    with RunFolder(out, say=said.append) as folder:
        folder.write_job(request.job.to_toml())
    assert len(said) == 1


OF_RUNS = ("job.toml", "plan.json", "run.log", "metrics.jsonl.part", "model/config.json", "users/u.txt", "best/b.txt")
OTHERS = ("rows.csv", "logs.txt", "models/config.json", ".git/config", "job.toml.bak")


@settings(max_examples=20)
@given(
    names=st.sets(st.sampled_from((*OF_RUNS, *OTHERS, "adapter/a.txt", "logs/mine.txt", "parts/p.txt")), min_size=1),
    replace=st.booleans(),
    resume=st.booleans(),
)
def test_folder_that_held_no_run_is_refused_and_stays_as_it_is(names: set[str], replace: bool, resume: bool) -> None:
    """Whatever a user has in a folder, and whatever is asked: one error, and every file has its content."""
    with TemporaryDirectory() as name:
        for path in names:
            (Path(name) / path).parent.mkdir(exist_ok=True)
            (Path(name) / path).write_text("precious")
        before = contents(Path(name))
        with (
            pytest.raises(UsageError, match="is not the folder of a run"),
            RunFolder(Path(name), replace=replace, resume=resume),
        ):
            pass
        assert contents(Path(name)) == before


@settings(max_examples=20)
@given(own=st.sets(st.sampled_from(OF_RUNS)), others=st.sets(st.sampled_from(OTHERS)), beside=st.booleans())
def test_folder_that_is_replaced_keeps_every_file(own: set[str], others: set[str], beside: bool) -> None:
    """What a run wrote is in the folder beside it, all else where it was; every content is there once."""
    with TemporaryDirectory() as name:
        out = Path(name) / "run"
        with RunFolder(out):
            for path in own | others:
                (out / path).parent.mkdir(exist_ok=True)
                (out / path).write_text(path)
        if beside:
            (Path(name) / "run.replaced").mkdir()
        with RunFolder(out, replace=True) as folder:
            left = {path for path in contents(out) if not path.startswith(".ringtune-")}
        assert left == others
        found = contents(folder.replaced) if folder.replaced else {}
        assert found.pop(".ringtune-run", b"") or not own
        assert found == {path: path.encode() for path in own}


def test_folder_without_the_marker_of_a_run_is_somebodys(tmp_path: Path) -> None:
    """Even with all files of a run: nothing in it is moved, or written over. A copy that lacks it needs it too."""
    out, marker = write_run(tmp_path / "run"), Path(".ringtune-run")
    content = (out / marker).read_bytes()
    (out / marker).unlink()
    with pytest.raises(UsageError, match=r"is not the folder of a run.*, or copy \.ringtune-run too"):
        RunFolder(out, resume=True).__enter__()
    assert not (out / marker).exists()
    (out / marker).write_bytes(content)
    with RunFolder(out, resume=True):
        pass


@pytest.mark.parametrize("key", ["data__train", "data__eval", "model__path", "adapter__from"])
def test_rows_and_model_do_not_lie_where_the_run_writes(tmp_path: Path, key: str) -> None:
    """A marked folder into which somebody has put a model: no run moves it, or writes its result into it."""
    for place in ("model", "model/rows.csv", "users/anna", "job.toml"):
        with pytest.raises(UsageError, match=re.escape(f"{key.replace('__', '.')} = ")):
            require_inputs_elsewhere(tmp_path, job(**{key: str(tmp_path / place)}))
    require_inputs_elsewhere(tmp_path, job(**{key: str(tmp_path / "models/tiny")}))
    if key == "adapter__from":  # the result of a run that this one would move aside
        with pytest.raises(UsageError, match="give another --out"):
            require_inputs_elsewhere(tmp_path, job(**{key: str(tmp_path)}))


WRITERS: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "a new run": lambda out: RunFolder(out),
    "one that replaces": lambda out: RunFolder(out, replace=True),
    "one that goes on": lambda out: RunFolder(out, resume=True),
    "what reads before it goes on": locked_for_resume,
    "fetch": lambda out: fetched_folder(out, replace=True, goes_on=False),
}


@pytest.mark.parametrize("second", WRITERS)
@pytest.mark.parametrize("first", WRITERS)
def test_folder_has_one_writer(tmp_path: Path, first: str, second: str) -> None:
    """Whatever is at work there, another command is refused with the process that has the folder; nothing changes."""
    with RunFolder(tmp_path / "run") as folder:
        folder.write_text("job.toml", "first")
    with WRITERS[first](tmp_path / "run"), ThreadPoolExecutor(1) as other:
        before = contents(tmp_path)

        def enter() -> None:
            with WRITERS[second](tmp_path / "run"):
                pass

        with pytest.raises(BusyError, match=f"process {os.getpid()} .*writes into .*run"):
            other.submit(enter).result()
        assert contents(tmp_path) == before
    assert BusyError.exit_code == 8


def test_file_that_was_not_complete_is_begun_anew_by_the_run_that_goes_on(tmp_path: Path) -> None:
    """A coordinator that was killed leaves half a trace; the next part of the run has a trace of its own."""
    with RunFolder(tmp_path) as folder:
        folder.add_chunk(chunk("trace.json", b"half of the first"))
        folder.rewind_to(2)
        folder.add_chunk(chunk("trace.json", b"second", sha256=digest(b"second")))
    assert (tmp_path / "trace.json").read_bytes() == b"second"


def test_run_that_begins_anew_leaves_only_what_the_command_wrote(tmp_path: Path) -> None:
    """Where it is driven and what was printed stay; steps, plan and half files go, and other people's files stay."""
    out = tmp_path / "run"
    with RunFolder(out, resume=True) as folder:
        for name in ("run.json", "run.log", "notes.txt"):
            (out / name).write_text(name)
        folder.write_text("plan.json", "{}")
        folder.add_metrics("{}")
        folder.add_chunk(chunk("trace.json", b"half"))
        aside = folder.begin_anew()
        left = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith(".ringtune-"))
        assert left == ["notes.txt", "run.json", "run.log"]
        folder.add_chunk(chunk("trace.json", b"new", sha256=digest(b"new")))
    assert (out / "trace.json").read_bytes() == b"new"
    assert aside is not None and contents(aside).keys() == {
        ".ringtune-run",
        "metrics.jsonl",
        "plan.json",
        "trace.json.part",
    }


def test_run_that_is_resumed_from_its_beginning_logs_each_step_once(tmp_path: Path) -> None:
    """The files of its former part stay until there is a plan, and then lie beside the folder."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out) as folder:
        folder.write_text("plan.json", "{}")
        folder.add_metrics(line(0))
    with RunFolder(out, replace=True, resume=True, begins_anew=True, say=said.append) as folder:
        folder.take(control_pb2.RunEvent(run_id="second"))
        folder.take(control_pb2.RunEvent(job_toml=job().to_toml()))
        assert not said and len(read_metrics(out)) == 1
        folder.take(control_pb2.RunEvent(plan_json="{}"))
        assert not (out / "metrics.jsonl").exists()
        folder.add_metrics(line(0))
    [text], aside = said, next(entry for entry in tmp_path.iterdir() if entry != out)
    assert str(aside) in text and [len(read_metrics(each)) for each in (out, aside)] == [1, 1]


def line(step: int, **more: Any) -> str:
    """What the coordinator sends for a step."""
    values = {"loss": 1.0 - step / 10, "seconds": 0.5, "bytes": {"a>b": 10 + step, "b>a": 1}, **more}
    values = {"kind": "train", "step": step + 1, **values}
    return json.dumps(values)


def part(folder: Path, first: int, stop: int, *, resume: bool, report: bool) -> dict[str, Any]:
    """Write a part of a run as its submitter does; with a report if it came to its end."""
    with RunFolder(folder, resume=resume) as files:
        if resume:
            files.rewind_to(first)
        files.write_text("plan.json", "{}")
        for step in range(first, stop):
            files.add_metrics(line(step))
        (folder / "trace.json").write_text(f"trace from {first}")
        if report:
            files.write_json("report.json", json.dumps({"steps": stop - first, "wall_s": 9.0}))
            return dict(json.loads((folder / "report.json").read_text()))
    return {}


@pytest.mark.parametrize("result", ["adapter", "model", "users"])
def test_result_of_an_earlier_part_is_put_away_and_replaced(tmp_path: Path, result: str) -> None:
    """What a run had left when it was made longer stays beside it; a run that is repeated leaves nothing of it."""
    part(tmp_path, 0, 4, resume=False, report=True)
    (tmp_path / result).mkdir()
    (tmp_path / result / "config.json").write_text("{}")
    RunParts(tmp_path).begin(4)
    assert not (tmp_path / result).exists()
    assert (tmp_path / "parts/1" / result / "config.json").is_file()
    (tmp_path / result).mkdir()
    with RunFolder(tmp_path, replace=True):
        assert not (tmp_path / result).exists()


def test_report_has_every_part_and_their_sums(tmp_path: Path) -> None:
    """Two parts that were killed, each beyond its last checkpoint, and one that ends: every step counts once."""
    part(tmp_path, 0, 5, resume=False, report=False)
    part(tmp_path, 3, 7, resume=True, report=False)
    report = part(tmp_path, 6, 8, resume=True, report=True)
    assert report["steps"] == 2, "the report itself stays that of the last part"
    assert report["parts"] == [
        {
            "first_step": 1,
            "steps": 3,
            "train_s": 1.5,
            "first_loss": 1.0,
            "last_loss": 0.8,
            "links": {"a>b": 33, "b>a": 3},
        },
        {
            "first_step": 4,
            "steps": 3,
            "train_s": 1.5,
            "first_loss": 0.7,
            "last_loss": 0.5,
            "links": {"a>b": 42, "b>a": 3},
        },
    ]
    assert report["whole"] == {
        "first_step": 1,
        "steps": 8,
        "train_s": 4.0,
        "first_loss": 1.0,
        "last_loss": pytest.approx(0.3),
        "links": {"a>b": 108, "b>a": 8},
    }


def test_parts_keep_the_traces_of_earlier_ones(tmp_path: Path) -> None:
    """Each part's time line stays, numbered in order; the newest has the usual name. Nothing is added to the first."""
    assert part(tmp_path, 0, 4, resume=False, report=True) == {"steps": 4, "wall_s": 9.0}
    assert not (tmp_path / "parts").exists()
    part(tmp_path, 2, 4, resume=True, report=False)
    part(tmp_path, 4, 5, resume=True, report=True)
    assert (tmp_path / "parts/1/trace.json").read_text() == "trace from 0"
    assert json.loads((tmp_path / "parts/1/report.json").read_text())["steps"] == 4
    assert (tmp_path / "parts/2/trace.json").read_text() == "trace from 2"
    assert (tmp_path / "trace.json").read_text() == "trace from 4"


def test_parts_that_go_further_back_replace_later_ones(tmp_path: Path) -> None:
    """A damaged checkpoint is passed over: the run goes on from the one before, and what came after is forgotten."""
    part(tmp_path, 0, 5, resume=False, report=False)
    part(tmp_path, 4, 6, resume=True, report=False)
    report = part(tmp_path, 2, 8, resume=True, report=True)
    assert [entry["steps"] for entry in report["parts"]] == [2]
    assert report["whole"]["steps"] == 8
    assert RunParts(tmp_path).stops() == (2,)
    traces = [(tmp_path / f"parts/{attempt}/trace.json").read_text() for attempt in (1, 2)]
    assert traces == ["trace from 0", "trace from 4"], "time lines stay, whatever became of the steps"


@pytest.mark.parametrize("text", ["", "{", '["x"]', "7"])
def test_parts_with_a_damaged_list_are_those_of_a_run_in_one_part(tmp_path: Path, text: str) -> None:
    """A report is never lost for the sake of its history."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/stops.json").write_text(text)
    assert RunParts(tmp_path).completed({"steps": 1}, list) == {"steps": 1}


COURSE = changed(make_plan([("a", 0, 4)], ["a"]), choice=make_choice()).course


def entry(step: int, seed: int = 0) -> ScheduledTable:
    """What was chosen at a step."""
    return ScheduledTable(step=step, operations=table_of(COURSE, f"{step}/{seed}"))


def filled(folder: Path, *steps: int) -> TablesFile:
    """The file after decisions at these steps."""
    file = TablesFile(folder)
    for step in steps:
        file.add(json.dumps(entry(step).to_json()))
    return file


def test_tables_file_holds_decisions_in_order(tmp_path: Path) -> None:
    """What is written is what another run may be given."""
    assert TablesFile(tmp_path).read() == ()
    file = filled(tmp_path, 0, 4, 8)
    assert file.read() == (entry(0), entry(4), entry(8))
    assert tables_from_json(json.loads((tmp_path / NAME).read_text())) == file.read()
    # A run that goes on from step 4 chooses there again; what came later is done again too
    file = filled(tmp_path, 0, 4, 8)
    file.add(json.dumps(entry(4, 1).to_json()))
    assert file.read() == (entry(0), entry(4, 1))
    # It is replaced with the run
    filled(tmp_path, 0)
    assert files_of_run(tmp_path) == (NAME,)


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, [0]), (4, [0]), (6, [0, 4]), (99, [0, 4, 8])])
def test_tables_file_goes_back_with_the_run(tmp_path: Path, step: int, left: list[int]) -> None:
    """Decisions for the step itself are made again; those before it stand."""
    with RunFolder(tmp_path):
        filled(tmp_path, 0, 4, 8)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.rewind_to(step)
    assert [table.step for table in TablesFile(tmp_path).read()] == left
    assert (tmp_path / NAME).exists() == bool(left)


@pytest.mark.parametrize("text", ["", "3", "{}", '{"step": 0}', '{"step": 0, "operations": {}}'])
def test_tables_file_refuses_what_is_no_table(tmp_path: Path, text: str) -> None:
    """What comes from another machine is read before it is written."""
    with pytest.raises(IntegrityError):
        filled(tmp_path, 0).add(text)
    assert filled(tmp_path).read() == (entry(0),)


def test_tables_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    """Half a file, or one of somebody else."""
    (tmp_path / NAME).write_text('{"schema": 1, "tables": [')
    with pytest.raises(IntegrityError, match=r"operations\.json can't be read"):
        filled(tmp_path, 4)


def written(folder: Path) -> list[Event]:
    """The events of the files, each a record with its length and two checksums."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_tensorboard_has_the_runs_losses(tmp_path: Path) -> None:
    """Each at its step."""
    log = TensorBoardLog(tmp_path)
    for step in (1, 2):
        log(metrics(step_line(step)))
    log.close()
    found = [
        (event.step, round(value.simple_value, 6))
        for event in written(tmp_path)
        for value in event.summary.value
        if value.tag == "train/loss"
    ]
    assert found == [(1, 2.0), (2, 1.5)]
    # Figures of steps and evaluations; other lines have none
    assert dict(scalars(step_line(2)))["train/loss"] == 1.5
    assert dict(scalars(step_line(2)))["train/sent_bytes"] == 1010
    assert dict(scalars({"kind": "evaluation", "step": 2, "accuracy": 0.5, "loss": None})) == {"eval/accuracy": 0.5}
    assert dict(scalars({"kind": "move", "step": 2})) == {}


def test_tensorboard_of_a_resumed_run_hides_what_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file says from which step on older ones do not count."""
    log = TensorBoardLog(tmp_path)
    log(control_pb2.RunEvent(resumed_json=json.dumps({"step": 4, "passed_over": []})))
    log(metrics(step_line(5)))
    log.close()
    assert [event.step for event in written(tmp_path) if event.HasField("session_log")] == [5]
    # Another log, or the extra
    with pytest.raises(UsageError, match="is not one of tensorboard"):
        require_tensorboard("wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"\[tensorboard\]"):
        require_tensorboard("tensorboard")


@pytest.mark.parametrize(
    ("name", "message", "kind"),
    [
        ("job.toml", "holds no run: job.toml is missing", UsageError),
        ("plan.json", "holds no run: plan.json is missing", UsageError),
        ("adapter/adapter.safetensors", "has no adapter: adapter/adapter.safetensors is missing", InvalidInputError),
        ("adapter/head_config.json", "has no adapter: adapter/head_config.json is missing", InvalidInputError),
    ],
)
def test_saved_run_without_an_adapter_is_refused(
    tmp_path: Path, name: str, message: str, kind: type[RingTuneError]
) -> None:
    """What is missing is named: another folder is a wrong command line, an unfinished run a wrong input."""
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(kind, match=message):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("report.json", {"wall_s": "b"}, "report.json is damaged: wall_s is the text 'b'"),
        ("report.json", {"wall_s": math.inf}, "report.json is damaged: wall_s is the number inf"),
        ("report.json", {"eval": [1]}, "report.json is damaged: eval is a list"),
        ("metrics.jsonl", {"step": 1}, "line 1 is no JSON object with a kind"),
        ("metrics.jsonl", {"kind": "train", "loss": 1.0}, "line 1 has no step"),
        ("metrics.jsonl", {"kind": "train", "step": 1, "loss": "a"}, "line 1 is damaged: loss is the text 'a'"),
        ("metrics.jsonl", {"kind": "train", "step": [1]}, "line 1 is damaged: step is a list"),
        ("metrics.jsonl", {"kind": "train", "step": 1, "bytes": ""}, "line 1 is damaged: bytes is the text ''"),
    ],
)
def test_damaged_figure_is_named(tmp_path: Path, name: str, content: object, message: str) -> None:
    """Where report and metrics are read, for the table, the plot, the page and the card of a model alike."""
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(IntegrityError, match=re.escape(message)):
        read_report(folder) if name == "report.json" else read_metrics(folder)


def test_saved_run_of_own_weights_has_blocks_instead(tmp_path: Path) -> None:
    """It is whole without an adapter, and not without its blocks."""
    folder = write_run(tmp_path / "run")
    own_weights_instead(folder)
    assert read_run(folder).job.adapter.config == "full"
    (folder / "adapter/blocks.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"adapter/blocks\.safetensors is missing"):
        read_run(folder)


def test_saved_run_of_full_parameters_has_a_model(tmp_path: Path) -> None:
    """It is whole with a model folder, in one file or several; without weights it is not."""
    folder = write_run(tmp_path / "run")
    model = whole_model_instead(folder)
    assert read_run(folder).saved == model
    (model / "model.safetensors").rename(model / "model.safetensors.index.json")
    assert read_run(folder).saved == model
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidInputError, match=r"has no model: model/model\.safetensors is missing"):
        read_run(folder)


def test_evaluation_of_full_parameters_loads_all_of_them(tmp_path: Path) -> None:
    """The method stays, so that every node replaces every weight; of any other method only the adapter is known."""
    folder = write_run(tmp_path / "run")
    assert not evaluation_job(read_run(folder), None).method.full_parameters
    whole_model_instead(folder)
    job = evaluation_job(read_run(folder), None)
    assert job.method.full_parameters
    assert job.adapter.config == "full"


def test_evaluation_packs_no_rows(tmp_path: Path) -> None:
    """Evaluated rows never are; those for training would be encoded for nothing."""
    run = read_run(write_run(tmp_path / "run"))
    packed = run.job.with_overrides({"model.task": "causal-lm", "train.packing": True})
    course = dataclasses.replace(run.plan.course, labels=(), packed=True)
    run = dataclasses.replace(run, job=packed, plan=dataclasses.replace(run.plan, course=course))
    assert not evaluation_job(run, tmp_path / "rows.csv").train.packing


def test_evaluation_audits_nothing(tmp_path: Path) -> None:
    """Nodes need no memory for it."""
    run = read_run(write_run(tmp_path / "run"))
    run = dataclasses.replace(run, job=run.job.with_overrides({"audit.share": 0.1, "recovery.copies": "next"}))
    job = evaluation_job(run, None)
    assert MemorySettings.of_job(run.job).audit and not MemorySettings.of_job(job).audit


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (None, ", with the --local N or --coordinator that it was begun with"),
        ({"coordinator": "127.0.0.1:40123", "is_local": True, "local_nodes": 3}, " --local 3"),
        ({"coordinator": "127.0.0.1:7070", "is_local": False}, " --coordinator 127.0.0.1:7070"),
        ({"coordinator": "10.0.0.7:7070", "is_local": False}, " --coordinator 10.0.0.7:7070 --insecure"),
    ],
)
@pytest.mark.parametrize("is_saved", [True, False])
def test_saved_run_that_was_interrupted_says_how_to_go_on(
    tmp_path: Path, place: dict[str, Any] | None, where: str, is_saved: bool
) -> None:
    """From its newest checkpoint if there is one; else it has to be repeated; while it is under way, neither.

    The folder may tell where the run was driven, so the command can be typed as it stands.
    """
    folder = write_run(tmp_path / "run")
    (folder / "adapter/adapter.safetensors").unlink()
    if place is not None:
        location = RunLocation(run_id="r20260102-030405-00000000", pid=os.getpid(), **place)
        location.write(folder)
        with pytest.raises(InvalidInputError, match=f"is under way in process {os.getpid()}; wait for its end"):
            read_run(folder)
        dataclasses.replace(location, pid=1 << 22).write(folder)
    if is_saved:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints/step-6.json").write_text("{}")
    with pytest.raises(InvalidInputError) as refused:
        read_run(folder)
    told, _, line = str(refused.value).partition(" it: ")
    state, way = ("saved up to step 6", "resume") if is_saved else ("has no checkpoint yet", "replace")
    assert told.endswith(f"{state}; if it was stopped, {'resume' if is_saved else 'repeat'}")
    assert line == f"ringtune train {folder}/job.toml --out {folder} --{way}{where}"
    if place is not None:
        parse(line)


def test_saved_run_is_evaluated_by_one_owner_without_helpers(tmp_path: Path) -> None:
    """The nodes that evaluate are others than those that the job names."""
    run = read_run(write_run(tmp_path / "run"))
    job = run.job.with_overrides({"offload.mode": {"node-1": "laptop"}, "train.method": "all"})
    assert not evaluation_job(dataclasses.replace(run, job=job), None).offload.is_on
    # Without dropout VeLoRA that goes with dropout alone would be refused, and an evaluation keeps no activations
    job = run.job.with_overrides({"memory.activations": "velora", "velora.parts": 2, "train.dropout": 0.1})
    evaluated = evaluation_job(dataclasses.replace(run, job=job), None)
    assert (evaluated.memory, evaluated.velora, evaluated.train.dropout) == (Memory(), None, 0.0)
    # The file stands for all data, classes are those of the plan, and another model folder may be given
    made = evaluation_job(run, tmp_path / "rows.csv", model=tmp_path / "tiny")
    assert made.data.train == made.data.eval == str(tmp_path / "rows.csv")
    assert (made.data.labels, made.data.owners, made.data.split) == (LABELS, 0, "iid")
    assert made.model.path == str(tmp_path / "tiny")
    assert made.train.batch_size == run.job.train.batch_size


@pytest.mark.parametrize("frozen", [None, FrozenWeights(dtype="int8", native=True)])
def test_evaluation_holds_frozen_weights_as_the_run_did(tmp_path: Path, frozen: FrozenWeights | None) -> None:
    """What ``auto`` chose for the run is not chosen anew; how products are computed is the evaluating nodes' matter."""
    run = read_run(write_run(tmp_path / "run"))
    job = run.job.with_overrides({"runtime.frozen": "auto"})
    made = evaluation_job(dataclasses.replace(run, job=job, plan=changed(run.plan, frozen=frozen)), None)
    assert made.runtime.frozen == ("float32" if frozen is None else "int8")
