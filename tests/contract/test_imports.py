"""What an import may cost: the pure packages and the command line load neither torch nor grpc."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

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
    f"ringtune.transport.{name}" for name in ("channels", "tls", "enrollment", "retry", "status", "weights_servicer")
)

# the only room with numpy, which others import when they need it
KNAPSACKS = "ringtune.techniques.knapsacks"

LIST_LOADED = """
import importlib, json, pkgutil, sys

def load(*packages, left_out):
    for name in packages:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
            is_left_out = module.name in {with_grpc!r} or bool(left_out) and module.name.startswith(left_out)
            if not module.name.endswith("_pb2_grpc") and not is_left_out:
                importlib.import_module(module.name)
    return sorted(set({heavy!r}) & set(sys.modules))

pure = load("ringtune", "sim", "coordinator.planner.make_plan", left_out={knapsacks!r})
print(json.dumps([pure, load("coordinator", left_out={knapsacks!r}), load({knapsacks!r}, left_out="")]))
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a clean environment in which the packages of this tree are found."""
    env = {"PYTHONPATH": f"{ROOT / 'proto'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, check=True, timeout=60, env=env, stdin=subprocess.DEVNULL
    )


def test_imports_load_nothing_heavy_that_they_can_do_without() -> None:
    """One interpreter imports every module of the rules, the simulator and the planner: none of the heavy libraries.

    Those of the coordinator after them need grpc and no torch; the knapsacks of operation tables need numpy besides.
    """
    code = LIST_LOADED.replace("{with_grpc!r}", repr(WITH_GRPC)).replace("{heavy!r}", repr(HEAVY))
    done = _run(sys.executable, "-c", code.replace("{knapsacks!r}", repr(KNAPSACKS)))
    pure, coordinator, knapsacks = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert pure == set()
    assert coordinator <= {"grpc"}
    assert knapsacks <= {"grpc", "numpy"}


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
    done = _run(*command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


def test_help_loads_little() -> None:
    """No machine is too slow for this count: under 450 modules, none of them heavy or of an agent's."""
    done = _run(sys.executable, "-c", HELP_MODULES)
    modules = json.loads(done.stderr.splitlines()[-1])
    assert len(modules) < 450
    assert not set(HEAVY) & set(modules)
    assert not [name for name in modules if name.startswith(("edge.agent", "edge.runtime", "coordinator.run", "sim."))]
