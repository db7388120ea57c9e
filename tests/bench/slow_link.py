"""A ring whose one link is slow, for an hour: who is declared lost, though nobody is?

``python -m tests.bench.slow_link --minutes 60``; a part of ``build/bench/trust.json``; exit code 1 if anybody was.

Three boards of the testbed and a coordinator train in plain text, with leases and pings as everybody has them. The
board in the middle has a link of ``--mbit-per-s`` in both directions, over which hidden states and gradients go in and
out all the time, and copies at the end of each turn. A false loss is a member of which the coordinator says that it is
lost, one that joins again, a run that goes on without a node, and a run that ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.planner.given.given_plan import GivenPlan
from coordinator.submit.connection import Connection
from deploy.testbed.agents import AgentSetup
from deploy.testbed.boards import Board, Layout
from deploy.testbed.processes import Running
from deploy.testbed.testbed import Testbed
from ringtune.schedule.plan import Plan
from tests.bench.jobs import write_job
from tests.bench.testbed_runs import Bed, say
from tests.bench.trust_figures import write_part
from tests.support import tiny
from tests.support.moves import slices_of

OUT = Path("build/bench/slow-link").resolve()
SLICES = (("owner", 0, 2), ("slow", 2, 3), ("host", 3, 4))
FAST_BYTES_PER_S, MBIT_BYTES = 12.5e6, 125_000
LEASE_S, TURN, STEPS = 10.0, 4, 20_000
_LOOK_S = 1.0


def boards(mbit_per_s: float, name: str) -> Layout:
    """Three boards, the one in the middle behind a slow link."""
    rates = {"owner": FAST_BYTES_PER_S, "slow": mbit_per_s * MBIT_BYTES, "host": FAST_BYTES_PER_S}
    made = (
        Board(name=board, cpu_cores=0.25, memory_bytes=2 << 30, up_bytes_per_s=rate, down_bytes_per_s=rate)
        for board, rate in rates.items()
    )
    return Layout(boards=tuple(made), name=name)


@contextmanager
def training(layout: Layout, folder: Path, *, tokens: int) -> Iterator[tuple[Testbed, Running]]:
    """Boards on which a run has begun that would take days."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = tiny.write_model(folder / "model", hidden_size=384, num_heads=12)
    rows = tiny.write_rows(folder / "rows.csv", 400, longest=tokens)
    more: dict[str, object] = {
        "train.local_iterations": TURN,
        "unfreeze.every_steps": TURN,
        "train.checkpoint_every": 5 * TURN,
    }
    more |= {"runtime.lease_s": LEASE_S, "recovery.copies": "next", "placement.replan": "never"}
    job = write_job(folder / "job.toml", model=model, train=rows, steps=STEPS, tokens=tokens, more=more)
    first, *others = layout.boards
    layout = dataclasses.replace(layout, boards=(dataclasses.replace(first, data=rows), *others))
    with Testbed(layout, folder=folder) as bed:
        bed.start_coordinator(lease_s=LEASE_S)
        bed.start_agents(AgentSetup(models=dict.fromkeys(("owner", "slow", "host"), model)))
        plan_file = folder / "plan.json"
        Bed(bed, folder).ringtune("plan", str(job), "--nodes", "3", "--save", str(plan_file))
        made = GivenPlan.from_json(json.loads(plan_file.read_text(encoding="utf-8"))).plan
        plan = Plan.of(made.course, type(made.placement)(slices=slices_of(SLICES))).with_copies(True)
        plan_file.write_text(json.dumps(plan.to_json()), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "ringtune.cli", "train", str(job), "--plan", str(plan_file)]
        command += ["--out", str(folder / "run"), "--coordinator", bed.coordinator, "--insecure"]
        yield bed, bed.start("train", command)


def watch(address: str) -> None:
    """Print each second for how long the coordinator has not heard of its members, until it is told to end."""
    with Connection(address, insecure=True) as client:
        while True:
            seen_s = {entry.joined.node: round(entry.seen_s, 2) for entry in client.nodes()}
            sys.stdout.write(json.dumps(seen_s) + "\n")
            sys.stdout.flush()
            time.sleep(_LOOK_S)


def measure(minutes: float, mbit_per_s: float, tokens: int, name: str) -> dict[str, object]:
    """Let the run go on for so many minutes; count."""
    folder = OUT / f"{mbit_per_s:g}-{tokens}"
    with training(boards(mbit_per_s, name), folder, tokens=tokens) as (bed, train):
        watcher = [sys.executable, "-m", "tests.bench.slow_link", "--watch", bed.coordinator]
        bed.start("watch", watcher)
        began_s = time.monotonic()
        ended = train.wait(60 * minutes)
        took_s = time.monotonic() - began_s
        found = {
            "minutes": round(took_s / 60, 2),
            "mbit_per_s": mbit_per_s,
            "lease_s": LEASE_S,
            "run_ended": "" if ended is None else train.last_words(),
            "agents_ended": bed.ended(),
            **counted(folder),
        }
    say(json.dumps(found, indent=1))
    return found


def counted(folder: Path) -> dict[str, object]:
    """What logs and books say."""
    said = (folder / "logs/coordinator.log").read_text(encoding="utf-8", errors="replace").splitlines()
    books = folder / "run/metrics.jsonl"
    lines = [json.loads(line) for line in books.read_text(encoding="utf-8").splitlines()] if books.is_file() else []
    recoveries = [line for line in lines if line.get("kind") == "recovery"]
    watched = [json.loads(line) for line in (folder / "logs/watch.log").read_text().splitlines() if line.endswith("}")]
    silences_s = {node: max(line.get(node, 0.0) for line in watched) for node, _, _ in SLICES} if watched else {}
    lost = [line for line in said if " is lost" in line]
    joined = [line for line in said if " joined from " in line]
    return {
        "false_losses": len(lost) + len(recoveries) + max(0, len(joined) - len(SLICES)),
        "lost": lost,
        "steps": max((line["step"] for line in lines if "step" in line), default=0),
        "longest_silence_s": silences_s,
        "looks": len(watched),
    }


def main() -> int:
    """Read the command line, let it run, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--mbit-per-s", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=60, help="of the longest row: how large the messages are")
    parser.add_argument("--name", default="rtslow", help="of the testbed")
    parser.add_argument("--watch", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which removes the boards
    if options.watch:
        watch(options.watch)
    found = measure(options.minutes, options.mbit_per_s, options.tokens, options.name)
    write_part(f"slow_link_{options.mbit_per_s:g}_mbit", found)
    return 0 if not (found["false_losses"] or found["run_ended"] or found["agents_ended"]) else 1


if __name__ == "__main__":
    sys.exit(main())
