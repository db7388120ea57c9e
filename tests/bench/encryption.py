"""What mutual TLS costs a ring: ``python -m tests.bench.encryption``, a part of ``build/bench/trust.json``.

Two rings of four real nodes each stand side by side, one in plain text and one with certificates. Both follow the same
plan of the demo's MiniLM, one run after the other in pairs. Each step after the first ten is compared with the same
step of the other run, so that a moment of other work on the machine spoils a few steps and not a run.

================== ========================================================================= ========
tls_step_ratio     seconds of a step with TLS over those without, median of steps and pairs     <= 1.05
tls_run_ratio      seconds of all those steps together, median of interleaved pairs             reported
tls_cpu_ratio      processor seconds of all nodes with TLS over those without, the same pairs  reported
================== ========================================================================= ========
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.demo.fetch import demo_cache
from coordinator.demo.workspace import prepare
from ringtune.trust.places import VARIABLE
from tests.bench.jobs import write_job
from tests.bench.rings import RingRun
from tests.bench.trust_figures import write_part

OUT = Path("build/bench").resolve()  # folders for state have to be absolute
NODES = 4
STEPS, FIRST = 50, 10
WAIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Ring:
    """A coordinator with its nodes, and the variables of a user's commands."""

    address: str
    environment: dict[str, str]

    def run(self, *words: object) -> None:
        """Run a command of a user on it."""
        command = [sys.executable, "-m", "ringtune.cli", *map(str, words), "--coordinator", self.address]
        subprocess.run(command, check=True, env=self.environment, stdout=subprocess.DEVNULL)  # noqa: S603


@contextlib.contextmanager
def standing(folder: Path, port: int, data: Path, *, encrypted: bool) -> Iterator[Ring]:
    """Start a ring, of which the first node has the rows; end it afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), VARIABLE: ""}
    ring = Ring(f"127.0.0.1:{port}", environment)
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: object) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            command = [sys.executable, "-m", "ringtune.cli", *map(str, words)]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: S603
            stack.callback(process.wait, WAIT_S)
            stack.callback(process.terminate)

        def once(*words: object) -> None:
            command = [sys.executable, "-m", "ringtune.cli", *map(str, words)]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)  # noqa: S603

        if encrypted:
            once("coordinator", "init")
        start("coordinator", "coordinator", "--bind", ring.address)
        for index in range(NODES):
            name = f"node-{index}"
            more: list[object] = ["--data", data] if not index else []
            if encrypted:
                once("coordinator", "token", name, "--save", folder / f"{name}.token")
                more += ["--token-file", folder / f"{name}.token"]
            start(name, "node", "--name", name, "--threads", 1, "--coordinator", ring.address, *more)
        yield ring


def ratios(found: dict[str, list[float]]) -> list[float]:
    """What the encrypted ring took over what the plain one took, each beside its own counterpart."""
    return [with_s / without_s for with_s, without_s in zip(found["tls"], found["plain"], strict=True)]


def measure(pairs: int) -> dict[str, object]:
    """Measure so many pairs."""
    workspace = prepare(OUT / "encryption", demo_cache())
    data = workspace.job.with_name("train.csv").resolve()
    job = write_job(
        OUT / "encryption" / "job.toml",
        model=workspace.model.resolve(),
        train=data,
        steps=STEPS,
        more={"unfreeze.every_steps": 10},
    )
    plan = OUT / "encryption" / "plan.json"
    with (
        standing(OUT / "encryption" / "plain", 7471, data, encrypted=False) as plain,
        standing(OUT / "encryption" / "tls", 7481, data, encrypted=True) as tls,
    ):
        plain.run("plan", job, "--nodes", NODES, "--save", plan)
        step_s: dict[str, list[float]] = {"plain": [], "tls": []}
        run_s: dict[str, list[float]] = {"plain": [], "tls": []}
        cpu_s: dict[str, list[float]] = {"plain": [], "tls": []}
        for pair in range(pairs):
            order = [("plain", plain), ("tls", tls)]
            for name, ring in order if pair % 2 else reversed(order):
                out = OUT / "encryption" / f"run-{name}"
                ring.run("train", job, "--nodes", NODES, "--plan", plan, "--out", out, "--replace")
                found = RingRun(folder=out)
                run_s[name].append(found.wall_s(FIRST, STEPS))
                cpu_s[name].append(found.cpu_s)
                step_s[name] += found.step_s(FIRST, STEPS)
                print(name, round(run_s[name][-1], 3), round(cpu_s[name][-1], 3), flush=True)  # noqa: T201
            print("so far", statistics.median(ratios(step_s)), flush=True)  # noqa: T201
    return {
        "tls_step_ratio": statistics.median(ratios(step_s)),
        "tls_run_ratio": statistics.median(ratios(run_s)),
        "tls_cpu_ratio": statistics.median(ratios(cpu_s)),
        "run_s": run_s,
        "cpu_s": cpu_s,
        "pairs": pairs,
        "nodes": NODES,
        "steps": STEPS - FIRST,
    }


def main() -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=3)
    figures = measure(parser.parse_args().pairs)
    write_part("encryption", figures)
    print(json.dumps(figures, indent=2))  # noqa: T201
    return 0 if float(str(figures["tls_step_ratio"])) <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
