"""What operations save in whole runs: bytes on loopback, busy seconds of unequal boards, seconds of a ring's step."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from deploy.testbed.boards import Layout
from ringtune.schedule.operation_tables import FULL, SHORTCUT, BatchOperations, Operations
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from tests.bench.jobs import write_job
from tests.bench.rings import run_ring
from tests.bench.testbed_runs import ON_BOARDS, boards_of, compute_events, equal_boards, on_boards, step_ends_s

SENTENCES_A_ROW = 12
Figures = dict[str, Any]


class Sizes(NamedTuple):
    """How large runs are; ``TINY`` only tries them out.

    Attributes:
        rows: of a micro-batch.
        tokens: of a row.
        steps: of a run; the first of them is not timed.
    """

    rows: int
    tokens: int
    steps: int


FULL_SIZE = Sizes(rows=8, tokens=128, steps=8)
SHORT = Sizes(rows=2, tokens=32, steps=4)
TINY = Sizes(rows=1, tokens=16, steps=3)


def long_rows(sentences: Path, out: Path, num_rows: int) -> Path:
    """Join sentences until each row has more tokens than are taken: then all rows are of the same length."""
    with sentences.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for at in range(num_rows):
            joined = [rows[(at * SENTENCES_A_ROW + offset) % len(rows)] for offset in range(SENTENCES_A_ROW)]
            writer.writerow([" ".join(row["text"] for row in joined), joined[0]["label"]])
    return out


# ---- bytes -----------------------------------------------------------------------------------------


def slice_table(slices: Sequence[Slice], microbatches: int, num_batches: int) -> Operations:
    """A table of whole slices, each full for every second micro-batch: neighbours take turns.

    Example: two slices of three blocks and two micro-batches are ``111333`` and ``333111``.
    """
    rows = tuple(
        "".join((FULL if (at + micro) % 2 == 0 else SHORTCUT) * piece.num_blocks for at, piece in enumerate(slices))
        for micro in range(microbatches)
    )
    batches = tuple(BatchOperations(owner="node-0", batch_id=batch, rows=rows) for batch in range(num_batches))
    return Operations(batches=batches)


def bytes_ratio(folder: Path, *, model: Path, train: Path, nodes: int, sizes: Sizes) -> float:
    """Bytes that all nodes send where each slice skips half, over those of all-full; one owner trains everything."""
    microbatches, num_batches = 4, 2
    rows = long_rows(train, folder / f"rows-{nodes}.csv", sizes.rows * microbatches * num_batches)

    def sent_bytes(name: str, more: Mapping[str, object]) -> int:
        job = write_job(
            folder / f"{name}-{nodes}.toml",
            model=model,
            train=rows,
            method="all",
            steps=2 * num_batches,
            microbatches=microbatches,
            tokens=sizes.tokens,
            more={"data.owners": 1, "train.batch_size": sizes.rows * microbatches, **more},
        )
        report = run_ring(job, folder / f"{name}-{nodes}", nodes=nodes).report
        return sum(int(totals["sent_bytes"]) for totals in report["nodes"].values())

    full = sent_bytes("full", {})
    table = slice_table(plan_of(folder / f"full-{nodes}").placement.hosts, microbatches, num_batches)
    return sent_bytes("table", {"operations.table": json.dumps(table.to_json())}) / full


def plan_of(folder: Path) -> Plan:
    """The plan of a run."""
    return Plan.from_json(json.loads((folder / "plan.json").read_text(encoding="utf-8")))


# ---- boards ----------------------------------------------------------------------------------------


def busy_step_s(folder: Path, steps: int) -> dict[str, float]:
    """Seconds that each node of a run computes in one of its last ``steps`` items, on average."""
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    last = sorted(step_ends_s(folder))[-steps:]
    busy_s: dict[str, float] = defaultdict(float)
    for event in compute_events(folder):
        if int(event["args"]["item"]) in last:
            busy_s[names[event["pid"]]] += event["dur"] / 1e6 / steps
    return dict(busy_s)


def last_step_s(folder: Path, steps: int) -> float:
    """Seconds of one of the last ``steps`` items of a run, from the end of the item before."""
    ends_s = [end_s for _, end_s in sorted(step_ends_s(folder).items())]
    return (ends_s[-1] - ends_s[-1 - steps]) / steps


AT_60: Final[Mapping[str, object]] = {"policy": "two-stage", "compute": 0.6, "ties": "spread", "rotate": False}
"""Every micro-batch has some full subnets, so that none is passed by whole."""


class BoardJob(NamedTuple):
    """A job on boards: its name, micro-batches, its keys of ``[operations]``, and how many boards have a turn."""

    name: str
    microbatches: int
    operations: Mapping[str, object]
    turns: int = 1


def on_layout(
    layout: Layout, folder: Path, jobs: Sequence[BoardJob], *, model: Path, train: Path, sizes: Sizes
) -> list[Figures]:
    """Run jobs that train everything on boards, each with a profile of its own, and time their last steps."""
    owners, found = len(layout.boards), list[Figures]()
    folder.mkdir(parents=True, exist_ok=True)
    rows = long_rows(train, folder / "rows.csv", owners * sizes.rows * max(job.microbatches for job in jobs))
    with on_boards(layout, folder, rows) as bed:
        for job in jobs:
            path = write_job(
                folder / f"{job.name}.toml",
                model=model,
                train=rows,
                method="all",
                steps=sizes.steps,
                microbatches=job.microbatches,
                tokens=sizes.tokens,
                more=ON_BOARDS
                | {
                    "train.batch_size": sizes.rows * job.microbatches,
                    "train.local_iterations": -(-sizes.steps // job.turns),
                }
                | {f"operations.{key}": value for key, value in job.operations.items()},
            )
            timed = bed.timed(path, bed.measure(path), job.name)
            plan = plan_of(timed.folder)
            steps = sizes.steps - 1
            found.append(
                {
                    "slices": [(piece.node, piece.start, piece.stop) for piece in plan.placement.slices],
                    "step_s": last_step_s(timed.folder, steps),
                    "predicted_step_s": timed.predicted.depths[-1].step_s,
                    "busy_step_s": busy_step_s(timed.folder, steps),
                    "capacities": [
                        (each.full, each.forward_only, each.forward, each.backward)
                        for each in (plan.course.choice.capacities if plan.course.choice else ())
                    ],
                }
            )
    return found


def spread(busy_s: Mapping[str, float]) -> float:
    """How much less the least busy board computes than the busiest one, as a share of the latter."""
    return 1 - min(busy_s.values()) / max(busy_s.values())


def hetero_busy_spread(folder: Path, *, model: Path, train: Path, sizes: Sizes) -> Figures:
    """Two boards, one twice as fast, at 60 % compute with counts that the planner chooses; both have a turn.

    Beside it equal counts. Slices are the planner's in both.
    """
    layout = boards_of((0.35, 0.7), (1000.0, 1000.0))
    # a run that gathers gradient scores keeps whole graphs of all micro-batches
    boards = tuple(dataclasses.replace(board, memory_bytes=3 << 30) for board in layout.boards)
    layout = dataclasses.replace(layout, boards=boards)
    jobs = [BoardJob("balanced", 10, {**AT_60, "balance": True}, turns=2), BoardJob("equal-counts", 10, AT_60, turns=2)]
    small = sizes._replace(rows=max(1, sizes.rows // 2))
    balanced, equal = on_layout(layout, folder, jobs, model=model, train=train, sizes=small)
    return {
        "hetero_busy_spread": spread(balanced["busy_step_s"]),
        "hetero_busy_spread_equal_counts": spread(equal["busy_step_s"]),
        "hetero": balanced,
        "hetero_equal_counts": equal,
    }


def ring_step_ratio(folder: Path, *, model: Path, train: Path, sizes: Sizes) -> Figures:
    """Four equal boards: a step at 60 % compute over one in which everything is full, and how well it is predicted."""
    jobs = [BoardJob("all-full", 5, {}), BoardJob("at-60", 5, AT_60)]
    layout = equal_boards(0.4, mbit_per_s=1000)
    full, part = on_layout(layout, folder, jobs, model=model, train=train, sizes=sizes)
    return {
        "ring_step_ratio_60": part["step_s"] / full["step_s"],
        "ring_step_prediction_error": abs(part["predicted_step_s"] / part["step_s"] - 1),
        "ring_step_ratio_60_predicted": part["predicted_step_s"] / full["predicted_step_s"],
        "ring_all_full": full,
        "ring_at_60": part,
    }
