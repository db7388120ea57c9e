"""Files of a run's folder: parts of a resumed run, operation tables, metrics for TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from coordinator.client.run_files import NAME, RunParts, TablesFile, TensorBoardLog, require_tensorboard, scalars
from coordinator.client.run_folder import RunFolder, files_of_run
from ringtune.errors import IntegrityError, UsageError
from ringtune.schedule.operation_tables import ScheduledTable, tables_from_json, tables_to_json
from ringtune.v1 import control_pb2
from tests.support.choosing import make_choice, table_of
from tests.support.page_runs import metrics, step_line
from tests.support.plans import changed, make_plan


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


def test_report_of_a_run_in_one_part_is_as_it_came(tmp_path: Path) -> None:
    """Nothing is added where nothing was stopped."""
    assert part(tmp_path, 0, 4, resume=False, report=True) == {"steps": 4, "wall_s": 9.0}
    assert not (tmp_path / "parts").exists()


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
    """Each part's time line stays, numbered in order; the newest has the usual name."""
    part(tmp_path, 0, 4, resume=False, report=True)
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
    assert RunParts(tmp_path).completed({"steps": 1}, tmp_path / "metrics.jsonl") == {"steps": 1}


def test_folder_that_is_replaced_forgets_its_parts(tmp_path: Path) -> None:
    """A new run in an old folder has no past."""
    out = tmp_path / "run"
    part(out, 0, 4, resume=False, report=False)
    part(out, 2, 4, resume=True, report=True)
    with RunFolder(out, replace=True):
        assert not (out / "parts").exists()


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


def test_tables_file_a_decision_that_comes_again_counts_once(tmp_path: Path) -> None:
    """A run that goes on from step 4 chooses there again; what came later is done again too."""
    file = filled(tmp_path, 0, 4, 8)
    file.add(json.dumps(entry(4, 1).to_json()))
    assert file.read() == (entry(0), entry(4, 1))


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, [0]), (4, [0]), (6, [0, 4]), (99, [0, 4, 8])])
def test_tables_file_goes_back_with_the_run(tmp_path: Path, step: int, left: list[int]) -> None:
    """Decisions for the step itself are made again; those before it stand."""
    with RunFolder(tmp_path):
        filled(tmp_path, 0, 4, 8)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.rewind_to(step)
    assert [table.step for table in TablesFile(tmp_path).read()] == left
    assert (tmp_path / NAME).exists() == bool(left)


def test_tables_file_is_a_file_of_the_run(tmp_path: Path) -> None:
    """It is replaced with the run."""
    filled(tmp_path, 0)
    assert files_of_run(tmp_path) == (NAME,)


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


def test_tables_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision is written beside the earlier ones without reading them again, in a run that goes on too."""
    filled(tmp_path, 0, 4)
    reads: list[Path] = []
    real = Path.read_text

    def counted(path: Path, *args: Any, **kwargs: Any) -> str:
        reads.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", counted)
    file = filled(tmp_path, *range(8, 40, 4))
    assert len(reads) == 1
    file.rewind_to(12)
    file.add(json.dumps(entry(12, 1).to_json()))
    assert len(reads) == 1
    assert file.read() == (entry(0), entry(4), entry(8), entry(12, 1))
    assert json.loads((tmp_path / NAME).read_text()) == tables_to_json(file.read())


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


def test_scalars_of_lines() -> None:
    """Figures of steps and evaluations; other lines have none."""
    assert dict(scalars(step_line(2)))["train/loss"] == 1.5
    assert dict(scalars(step_line(2)))["train/sent_bytes"] == 1010
    assert dict(scalars({"kind": "evaluation", "step": 2, "accuracy": 0.5, "loss": None})) == {"eval/accuracy": 0.5}
    assert dict(scalars({"kind": "move", "step": 2})) == {}


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


def test_tensorboard_of_a_resumed_run_hides_what_is_done_again(tmp_path: Path) -> None:
    """Its file says from which step on older ones do not count."""
    log = TensorBoardLog(tmp_path)
    log(control_pb2.RunEvent(resumed_json=json.dumps({"step": 4, "passed_over": []})))
    log(metrics(step_line(5)))
    log.close()
    assert [event.step for event in written(tmp_path) if event.HasField("session_log")] == [5]


def test_tensorboard_of_a_run_without_steps_writes_nothing(tmp_path: Path) -> None:
    """Not even its library is loaded."""
    TensorBoardLog(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_require_tensorboard_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another log, or the extra."""
    with pytest.raises(UsageError, match="is not one of tensorboard"):
        require_tensorboard("wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"\[tensorboard\]"):
        require_tensorboard("tensorboard")
