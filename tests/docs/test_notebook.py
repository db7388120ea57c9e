"""The example notebook: it is read as one, names what there is, and its cells run in order."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ringtune
from tests.support.processes import RUN_S, source_environment

NOTEBOOK = Path(__file__).parents[2] / "docs/examples/notebook/tour.ipynb"


def code_cells() -> list[str]:
    """The code of each cell that has code."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def script() -> str:
    """All cells one after the other; what a notebook would show of a cell's last line is printed."""
    lines = []
    for cell in code_cells():
        *before, last = ast.parse(cell).body
        lines += [ast.unparse(each) for each in before]
        lines.append(f"print(repr({ast.unparse(last)}))" if isinstance(last, ast.Expr) else ast.unparse(last))
    return "\n".join(lines)


def test_notebook_is_saved_without_outputs() -> None:
    """So that it shows nothing of one machine, and every change of it can be read."""
    value = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (value["nbformat"], value["nbformat_minor"]) == (4, 5)
    assert [cell["outputs"] for cell in value["cells"] if cell["cell_type"] == "code"] == [[]] * len(code_cells())
    assert len({cell["id"] for cell in value["cells"]}) == len(value["cells"])


def test_notebook_names_what_there_is() -> None:
    """Every name of ``ringtune`` and of a run that a cell uses, and most of what there is."""
    used = [node for node in ast.walk(ast.parse(script())) if isinstance(node, ast.Attribute)]
    of_module = {each.attr for each in used if isinstance(each.value, ast.Name) and each.value.id == "ringtune"}
    of_runs = {each.attr for each in used if isinstance(each.value, ast.Name) and each.value.id in ("run", "left")}
    assert of_module == {"plan", "train", "what_if"} <= set(ringtune.__all__)
    assert {name for name in of_runs if not hasattr(ringtune.Run, name)} == set()
    assert {"metrics", "plot", "adapter", "evaluate", "predict", "stop"} <= of_runs


@pytest.mark.slow
@pytest.mark.thorough
def test_notebook_runs(tmp_path: Path) -> None:
    """In a process of its own, from the first cell to the last, with real agents."""
    done = subprocess.run(  # noqa: S603 - our own notebook
        [sys.executable, "-c", script()],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        cwd=tmp_path,
        env=source_environment(TMPDIR=str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert "step 12/12" in done.stdout and "(4 rows)" in done.stdout
    assert "'running'" in done.stdout and "('stopped', " in done.stdout
    assert "unknown key 'train.round'; did you mean 'rounds'?" in done.stdout
