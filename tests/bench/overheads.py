"""What copies of each turn's end cost a ring, and what mutual TLS costs it: ``python -m tests.bench.overheads``.

Writes the parts *copies* and *encryption* of ``build/bench/trust.json``. Four boards of the testbed, each with a quota
of 0.4 cores that it gets whatever else the machine does, train the demo's MiniLM. On each board stand a node in plain
text and one with a certificate, of two coordinators; they train by turns. A round is a run of each kind, in changing
order: plain without copies, plain with copies, encrypted without copies. All follow the same plan, but for the copies.

================ ==================================================================================== =========
copies.turn      seconds of a turn with copies over those of the same turn without, of the same round  <= 1.03
copies.cpu       the same of the processor seconds of all nodes of a run                                <= 1.03
encryption.turn  seconds of a turn with TLS over those in plain text                                    <= 1.05
encryption.cpu   the same of the processor seconds                                                      <= 1.05
================ ==================================================================================== =========

Each is a median of paired ratios with its 95 % interval. Exit code 1 if one of them is above its bound in all of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.demo.fetch import demo_cache
from coordinator.demo.workspace import prepare
from coordinator.planner.given.given_plan import GivenPlan
from deploy.testbed.capabilities import SKIPPED_EXIT_CODE, MissingCapability
from deploy.testbed.network import address, hub_address
from deploy.testbed.testbed import Testbed
from ringtune.schedule.plan import Plan
from ringtune.trust.places import VARIABLE
from tests.bench.jobs import write_job
from tests.bench.paired import ratio_figures
from tests.bench.rings import RingRun
from tests.bench.testbed_runs import equal_boards, say
from tests.bench.trust_figures import write_part

OUT = Path("build/bench/overheads").resolve()
PORTS = {"plain": 7070, "tls": 7170}
KINDS = {"plain": ("plain", False), "copies": ("plain", True), "tls": ("tls", False)}
BOUNDS = {"copies": 1.03, "tls": 1.05}
PARTS = {"copies": "copies", "tls": "encryption"}
STEPS, TURN, FIRST = 60, 10, 10
RUN_S = 1200.0
_PYTHON = (sys.executable, "-P", "-m")


class TwoRings:
    """A ring in plain text and one with certificates, on the same boards.

    Args:
        bed: the boards, of which the first has the rows.
        folder: for states and runs.
        rows: of the first board.
    """

    def __init__(self, bed: Testbed, folder: Path, rows: Path) -> None:
        self.bed, self.folder = bed, folder
        self.run("tls", "coordinator", "init", connects=False)
        for ring, port in PORTS.items():
            more = ("--insecure",) if ring == "plain" else ()
            listen = (
                "coordinator",
                "--bind",
                f"{hub_address()}:{port}",
                "--state",
                str(folder / "state" / ring),
                *more,
            )
            bed.start(f"coordinator-{ring}", (*self._as_user(ring), *_PYTHON, "ringtune.cli", *listen))
            for board in bed.layout.boards:
                words = ["--coordinator", f"{hub_address()}:{port}", "--name", board.name, "--threads", "1", *more]
                words += ["--bind", f"{address(bed.layout, board)}:{port}", "--join-s", "300"]
                words += ["--state", str(folder / "state" / f"{ring}-{board.name}")]
                words += ["--data", str(rows)] if board is bed.layout.boards[0] else []
                if ring == "tls":
                    token = folder / f"{board.name}.token"
                    self.run("tls", "coordinator", "token", board.name, "--save", str(token), connects=False)
                    words += ["--token-file", str(token)]
                bed.start(f"{ring}-{board.name}", (*_PYTHON, "edge", *words), on=board.name)

    def _as_user(self, ring: str) -> tuple[str, ...]:
        return "env", f"XDG_STATE_HOME={self.folder / f'user-{ring}'}", f"{VARIABLE}="

    def run(self, ring: str, *words: str, connects: bool = True) -> None:
        """Run a command of a user on one of the rings."""
        where = ["--coordinator", f"{hub_address()}:{PORTS[ring]}"] if connects else []
        where += ["--insecure"] if connects and ring == "plain" else []
        code = self.bed.run((*self._as_user(ring), *_PYTHON, "ringtune.cli", *words, *where), timeout_s=RUN_S)
        if code:
            raise RuntimeError(f"ringtune {' '.join(words[:2])} on ring {ring} ended with {code}")


@dataclass
class Taken:
    """What runs of one kind took, a run after the other."""

    turns_s: list[list[float]] = field(default_factory=list)
    cpu_s: list[list[float]] = field(default_factory=list)

    def add(self, run: RingRun) -> None:
        """Take a run into account, but for its first turn."""
        self.turns_s.append([run.wall_s(first, first + TURN) for first in range(FIRST, STEPS, TURN)])
        self.cpu_s.append([run.cpu_s])


def plans(rings: TwoRings, job: Path) -> dict[bool, Path]:
    """The same plan without and with copies."""
    path = rings.folder / "plan.json"
    rings.run("plain", "plan", str(job), "--nodes", str(len(rings.bed.layout.boards)), "--save", str(path))
    plan: Plan = GivenPlan.from_json(json.loads(path.read_text(encoding="utf-8"))).plan
    found = {copies: rings.folder / f"plan-{copies}.json" for copies in (False, True)}
    for copies, file in found.items():
        file.write_text(json.dumps(plan.with_copies(copies).to_json()), encoding="utf-8")
    return found


def measure(rounds: int) -> dict[str, Taken]:
    """Train so many rounds, and one before them."""
    shutil.rmtree(OUT, ignore_errors=True)
    workspace = prepare(OUT / "demo", demo_cache())
    rows = workspace.job.with_name("train.csv").resolve()
    more = {"unfreeze.every_steps": 5, "train.local_iterations": TURN, "placement.replan": "never"}
    jobs = {
        copies: write_job(
            OUT / f"job-{copies}.toml",
            model=workspace.model,
            train=rows,
            steps=STEPS,
            more=more | {"recovery.copies": "next" if copies else "none"},
        )
        for copies in (False, True)
    }
    taken = {kind: Taken() for kind in KINDS}
    with Testbed(equal_boards(0.4, mbit_per_s=100.0), folder=OUT) as bed:
        rings = TwoRings(bed, OUT, rows)
        given = plans(rings, jobs[False])
        for index in range(rounds + 1):
            for kind in _rotated(KINDS, index):
                ring, copies = KINDS[kind]
                out = OUT / f"run-{kind}"
                options = ("--plan", str(given[copies]), "--out", str(out), "--replace")
                rings.run(ring, "train", str(jobs[copies]), *options)
                if index:  # the first round warms up: processes, disks, and what nodes remember
                    taken[kind].add(RingRun(folder=out))
            if index:
                say(json.dumps({kind: figures_of(taken, kind) for kind in BOUNDS}))
    return taken


def _rotated(kinds: Iterable[str], by: int) -> list[str]:
    """Another order in each round."""
    names = list(kinds)
    return names[by % len(names) :] + names[: by % len(names)]


def figures_of(taken: dict[str, Taken], kind: str) -> dict[str, object]:
    """What a kind of run costs over the plain one."""
    with_it, without = taken[kind], taken["plain"]
    return {
        "turn": ratio_figures(list(zip(with_it.turns_s, without.turns_s, strict=True)), bound=BOUNDS[kind]),
        "cpu": ratio_figures(list(zip(with_it.cpu_s, without.cpu_s, strict=True)), bound=BOUNDS[kind]),
    }


def main() -> int:
    """Read the command line, measure, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which removes the boards
    try:
        taken = measure(options.rounds)
    except MissingCapability as reason:
        say(f"skipped: this machine can't: {reason}")
        return SKIPPED_EXIT_CODE
    figures = {kind: figures_of(taken, kind) for kind in BOUNDS}
    for kind, part in PARTS.items():
        runs = {"turns_s": taken[kind].turns_s, "turns_without_s": taken["plain"].turns_s}
        cpus = {"cpu_s": taken[kind].cpu_s, "cpu_without_s": taken["plain"].cpu_s}
        write_part(part, {**figures[kind], **runs, **cpus, "steps_a_turn": TURN})
    say(json.dumps(figures, indent=1))
    return int(any(one["verdict"] == "missed" for part in figures.values() for one in part.values()))  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
