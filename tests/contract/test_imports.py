"""What an import may cost: the pure packages and the command line load neither torch nor grpc."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

from tests.support.cases import cases

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "grpc", "psutil", "numpy", "transformers", "adapters", "safetensors")
HELP_FACTOR = 4
HELP_TRIES = 30
HELP_MODULES = """
import json, runpy, sys
sys.argv = ["ringtune", "--help"]
try:
    runpy.run_module("ringtune.cli", run_name="__main__")
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""

# the ends of connections, which nothing else of these packages imports
WITH_GRPC = tuple(
    f"ringtune.transport.{name}"
    for name in (
        "channels",
        "tls",
        "enrollment",
        "retry",
        "status",
        "weights_servicer",
    )
)

# the only room with numpy, which others import when they need it
KNAPSACKS = "ringtune.techniques.knapsacks"

LIST_LOADED = """
import importlib, json, pkgutil, sys
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        left_out = module.name in {with_grpc!r} or module.name.startswith({left_out!r})
        if not module.name.endswith("_pb2_grpc") and not left_out:
            importlib.import_module(module.name)
print(json.dumps(sorted(set({heavy!r}) & set(sys.modules))))
"""


def _environment(**more: str) -> dict[str, str]:
    """A clean environment in which the packages of this tree are found."""
    return {"PYTHONPATH": f"{ROOT / 'proto'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **more}


def _loaded(*packages: str, heavy: tuple[str, ...] = HEAVY, left_out: str = KNAPSACKS) -> list[str]:
    """The heavy libraries that a fresh interpreter holds after importing every module of ``packages``."""
    code = LIST_LOADED.format(packages=packages, heavy=heavy, with_grpc=WITH_GRPC, left_out=left_out)
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


@cases("package", ["ringtune", "sim", "coordinator.planner.make_plan"])
def test_imports_of_pure_packages_are_light(package: str) -> None:
    """The rules, the simulator and the planner load no torch, no grpc and nothing else that is heavy."""
    assert _loaded(package) == []


def test_imports_of_coordinator_have_no_torch() -> None:
    """A coordinator runs where torch is not installed; numpy comes only with the knapsacks."""
    assert set(_loaded("coordinator")) <= {"grpc"}


def test_imports_of_knapsacks_have_only_numpy() -> None:
    """The knapsacks of operation tables take numpy and nothing else that is heavy."""
    assert set(_loaded(KNAPSACKS, left_out="nothing")) <= {"numpy"}


def test_help_answers_at_once() -> None:
    """``ringtune --help`` takes under four times what the libraries that print it take to load, and names all it has.

    That was 0.3 s on the machine where those take 0.075 s. Counted are processor seconds, which load lengthens
    for both: the two take turns, and the quickest of each come nearest to what they need themselves.
    """
    command = [str(Path(sys.executable).with_name("ringtune")), "--help"]
    if not Path(command[0]).exists():
        command = [sys.executable, "-m", "ringtune.cli", "--help"]
    libraries = [sys.executable, "-c", "import typer.main, rich.console, rich.panel, rich.table"]
    took_s, base_s, out = [math.inf], [math.inf], ""
    while len(took_s) <= HELP_TRIES and not min(took_s) < HELP_FACTOR * min(base_s) < math.inf:
        base_s.append(_processor_s(libraries)[0])
        seconds, out = _processor_s(command)
        took_s.append(seconds)
    for name in ("train", "coordinator", "node", "nodes", "plan", "demo"):
        assert name in out
    assert min(took_s) < HELP_FACTOR * min(base_s), (took_s, base_s)


def _processor_s(command: list[str]) -> tuple[float, str]:
    """Run a command; return its processor seconds and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, check=True, timeout=60, env=_environment()
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


def test_help_loads_little() -> None:
    """No machine is too slow for this count: under 450 modules, none of them heavy or of an agent's."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", HELP_MODULES], capture_output=True, text=True, check=True, timeout=60, env=_environment()
    )
    modules = json.loads(done.stderr.splitlines()[-1])
    assert len(modules) < 450
    assert not set(HEAVY) & set(modules)
    assert not [name for name in modules if name.startswith(("edge.agent", "edge.runtime", "coordinator.run", "sim."))]
