"""Predicted against measured times on boards of the testbed: what the simulator is worth.

Boards are network namespaces with a quota of processor time and shaped links (``deploy/testbed``). The profile is
taken inside the same limits, all boards measuring at once; then each method is trained, and the very plan of the run
is predicted from that profile. Measured is the time from the first action to the end of the last one.

``stages_on_boards`` trains the same short
schedule twice, from one profile: on the planner's stages, and on the best ring in which each block has one host. What
is compared is the gain of the first over the second.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.planner.replicas import layout_text
from deploy.testbed.agents import AgentSetup
from deploy.testbed.boards import Board, Layout
from deploy.testbed.capabilities import find_capabilities
from deploy.testbed.network import UPLINK, shaping_commands
from deploy.testbed.processes import call
from deploy.testbed.testbed import Testbed
from ringtune.costs.profile import Profile
from ringtune.schedule.plan import Plan
from sim.prediction import Prediction, predict
from tests.bench.rings import say, write_job

RUN_S = 1200.0
ON_BOARDS = {"runtime.lease_s": 30.0}
EVERY_15 = ON_BOARDS | {"unfreeze.every_steps": 15}

Figures = dict[str, Any]


def boards_of(
    cpu_cores: Sequence[float], mbit_per_s: Sequence[float], *, name: str = "rtpl", memory_bytes: int = 1 << 30
) -> Layout:
    """Boards with these cores and links."""
    return Layout(
        boards=tuple(
            Board(
                name=f"board-{index}",
                cpu_cores=cores,
                memory_bytes=memory_bytes,
                up_bytes_per_s=mbit * 1e6 / 8,
                down_bytes_per_s=mbit * 1e6 / 8,
            )
            for index, (cores, mbit) in enumerate(zip(cpu_cores, mbit_per_s, strict=True))
        ),
        name=name,
    )


def equal_boards(*, mbit_per_s: float) -> Layout:
    """Four boards that are the same."""
    return boards_of((0.4,) * 4, (mbit_per_s,) * 4, name="rteq", memory_bytes=3 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One run on boards and its prediction."""

    measured_s: float
    predicted: Prediction
    folder: Path

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.wall_s / self.measured_s - 1

    def measured_step_s(self, first: int, last: int) -> float:
        """Seconds of one of the steps ``[first, last)``, on average."""
        ends_s = step_ends_s(self.folder)
        return (ends_s[last - 1] - ends_s[first - 1]) / (last - first)


class Bed:
    """A testbed with agents that have joined."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self._bed, self._folder = bed, folder

    def ringtune(self, *arguments: str) -> None:
        """Run a command of ringtune on the hub."""
        command = [sys.executable, "-P", "-m", "ringtune.cli", *arguments, "--coordinator", "{coordinator}"]
        code = self._bed.run([*command, "--insecure"], timeout_s=RUN_S)
        if code:
            raise RuntimeError(f"ringtune {' '.join(arguments[:2])} ended with {code}; see {self._folder / 'logs'}")

    def measure(self, job: Path) -> Path:
        """Measure all boards and links for a job; returns the profile's file."""
        out = self._folder / f"profile-{job.stem}.json"
        self.ringtune("measure", str(job), "--save", str(out), "--fresh")
        return out

    def train(self, job: Path, profile_file: Path, name: str) -> Path:
        """Train with the plan that the profile gives; returns the run's folder."""
        out = self._folder / name
        self.ringtune("train", str(job), "--out", str(out), "--replace", "--profile", str(profile_file))
        return out

    def set_cores(self, board: str, cores: float) -> None:
        """Give a board another quota of processor time."""
        self._bed.set_cores(board, cores)

    def timed(self, job: Path, profile_file: Path, name: str) -> Timed:
        """Train with a profile, and predict the plan that was used from that same profile."""
        profile = read_profile(profile_file)
        folder = self.train(job, profile_file, name)
        plan = Plan.from_json(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
        return Timed(measured_s=measured_s(folder), predicted=predict(plan, profile), folder=folder)


def set_rate(layout: Layout, bytes_per_s: float, *, only: str = "") -> None:
    """Give the links of every board, or ``only`` of one, another rate in both directions, while its agent runs."""
    _, shaper = find_capabilities().choose(layout)
    for index, board in enumerate(layout.boards):
        if only and board.name != only:
            continue
        for namespace, device in ((layout.namespace(board), UPLINK), (layout.hub, f"p{index}")):
            # Not changed in place: a packet that waits and is larger than the new bucket would wait for ever.
            call(("tc", "-n", namespace, "qdisc", "del", "dev", device, "root"))
            for command in shaping_commands(namespace, device, bytes_per_s, board.latency_s, shaper):
                call(command)


def read_profile(path: Path) -> Profile:
    """What ``ringtune measure`` or a run wrote."""
    return Profile.from_json(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def on_boards(layout: Layout, folder: Path, train: Path) -> Iterator[Bed]:
    """Build the boards, start coordinator and agents."""
    folder.mkdir(parents=True, exist_ok=True)
    with Testbed(layout, folder=folder) as bed:
        bed.start_coordinator(lease_s=30.0)
        bed.start_agents(AgentSetup(data=train.resolve()))
        yield Bed(bed, folder)


def compute_events(folder: Path) -> list[dict[str, Any]]:
    """The compute actions of a run's trace."""
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and "item" in event["args"] and event["cat"] not in ("send", "receive")
    ]


def measured_s(folder: Path) -> float:
    """From the first compute action to the end of the last one."""
    events = compute_events(folder)
    end_us = max(event["ts"] + event["dur"] for event in events)
    return float(end_us - min(event["ts"] for event in events)) / 1e6


def step_ends_s(folder: Path) -> dict[int, float]:
    """When the last action of each item ended."""
    ends_s: dict[int, float] = {}
    for event in compute_events(folder):
        item = int(event["args"]["item"])
        ends_s[item] = max(ends_s.get(item, 0.0), (event["ts"] + event["dur"]) / 1e6)
    return ends_s


def microbatch_speedup(
    folder: Path, *, model: Path, train: Path, tokens: int, mbit_per_s: float, steps: int
) -> Figures:
    """Everything trainable on four equal boards: 4 micro-batches over 1, ``measured`` and ``simulated``."""
    with on_boards(equal_boards(mbit_per_s=mbit_per_s), folder, train) as bed:
        figures: Figures = {}
        for count in (1, 4):
            job = write_job(
                folder / f"all-{count}.toml",
                model=model,
                train=train,
                method="all",
                steps=steps,
                microbatches=count,
                tokens=tokens,
                more=EVERY_15,
            )
            timed = bed.timed(job, bed.measure(job), f"all-{count}")
            figures[f"measured_s_{count}"] = timed.measured_s
            figures[f"simulated_s_{count}"] = timed.predicted.wall_s
            say(f"{count} micro-batches: {timed.measured_s:.1f} s, predicted {timed.predicted.wall_s:.1f} s")
    figures["measured"] = figures["measured_s_1"] / figures["measured_s_4"]
    figures["simulated"] = figures["simulated_s_1"] / figures["simulated_s_4"]
    return figures


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


def stages_on_boards(
    folder: Path, *, model: Path, train: Path, depths: Sequence[int], steps_each: int, tokens: int, microbatches: int
) -> Figures:
    """The planner's stages over the best ring of single hosts, measured and predicted, per depth and in all."""
    at, spans, steps = schedule_of(depths, steps_each)
    found: dict[str, Timed] = {}
    with on_boards(equal_boards(mbit_per_s=1000), folder, train) as bed:
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


def slowed_on_boards(folder: Path, *, model: Path, train: Path, steps: int = 200, link: bool = False) -> Figures:
    """A board that slows in mid-run: what replanning gains, measured beside a run that never moves.

    Both runs begin with one profile and the same placement. After some steps board-3 gets half of its cores, or a fifth
    of its link's rate. What is compared is the time of the steps after the move, with five left out; the predicted gain
    is what the run logged.
    """
    mbit_per_s = 100.0 if link else 1000.0
    boards = equal_boards(mbit_per_s=mbit_per_s)
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
            with _slowing(lambda: set_share(slow), folder / name / "metrics.jsonl", 40):
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
