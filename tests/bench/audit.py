"""Cost of ``[audit]``, and its false alarms: pairs of runs on one cluster, with and without, alternating.

Four nodes on this machine, of which each owns rows and hosts one or two of the six blocks of all-MiniLM-L6-v2 (of the
demo's cache: ``ringtune demo`` fetches it); turns of 10 steps of 16 rows of 64 tokens in 4 micro-batches; everything
trains, and both runs of a pair keep copies of turns. A busy machine makes seconds worthless, so what is compared are
the processor seconds of all nodes: of the whole run, and after the first turn.

``python -m tests.bench.audit [--pairs 4] [--steps 40] [--helpers] [--minutes 0]``: after the pairs runs with an audit
for so many minutes. Exit code 1 if a node was named.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from coordinator.cli.demo_files import SENTENCES_FILE
from ringtune.job.job import Job
from ringtune.techniques.offload import helped
from tests.support.cluster import Cluster

CACHE: Final = Path("~/.cache/ringtune/demo").expanduser()
NODES: Final = ("a", "b", "c", "d")
SLICES: Final = (("a", 0, 2), ("b", 2, 4), ("c", 4, 5), ("d", 5, 6))
TURN: Final = 10
HELPER_OF: Final = {"a": "b", "b": "c", "c": "d", "d": "a"}


class Cost(NamedTuple):
    """Processor seconds of all nodes in a run, and after its first turn; what its audit did, and whom it named."""

    whole_s: float
    later_s: float
    wall_s: float
    figures: dict[str, float]
    named: int


def processor_s(cluster: Cluster) -> float:
    """Processor seconds of all agents so far."""
    total = 0
    for agent in cluster.agents.values():
        fields = Path(f"/proc/{agent.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def reviews(cluster: Cluster, folder: Path) -> None:
    """Give a cluster the demo's model, and some 400 film reviews to train on."""
    cluster.model, cluster.train = CACHE / "all-MiniLM-L6-v2", folder / "reviews.csv"
    with (CACHE / SENTENCES_FILE).open(encoding="utf-8", newline="") as file:
        rows = [(row["text"], row["label"]) for row in csv.DictReader(file) if row["source"] == "imdb"]
    with cluster.train.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows[:: len(rows) // 400]])
    cluster.eval = cluster.train


def job_of(cluster: Cluster, *, steps: int, max_length: int, **more: object) -> Job:
    """A job in which everything trains and copies of turns are kept."""
    return cluster.job(
        model__dtype="float32",
        wire__dtype="float32",
        train__method="all",
        train__batch_size=16,
        train__microbatches=4,
        train__max_length=max_length,
        train__local_iterations=TURN,
        train__max_steps=steps,
        train__learning_rate=1e-4,
        recovery__copies="next",
        runtime__lease_s=60.0,
        **more,
    )


def run(cluster: Cluster, steps: int, share: float, helper_of: Mapping[str, str]) -> Cost:
    """Train so many steps; share 0 is without an audit, and no table without helpers."""
    more: dict[str, object] = {"audit__share": share} if share else {}
    job = job_of(cluster, steps=steps, max_length=64, **more, **({"offload__mode": helper_of} if helper_of else {}))
    plan = helped(cluster.plan_on(job, SLICES), helper_of)
    began_s, before_s = time.monotonic(), processor_s(cluster)
    follower = cluster.follow(job, plan=plan)
    follower.wait_for_steps(TURN)
    first_s = processor_s(cluster)
    outcome = follower.wait()
    assert outcome.is_done, outcome.message
    after_s = processor_s(cluster)
    named = len(outcome.of_kind("recovery")) + sum("audit" in note for note in outcome.notes)
    figures = outcome.report.get("audit", {})
    return Cost(after_s - before_s, after_s - first_s, time.monotonic() - began_s, figures, named)


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="of runs")
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    parser.add_argument("--share", type=float, default=0.02, help="of the audit")
    parser.add_argument("--helpers", action="store_true", help="each node fits the adapters of the one before it")
    parser.add_argument("--minutes", type=float, default=0.0, help="of audited runs afterwards")
    options = parser.parse_args()
    helper_of = HELPER_OF if options.helpers else {}
    named, audited_s, turns = 0, 0.0, 0
    with tempfile.TemporaryDirectory(prefix="ringtune-audit-") as folder:
        cluster = Cluster(Path(folder), owners=NODES)
        reviews(cluster, Path(folder))
        with cluster.listening():
            run(cluster, TURN, 0.0, helper_of)  # measures the nodes
            ratios: list[tuple[float, float]] = []
            until_s = 0.0
            for pair in range(options.pairs):
                order = (options.share, 0.0) if pair % 2 else (0.0, options.share)
                costs = {share: run(cluster, options.steps, share, helper_of) for share in order}
                with_it, without = costs[options.share], costs[0.0]
                ratios.append((with_it.whole_s / without.whole_s, with_it.later_s / without.later_s))
                named, audited_s, turns = (
                    named + with_it.named,
                    audited_s + with_it.wall_s,
                    turns + options.steps // TURN,
                )
                say(f"pair {pair}: with {with_it}, without {without}, ratios {ratios[-1]}")
            until_s = time.monotonic() + 60 * options.minutes
            while time.monotonic() < until_s:
                cost = run(cluster, options.steps, options.share, helper_of)
                named, audited_s, turns = named + cost.named, audited_s + cost.wall_s, turns + options.steps // TURN
                say(f"audited: {cost}")
    for what, values in zip(("whole run", "after the first turn"), zip(*ratios, strict=True), strict=False):
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        say(f"{what}: processor seconds with / without {statistics.mean(values):.3f} (standard deviation {spread:.3f})")
    say(f"{turns} audited turns in {audited_s / 60:.1f} min, nodes named: {named}")
    return 1 if named else 0


if __name__ == "__main__":
    sys.exit(main())
