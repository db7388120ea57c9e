"""A sample of text at the end of a run: from the job's prompt, in the report, and never a failure of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.predicting import sample
from coordinator.predicting.process import Predicted, Sampling
from coordinator.screen.progress import Progress
from ringtune.errors import ModelError
from ringtune.files.tables import table_rows
from tests.support.fake_agents import job
from tests.support.saved_runs import write_run

PROMPT = "Once\n upon"


class Notes(Progress):
    """Remembers what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        """Remember it."""
        self.told.append(text)


def shown(folder: Path, prompt: str = PROMPT) -> list[str]:
    """What is told of a sample."""
    notes = Notes()
    sample.show_sample(job(model__task="causal-lm", train__sample_prompt=prompt), folder, notes)
    return notes.told


def test_sample_goes_on_from_the_prompt_and_stands_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt goes to the one that predicts as it is; the report keeps what it had."""
    folder = write_run(tmp_path / "run")
    before = json.loads((folder / "report.json").read_text())

    def fake(run: Any, data: Path, how: Sampling) -> Iterator[Predicted]:
        ((_, row),) = table_rows(data, {"data.text": "text"})
        assert (row["text"], how) == (PROMPT, Sampling(max_new_tokens=40))
        yield Predicted(row, {"predicted": " a time.\nThe end", "tokens": 6})

    monkeypatch.setattr(sample, "predict_rows", fake)
    assert shown(folder) == [
        "sample of text, 6 tokens after train.sample_prompt:",
        "  Once",
        "   upon a time.",
        "  The end",
    ]
    wanted = {"prompt": PROMPT, "text": " a time.\nThe end", "tokens": 6}
    assert json.loads((folder / "report.json").read_text()) == before | {"sample": wanted}


def test_sample_is_not_made_without_a_prompt(tmp_path: Path) -> None:
    """Nothing is read or told."""
    assert shown(tmp_path / "gone", "") == []


def test_sample_that_can_not_be_made_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the reason and the way; the report is as it was."""
    folder = write_run(tmp_path / "run")
    before = (folder / "report.json").read_bytes()

    def fails(*_: Any) -> Iterator[Predicted]:
        raise ModelError("the base model is not here")

    monkeypatch.setattr(sample, "predict_rows", fails)
    (told,) = shown(folder)
    assert told == "no sample of text: the base model is not here; 'ringtune predict' makes one where the base model is"
    assert (folder / "report.json").read_bytes() == before
