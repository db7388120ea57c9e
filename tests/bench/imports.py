"""``python -m tests.bench.imports``: what a start costs, stage by stage, each in fresh processes.

========== =======================================================================================
help       ``ringtune --help``, the whole process
joined     an agent from its start until the coordinator lists it; nothing of torch is loaded yet
torch      ``import torch`` in that agent's place
libraries  what a slice of any family needs of transformers and adapters, after torch
kernels    each kind of work of a block once
========== =======================================================================================

Prints JSON: for each stage the median seconds by the clock, and the resident bytes at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.server.server import CoordinatorServer

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 60.0
_RSS = """
import json, os, sys, time
from pathlib import Path
def rss():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10
"""
# An agent that, when it would load torch, tells what it has loaded so far and ends.
_JOIN = (
    _RSS
    + """
from edge.agent.agent import Agent
def tell(agent):
    print(json.dumps({"rss_bytes": rss(), "modules": sorted(sys.modules)}), flush=True)
    os._exit(0)
Agent.preload = tell
sys.argv[0] = "edge"
from edge.__main__ import main
sys.exit(main())
"""
)
_LOAD = (
    _RSS
    + """
import edge.agent.process
stages = {}
def stage(name, work):
    began_s = time.perf_counter()
    work()
    stages[name] = {"seconds": time.perf_counter() - began_s, "rss_bytes": rss()}
def load_torch():
    import torch
stage("torch", load_torch)
from edge.machine.libraries import load_libraries, touch_kernels
stage("libraries", load_libraries)
stage("kernels", touch_kernels)
print(json.dumps({"stages": stages, "modules": sorted(sys.modules)}), flush=True)
"""
)
_HELP = (
    _RSS
    + """
import atexit
sys.argv = ["ringtune", "--help"]
atexit.register(lambda: print(json.dumps({"rss_bytes": rss()}), flush=True))
from ringtune.cli import main
main()
"""
)


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with the packages of this tree."""
    return {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'proto'}:{REPOSITORY}", **more}


def python(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run code in a fresh interpreter.

    Returns:
        The JSON of its last line.
    """
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env=dict(env) if env is not None else environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"exit {done.returncode}: {done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def join_once() -> dict[str, Any]:
    """Start an agent and end it where it would load torch.

    Returns:
        ``seconds`` until it was a member, and its ``rss_bytes`` and ``modules`` at that moment.
    """
    with CoordinatorServer("127.0.0.1:0", lease_s=TIMEOUT_S) as server:
        began_s = time.perf_counter()
        found = python(_JOIN, "--coordinator", server.address, "--name", "a", "--memory", "1GiB")
        return {"seconds": time.perf_counter() - began_s, **found}


def load_once(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Load what a slice needs, as an agent does after it has joined.

    Returns:
        ``stages`` with seconds and resident bytes of each, and all ``modules``.
    """
    return python(_LOAD, env=env)


def help_once() -> dict[str, Any]:
    """``ringtune --help``: seconds and resident bytes."""
    began_s = time.perf_counter()
    found = python(_HELP)
    return {"seconds": time.perf_counter() - began_s, **found}


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Every stage ``repeats`` times; medians."""
    taken: dict[str, list[Mapping[str, float]]] = {}
    for _ in range(repeats):
        stages = {"help": help_once(), "joined": join_once(), **load_once()["stages"]}
        for name, found in stages.items():
            taken.setdefault(name, []).append(found)
    return {
        name: {
            "seconds": round(statistics.median(entry["seconds"] for entry in entries), 3),
            "rss_bytes": round(statistics.median(entry["rss_bytes"] for entry in entries)),
        }
        for name, entries in taken.items()
    }


def main() -> None:
    """Read the command line, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args().repeats), indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
