"""``import ringtune``: its few names, found by entry point, and what they cost."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ringtune
from ringtune.errors import RingTuneError
from tests.support.cases import cases
from tests.support.processes import source_environment
from tests.support.sources import ROOT

STUB = ROOT / "proto/ringtune/__init__.pyi"
LOADS = """
import json, sys, ringtune
before = sorted(sys.modules)
try:
    ringtune.train("none.toml", local=1)
except Exception as error:
    kind = type(error).__name__
print(json.dumps([before, sorted(sys.modules), kind]))
"""


def test_names_are_those_of_the_entry_points_and_of_the_stub() -> None:
    """Who reads the stub, as an editor does, sees what there is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(project["entry-points"]["ringtune.api"]) == sorted(ringtune.__all__)
    stub = ast.parse(STUB.read_text(encoding="utf-8"))
    imported = [
        (node.module, name.name) for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names
    ]
    targets = project["entry-points"]["ringtune.api"]
    assert {name: f"{module}:{name}" for module, name in imported} == targets
    assert [node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)] == ["__all__", "__version__"]


@cases("name", ringtune.__all__)
def test_name_is_documented(name: str) -> None:
    """Every name and every public member of the classes says what it does."""
    found = getattr(ringtune, name)
    assert name in dir(ringtune) and inspect.getdoc(found)
    members = inspect.getmembers(found) if inspect.isclass(found) else []
    assert [key for key, value in members if not key.startswith("_") and not inspect.getdoc(value)] == []


def test_dir_lists_what_a_user_may_want() -> None:
    """Tab completion shows the names of the API, whatever modules of the package are loaded."""
    importlib.import_module("ringtune.errors")
    assert [name for name in dir(ringtune) if not name.startswith("__")] == sorted(ringtune.__all__)
    assert "__version__" in dir(ringtune)


def test_import_alone_loads_nothing() -> None:
    """Neither the coordinator nor grpc; the first verb loads both, and nothing that only a node or a server needs.

    Its modules are counted, because seconds depend on the machine: under 520.
    """
    done = subprocess.run(  # noqa: S603 - our own modules
        [sys.executable, "-c", LOADS], capture_output=True, text=True, check=True, env=source_environment(), timeout=60
    )
    before, after, kind = json.loads(done.stdout)
    assert not {"coordinator", "grpc", "typer", "tomllib"} & set(before)
    assert "coordinator.api.train" in after and len(after) < 520
    assert not {"torch", "IPython", "typer", "rich", "cryptography", "coordinator.server.server"} & set(after)
    assert kind == "JobError"


def test_name_that_there_is_not_is_refused() -> None:
    """As by any module, and submodules are still found."""
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        ringtune.trian  # type: ignore[attr-defined]  # noqa: B018
    assert importlib.import_module("ringtune.errors").RingTuneError is RingTuneError
    assert Path(inspect.getfile(ringtune.train)).is_relative_to(ROOT)
