"""What an import may cost: the pure packages and the command line load neither torch nor grpc."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "grpc", "psutil", "numpy", "transformers", "adapters", "safetensors")
HELP_LIMIT_S = 0.3
HELP_TRIES = 30

# the ends of connections, which nothing else of these packages imports
WITH_GRPC = ("ringtune.rpc.connections", "ringtune.rpc.statuses", "ringtune.rpc.weights_servicer")

LIST_LOADED = """
import importlib, json, pkgutil, sys
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        if not module.name.endswith("_pb2_grpc") and module.name not in {with_grpc!r}:
            importlib.import_module(module.name)
print(json.dumps(sorted(set({heavy!r}) & set(sys.modules))))
"""


def _environment(**more: str) -> dict[str, str]:
    """A clean environment in which the packages of this tree are found."""
    return {"PYTHONPATH": f"{ROOT / 'proto'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **more}


def _loaded(*packages: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """The heavy libraries that a fresh interpreter holds after importing every module of ``packages``."""
    code = LIST_LOADED.format(packages=packages, heavy=heavy, with_grpc=WITH_GRPC)
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=_environment(),
        stdin=subprocess.DEVNULL,
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", ["ringtune", "sim", "coordinator.planner.make_plan"])
def test_imports_of_pure_packages_are_light(package: str) -> None:
    """The rules, the simulator and the planner load no torch, no grpc and nothing else that is heavy."""
    assert _loaded(package) == []


def test_imports_of_coordinator_have_no_torch() -> None:
    """A coordinator runs where torch is not installed."""
    assert set(_loaded("coordinator")) <= {"grpc"}


def test_help_answers_at_once() -> None:
    """``ringtune --help`` takes under 0.3 s, interpreter start included, and names every sub-command.

    Counted are the processor seconds of the process, which waits for nothing: on an idle machine they are what the
    clock shows. Neighbours that share a core or its caches lengthen them too, so the process gets several tries: the
    quickest comes nearest to what it needs itself.
    """
    command = [str(Path(sys.executable).with_name("ringtune")), "--help"]
    if not Path(command[0]).exists():
        command = [sys.executable, "-m", "ringtune.cli", "--help"]
    took_s, out = [HELP_LIMIT_S], ""
    while len(took_s) <= HELP_TRIES and min(took_s) >= HELP_LIMIT_S:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=True, timeout=30, env=_environment()
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        out = done.stdout
    for name in ("train", "coordinator", "node", "nodes", "plan", "demo"):
        assert name in out
    assert min(took_s) < HELP_LIMIT_S, took_s
