"""Each documented install: every command explains itself, and a coordinator starts.

The installs are those of ``pip install ringtune`` and of ``ringtune[EXTRA]``. An interpreter in which the packages of
all extras can't be found stands in for the environment; ``make smoke`` makes real ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import cases

ROOT = Path(__file__).parents[2]
FOR_DEVELOPERS = {"browser", "dev", "docs"}
CORE = ("ringtune", "coordinator", "sim", "edge.cli")
OF_AN_EXTRA = {
    "database": ["coordinator.server.database"],
    "web": ["coordinator.web.app", "coordinator.web.completions", "coordinator.web.metrics"],
}
"""Modules of ``CORE`` that can't be imported without an extra, and can with it; all others always can."""

CHILD = """
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder
from importlib.metadata import distribution, packages_distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

extras, ours, of_an_extra, state = json.loads(sys.argv[1])


def installed_with(extra):
    # Top-level modules of the core's requirements and of an extra's, with all that those require.
    names, seen = {"ringtune"}, set()
    waiting = [(Requirement(line), "") for of in {"", extra} for line in extras[of]]
    while waiting:
        wanted, of = waiting.pop()
        if (str(wanted), of) in seen or not (wanted.marker is None or wanted.marker.evaluate({"extra": of})):
            continue
        seen.add((str(wanted), of))
        names.add(canonicalize_name(wanted.name))
        below = [Requirement(line) for line in distribution(wanted.name).requires or ()]
        waiting += [(line, inner) for line in below for inner in {"", *wanted.extras}]
    return {top for top, of in everything.items() if names & {canonicalize_name(name) for name in of}}


class Installed(PathFinder):
    missing = set()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.missing else super().find_spec(name, path, target)


def imported(modules):
    failed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            failed.append(name)
    return failed


everything = packages_distributions()
Installed.missing = set(everything) - installed_with("") - {*ours, "edge", "tests"}
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
from typer.testing import CliRunner
from ringtune import cli
from coordinator.server.coordinator import ShutdownSignals

failed = {}
for words in cli.all_commands():
    done = CliRunner().invoke(cli.app, [*words.split(), "--help"])
    if done.exit_code or "not installed" in done.output:
        failed[words] = done.output + repr(done.exception)
ShutdownSignals.wait = lambda _: True
done = CliRunner().invoke(cli.app, ["coordinator", "--bind", "127.0.0.1:0", "--state", state])
if done.exit_code or "listening" not in done.output:
    failed["start of a coordinator"] = done.output + repr(done.exception)
done = CliRunner().invoke(cli.app, ["doctor", "--role", "coordinator", "--bind", "127.0.0.1:0", "--disk", state])
if done.exit_code or "FAIL" in done.output:
    failed["doctor"] = done.output + repr(done.exception)
modules = [
    module.name
    for name in ours
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + ".")
]
without = imported(modules)
missing = sorted(Installed.missing)
with_extra = {}
for extra, names in of_an_extra.items():
    Installed.missing = set(missing) - installed_with(extra)
    with_extra[extra] = imported(names)
print(json.dumps({"failed": failed, "missing": missing, "without": sorted(without), "with": with_extra}))
"""


def _requirements() -> dict[str, list[str]]:
    """The requirements of every extra that users install; ``""`` has those without one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: of for name, of in project["optional-dependencies"].items() if name not in FOR_DEVELOPERS}
    return {"": project["dependencies"], **extras}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an interpreter without any extra says of helps, of a coordinator and of all modules."""
    home = tmp_path_factory.mktemp("bare")
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", CHILD, json.dumps([_requirements(), CORE, OF_AN_EXTRA, str(home / "state")])],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": f"{ROOT / 'proto'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(home)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_installs_have_every_help_and_a_coordinator(bare: dict[str, Any]) -> None:
    """Without any extra each command has its help, and a coordinator starts."""
    assert {"torch", "starlette", "prometheus_client", "joblib", "matplotlib", "zeroconf"} <= set(bare["missing"])
    assert bare["failed"] == {}


@cases(("target", "extras"), [("demo", "node,web"), ("setup", "node,web,dev,docs")])
def test_installs_of_make_are_what_a_target_needs(tmp_path: Path, target: str, extras: str) -> None:
    """A demo waits for no linter and no tool of the site; one environment of all does for it too."""
    words = ["make", "--dry-run", f"VENV={tmp_path}", target]

    def printed() -> str:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
        return done.stdout

    assert f"-e '.[{extras}]'" in printed()
    (tmp_path / "ringtune.stamp").touch()
    assert "pip" not in printed()


def test_installs_lack_only_what_an_extra_names(bare: dict[str, Any]) -> None:
    """A module needs no extra, or one that is named here and brings all of it."""
    assert bare["without"] == sorted(name for names in OF_AN_EXTRA.values() for name in names)
    assert bare["with"] == {extra: [] for extra in OF_AN_EXTRA}
