"""A run in several parts: nothing of an earlier one is lost, and the sums go through all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.run_folder.folder import RunFolder
from coordinator.run_folder.parts import RunParts


def line(step: int, **more: Any) -> str:
    """What the coordinator sends for a step."""
    values = {"loss": 1.0 - step / 10, "seconds": 0.5, "bytes": {"a>b": 10 + step, "b>a": 1}, **more}
    values = {"kind": "train", "step": step + 1, **values}
    return json.dumps(values)


def part(folder: Path, first: int, stop: int, *, resume: bool, report: bool) -> dict[str, Any]:
    """Write a part of a run as its submitter does; with a report if it came to its end."""
    with RunFolder(folder, resume=resume) as files:
        if resume:
            files.go_back_to(first)
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
