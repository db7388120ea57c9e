"""``python -m tests.bench.predictions``: is a profile true? Measure, predict, run and compare, on rings of the testbed.

Three rings of boards with links of 10 to 1000 Mbit/s and quotas of 0.2 to 0.6 cores; as root, on a quiet machine, about
25 minutes. Writes ``build/bench/predictions.json``, exits with 1 if a target is missed.

========= ===================================================================== ==========================
rows      what predicts what                                                    |predicted / measured - 1|
========= ===================================================================== ==========================
measure   ``ringtune measure`` alone predicts a run of each method              median 5 %, worst 10 %
own       after something changed, a run's own profile predicts the next run    median 5 %, worst 10 %
========= ===================================================================== ==========================

What changed, while the agents go on:

===== =========== ================================================================================
ring  method      change
===== =========== ================================================================================
slow  ringada     all links have 40 Mbit/s
mixed pipeadapter all links have 40 Mbit/s
fast  single      the board with the most cores, which hosts all blocks, has 0.8 cores in place of 0.6
===== =========== ================================================================================

Measured is the time from the first action to the end of the last one. Runs have as many steps as take the wanted
seconds by the prediction, so a run that comes out far too short is a miss as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.cli.demo_files import demo_cache, prepare
from coordinator.planner.make_plan import make_plan
from deploy.testbed import groups
from deploy.testbed.boards import Board, Layout
from deploy.testbed.capabilities import MissingCapability, find_capabilities
from ringtune.costs.profile import Profile
from ringtune.job.job import load_job
from sim.prediction import predict
from tests.bench.rings import conclude, say, write_job
from tests.bench.testbed_runs import ON_BOARDS, Bed, boards_of, on_boards, read_profile, set_rate

OUT = Path("build/bench")
METHODS = ("ringada", "pipeadapter", "single")
MEDIAN, WORST = 0.05, 0.10
RUN_S, MIN_S = 70.0, 60.0
CHANGED_MBIT, CHANGED_CORES = 40.0, 0.8
_PROBED_STEPS = 60


class Ring(NamedTuple):
    """Boards of one ring: cores and Mbit/s of each; their quotas leave a fifth of two cores to the coordinator."""

    name: str
    cores: tuple[float, ...]
    mbit_per_s: tuple[float, ...]


RINGS = (
    Ring("slow", (0.4, 0.3, 0.5, 0.3), (10.0, 20.0, 10.0, 30.0)),
    Ring("mixed", (0.5, 0.4, 0.25, 0.3), (100.0, 50.0, 100.0, 30.0)),
    Ring("fast", (0.6, 0.2, 0.5, 0.25), (1000.0, 1000.0, 200.0, 1000.0)),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run and its prediction; ``basis`` predicted it: ``measure``, ``own``, or the ``old`` links' profile."""

    ring: str
    method: str
    basis: str
    steps: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


class Bench:
    """Runs on the boards of one ring."""

    def __init__(self, ring: Ring, bed: Bed, folder: Path, *, model: Path, train: Path, run_s: float) -> None:
        self._ring, self._bed, self._folder = ring, bed, folder
        self._model, self._train, self._run_s = model, train, run_s

    def job(self, method: str, steps: int) -> Path:
        """Write the job of a method; its blocks unfreeze over the whole run."""
        more = ON_BOARDS | {"unfreeze.every_steps": max(1, steps // 6)}
        path = self._folder / f"{method}-{steps}.toml"
        return write_job(path, model=self._model, train=self._train, method=method, steps=steps, more=more)

    def steps(self, method: str, profile: Profile) -> int:
        """How many steps take the wanted seconds by the prediction."""
        job = load_job(self.job(method, _PROBED_STEPS))
        plan = make_plan(job, profile.by_name, links=profile.links).plan
        return max(12, round(self._run_s / predict(plan, profile).wall_s * _PROBED_STEPS))

    def row(self, method: str, profile_file: Path, *, basis: str, steps: int) -> tuple[Row, Path]:
        """Train with a profile and compare with what it predicts; also return the profile of the run."""
        job = self.job(method, steps)
        timed = self._bed.timed(job, profile_file, f"{method}-{basis}")
        row = Row(
            ring=self._ring.name,
            method=method,
            basis=basis,
            steps=steps,
            measured_s=timed.measured_s,
            predicted_s=timed.predicted.wall_s,
        )
        say(line_of(row))
        return row, timed.folder / "profile.json"

    def measured_rows(self, methods: Sequence[str]) -> tuple[list[Row], dict[str, Path]]:
        """For each method: measure its job, then run it; also return the profiles that were measured."""
        rows, measured = [], {}
        for method in methods:
            measured[method] = self.measure(method)
            steps = self.steps(method, read_profile(measured[method]))
            rows.append(self.row(method, measured[method], basis="measure", steps=steps)[0])
        return rows, measured

    def measure(self, method: str) -> Path:
        """Measure the job of a method."""
        return self._bed.measure(self.job(method, _PROBED_STEPS))

    def changed_rows(self, layout: Layout, measured: Mapping[str, Path]) -> list[Row]:
        """Make the ring's change, run with the old profile, predict the next run from that run's own profile."""
        method, change = CHANGES[self._ring.name]
        before = measured.get(method) or self.measure(method)
        steps = self.steps(method, change(layout, read_profile(before)))
        old, own = self.row(method, before, basis="old", steps=steps)
        kept = own.with_name("profile-own.json")
        kept.write_bytes(own.read_bytes())
        return [old, self.row(method, kept, basis="own", steps=steps)[0]]


def change_links(layout: Layout, profile: Profile) -> Profile:
    """Give every board another rate in both directions, while its agent runs; expect what the profile then would be."""
    rate = CHANGED_MBIT * 125_000
    set_rate(layout, rate)
    links = tuple(dataclasses.replace(link, rate_bytes_per_s=rate) for link in profile.links)
    return dataclasses.replace(profile, links=links)


def change_board(layout: Layout, profile: Profile) -> Profile:
    """Give the board with the most cores more, while its agent runs; expect what the profile then would be."""
    mounts, _ = find_capabilities().choose(layout)
    board = max(layout.boards, key=lambda each: each.cpu_cores)
    groups.apply(groups.board_settings(mounts, layout, dataclasses.replace(board, cpu_cores=CHANGED_CORES)))
    nodes = tuple(
        node.at_pace(board.cpu_cores / CHANGED_CORES) if node.node == board.name else node for node in profile.nodes
    )
    return dataclasses.replace(profile, nodes=nodes)


CHANGES: dict[str, tuple[str, Callable[[Layout, Profile], Profile]]] = {
    "slow": ("ringada", change_links),
    "mixed": ("pipeadapter", change_links),
    "fast": ("single", change_board),
}
"""What changes in each ring, and the method whose runs see it."""


def layout_of(ring: Ring) -> Layout:
    """The boards of a ring, in a testbed of its own name."""
    boards: tuple[Board, ...] = boards_of(ring.cores, ring.mbit_per_s).boards
    return Layout(boards=boards, name="rtpr")


def line_of(row: Row) -> str:
    """A line of the table."""
    return (
        f"{row.ring:6} {row.method:12} {row.basis:8} {row.steps:5d} steps  measured {row.measured_s:6.1f} s  "
        f"predicted {row.predicted_s:6.1f} s  {100 * row.error:+6.1f} %"
    )


def misses(rows: Sequence[Row], *, min_s: float) -> list[str]:
    """Write what is missed; rows of another basis than ``measure`` and ``own`` are only shown."""
    found = []
    for basis in ("measure", "own"):
        errors = [abs(row.error) for row in rows if row.basis == basis]
        if errors and statistics.median(errors) > MEDIAN:
            found.append(f"{basis}: median error {100 * statistics.median(errors):.1f} %, target {100 * MEDIAN:g} %")
        if errors and max(errors) > WORST:
            found.append(f"{basis}: worst error {100 * max(errors):.1f} %, target {100 * WORST:g} %")
    found += [f"{row.ring} {row.method}: took only {row.measured_s:.1f} s" for row in rows if row.measured_s < min_s]
    return found


def main() -> int:
    """Run ring after ring; write and judge what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = [ring.name for ring in RINGS]
    parser.add_argument(
        "--only", nargs="*", default=[], help=f"of the rings {', '.join(names)}, the methods, 'changed'"
    )
    parser.add_argument("--run-s", type=float, default=RUN_S, help="seconds of a run; short ones only try it out")
    options = parser.parse_args()
    rings = [ring for ring in RINGS if ring.name in options.only] or list(RINGS)
    methods = [method for method in METHODS if method in options.only] or list(METHODS)
    is_changed_only = options.only and options.only[-1] == "changed"
    workspace, rows = prepare(OUT / "predictions" / "demo", demo_cache()), list[Row]()
    for ring in rings:
        layout, folder = layout_of(ring), OUT / "predictions" / ring.name
        train = workspace.job.with_name("train.csv")
        try:
            with on_boards(layout, folder, train) as bed:
                bench = Bench(ring, bed, folder, model=workspace.model, train=train, run_s=options.run_s)
                found, measured = bench.measured_rows([] if is_changed_only else methods)
                rows += found
                if not options.only or "changed" in options.only:
                    rows += bench.changed_rows(layout, measured)
        except MissingCapability as missing:
            say(f"not measured: {missing}")
            return 77
    for row in rows:
        say(line_of(row))
    figures = {"rows": [dataclasses.asdict(row) | {"error": row.error} for row in rows]}
    return conclude(OUT / "predictions.json", figures, misses(rows, min_s=MIN_S if options.run_s >= MIN_S else 0.0))


if __name__ == "__main__":
    sys.exit(main())
