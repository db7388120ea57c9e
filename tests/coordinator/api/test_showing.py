"""Progress below the cell of a notebook, and where nothing is wanted."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest

from coordinator.api.showing import NotebookProgress, choose_progress, is_notebook
from coordinator.screen.progress import PlainProgress, Progress


def step(number: int, **more: object) -> dict[str, Any]:
    """The numbers of a step."""
    line = {"kind": "train", "step": number, "num_steps": 20, "round": 1, "initiator": "a", "depth": 1, "loss": 0.5}
    return {**line, **more}


def test_notebook_shows_steps_on_one_line() -> None:
    """Each is written over the one before, however short; a note stands above, on a line of its own."""
    stream = io.StringIO()
    progress = NotebookProgress(stream)
    progress.note("training ...")
    progress.step(step(9, initiator="a-long-name"))
    progress.step(step(10))
    progress.note("saved")
    progress.step(step(8))
    long, short = (
        "step 9/20: round 1, a-long-name, depth 1, loss 0.5000",
        "step 10/20: round 1, a, depth 1, loss 0.5000",
    )
    wiped = "\r" + " " * len(long) + "\r"
    assert stream.getvalue() == f"training ...\n\r{long}\r{short.ljust(len(long))}{wiped}saved\n"


def test_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython on a terminal has none, and where it is not loaded it is not asked."""
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not is_notebook()
    for shell, found in ((None, False), (types.SimpleNamespace(), False), (types.SimpleNamespace(kernel=1), True)):
        fake: Any = types.ModuleType("IPython")
        fake.get_ipython = lambda shell=shell: shell
        monkeypatch.setitem(sys.modules, "IPython", fake)
        assert is_notebook() is found
    assert isinstance(choose_progress(True), NotebookProgress)


def test_progress_that_is_not_wanted_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise plain lines where there is no terminal."""
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(choose_progress(False)) is Progress
    assert type(choose_progress(True)) is PlainProgress
