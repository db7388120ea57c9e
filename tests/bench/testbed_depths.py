"""RingAda held at some depths on four equal boards of the testbed: seconds of a step, measured and predicted.

``stages_on_boards`` trains the same short schedule twice, from one profile: on the planner's stages, and on the best
ring in which each block has one host. What is compared is the gain of the first over the second.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.planner.replicas import layout_text
from ringtune.schedule.plan import Plan
from tests.bench.jobs import write_job
from tests.bench.testbed_runs import (
    ON_BOARDS,
    Figures,
    Timed,
    equal_boards,
    measured_s,
    on_boards,
    say,
    set_rate,
    step_ends_s,
)

Spans = dict[int, tuple[int, int]]
"""Depth -> first of the steps that are measured there, and one past the last."""


def schedule_of(depths: Sequence[int], steps_each: int) -> tuple[list[int], Spans, int]:
    """When blocks are unfrozen so that each of these depths lasts for some steps; the spans, and the steps in all.

    Between two depths each block trains alone for a step; the first step of a depth is not measured.
    """
    at: list[int] = []
    spans: Spans = {}
    step, known = 0, 1
    for wanted in depths:
        while known < wanted:
            step += 1
            at.append(step)
            known += 1
        spans[wanted] = (step + 1, step + 1 + steps_each)
        step += 1 + steps_each
    return at, spans, step + 1


def depths_on_boards(
    folder: Path, *, model: Path, train: Path, depths: Sequence[int], steps_each: int, tokens: int, microbatches: int
) -> Figures:
    """RingAda held at some depths for a while on four equal boards: seconds of a step, measured and predicted."""
    at, spans, steps = schedule_of(depths, steps_each)
    with on_boards(equal_boards(0.4, mbit_per_s=1000), folder, train) as bed:
        more: dict[str, Any] = ON_BOARDS | {"unfreeze.at": at}
        job = write_job(
            folder / "depths.toml",
            model=model,
            train=train,
            steps=steps,
            microbatches=microbatches,
            tokens=tokens,
            more=more | {"placement.replicas": "never"},
        )
        timed = bed.timed(job, bed.measure(job), "depths")
    return {"depths": _rows(timed, spans), "error": timed.error, "measured_s": timed.measured_s}


def stages_on_boards(
    folder: Path, *, model: Path, train: Path, depths: Sequence[int], steps_each: int, tokens: int, microbatches: int
) -> Figures:
    """The planner's stages over the best ring of single hosts, measured and predicted, per depth and in all."""
    at, spans, steps = schedule_of(depths, steps_each)
    found: dict[str, Timed] = {}
    with on_boards(equal_boards(0.4, mbit_per_s=1000), folder, train) as bed:
        jobs = {
            name: write_job(
                folder / f"{name}.toml",
                model=model,
                train=train,
                steps=steps,
                microbatches=microbatches,
                tokens=tokens,
                more=ON_BOARDS | {"unfreeze.at": at, "placement.replicas": replicas},
            )
            for name, replicas in (("ring", "never"), ("stages", "auto"))
        }
        profile = bed.measure(jobs["ring"])
        for name, job in jobs.items():
            found[name] = timed = bed.timed(job, profile, name)
            say(f"{name}: measured {timed.measured_s:.1f} s, predicted {timed.predicted.wall_s:.1f} s")
    rows = {name: _rows(timed, spans) for name, timed in found.items()}
    gains = {
        depth: {
            kind: rows["ring"][depth][f"{kind}_step_s"] / rows["stages"][depth][f"{kind}_step_s"]
            for kind in ("measured", "predicted")
        }
        for depth in depths
    }
    plans = {
        name: Plan.from_json(json.loads((timed.folder / "plan.json").read_text(encoding="utf-8")))
        for name, timed in found.items()
    }
    measured = found["ring"].measured_s / found["stages"].measured_s
    predicted = found["ring"].predicted.wall_s / found["stages"].predicted.wall_s
    return {
        "gain_measured": measured,
        "gain_predicted": predicted,
        "gain_error": predicted / measured - 1,
        "gains_by_depth": gains,
        "step_s_by_depth": rows,
        "errors": {name: timed.error for name, timed in found.items()},
        "measured_s": {name: timed.measured_s for name, timed in found.items()},
        "plans": {name: layout_text(plan) for name, plan in plans.items()},
    }


def slowed_on_boards(
    folder: Path, *, model: Path, train: Path, steps: int = 200, slow_after: int = 40, link: bool = False
) -> Figures:
    """A board that slows in mid-run: what replanning gains, measured beside a run that never moves.

    Both runs begin with one profile and the same placement. After some steps board-3 gets half of its cores, or a fifth
    of its link's rate. What is compared is the time of the steps after the move, with five left out; the predicted gain
    is what the run logged.
    """
    mbit_per_s = 100.0 if link else 1000.0
    boards = equal_boards(0.4, mbit_per_s=mbit_per_s)
    with on_boards(boards, folder, train) as bed:

        def set_share(share: float) -> None:
            if link:
                set_rate(boards, share * mbit_per_s * 1e6 / 8, only="board-3")
            else:
                bed.set_cores("board-3", 0.4 * share)

        slow = 0.2 if link else 0.5
        replicas = "never" if link else "auto"
        jobs = {
            name: write_job(
                folder / f"{name}.toml",
                model=model,
                train=train,
                method="all",
                steps=steps,
                microbatches=16,
                tokens=64,
                more=ON_BOARDS | {"train.batch_size": 32, "placement.replan": name, "placement.replicas": replicas},
            )
            for name in ("never", "auto")
        }
        profile = bed.measure(jobs["never"])
        for name, job in jobs.items():
            set_share(1.0)
            with _slowing(lambda: set_share(slow), folder / name / "metrics.jsonl", slow_after):
                bed.train(job, profile, name)
    lines = [json.loads(line) for line in (folder / "auto" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found: Figures = {"lines": [line for line in lines if line.get("kind") in ("replan", "move")]}
    moves = [line for line in found["lines"] if line["kind"] == "move" and "problem" not in line]
    plans = [line for line in found["lines"] if line["kind"] == "replan"]
    if not moves or not plans:
        return found | {"share_of_predicted_gain": "the run did not move"}
    first = moves[0]["step"] + 5
    rest_s = {name: _seconds_after(folder / name, first) for name in jobs}
    predicted = plans[-1]["predicted"]  # what the run moved to, if it found a better one before it could move
    gain, wanted = 1 - rest_s["auto"] / rest_s["never"], 1 - predicted["moves_s"] / predicted["stays_s"]
    figures = {"measured_gain": gain, "predicted_gain": wanted, "share_of_predicted_gain": gain / wanted}
    return found | figures | {"rest_s": rest_s, "total_s": {name: measured_s(folder / name) for name in jobs}}


def _seconds_after(folder: Path, step: int) -> float:
    ends_s = step_ends_s(folder)
    return ends_s[max(ends_s)] - ends_s[step - 1]


@contextmanager
def _slowing(slow: Callable[[], None], metrics: Path, after: int) -> Iterator[None]:
    """Slow a board as soon as a run has so many lines of metrics."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if metrics.is_file() and len(metrics.read_bytes().splitlines()) >= after:
                slow()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _rows(timed: Timed, spans: Spans) -> dict[int, dict[str, float]]:
    predicted_s = {each.depth: each.step_s for each in timed.predicted.depths}
    return {
        wanted: {"measured_step_s": timed.measured_step_s(*span), "predicted_step_s": predicted_s[wanted]}
        for wanted, span in spans.items()
    }
