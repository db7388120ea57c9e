"""``operations.json``: every decision with its step, and nothing of what is done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.run_folder.folder import RunFolder, files_of_run
from coordinator.run_folder.tables_file import NAME, TablesFile
from ringtune.errors import IntegrityError
from ringtune.schedule.operations.given import GivenTable, tables_from_json, tables_to_json
from tests.support.choosing import make_choice, table_of
from tests.support.plans import changed, make_plan

COURSE = changed(make_plan([("a", 0, 4)], ["a"]), choice=make_choice()).course


def entry(step: int, seed: int = 0) -> GivenTable:
    """What was chosen at a step."""
    return GivenTable(step=step, operations=table_of(COURSE, f"{step}/{seed}"))


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
        folder.go_back_to(step)
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
    file.go_back_to(12)
    file.add(json.dumps(entry(12, 1).to_json()))
    assert len(reads) == 1
    assert file.read() == (entry(0), entry(4), entry(8), entry(12, 1))
    assert json.loads((tmp_path / NAME).read_text()) == tables_to_json(file.read())
