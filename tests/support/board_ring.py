"""A ring of real processes on boards of a testbed, coordinator and submitter too, to which faults happen.

Everything is a process of its own, as users have it: a coordinator and ``ringtune train`` on the hub, owners a and b
and hosts c and d on a board each. Namespaces and control groups are the testbed's, mounts end with their process.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.planner.given_plan import GivenPlan
from coordinator.run.run_text import is_step
from deploy.testbed import processes
from deploy.testbed.agents import AgentSetup, agent_command
from deploy.testbed.boards import Board, Layout
from deploy.testbed.capabilities import Capabilities
from deploy.testbed.network import HUB_ADDRESS
from deploy.testbed.processes import Running
from deploy.testbed.testbed import Testbed
from ringtune.job.job import Job, Model
from ringtune.schedule.plan import Plan
from tests.support import leaks, tiny
from tests.support.moves import slices_of

OWNERS, HOSTS = ("a", "b"), ("c", "d")
NAMES = (*OWNERS, *HOSTS)
COORDINATOR = "coordinator"
SLICES = (("a", 0, 1), ("c", 1, 2), ("d", 2, 4))
LEASE_S = 5.0
STEPS, TURN, CHECKPOINT = 160, 4, 16
START_S = 180.0
WATCH_S = 0.1
_LINK_BYTES_PER_S = 2.5e6
_ON_SMALL_DISK = (
    *("unshare", "--mount", "sh", "-c"),
    'mkdir -p "$1" && mount -t tmpfs -o size="$2" ringtune "$1" && shift 2 && exec "$@"',
    "disk",
)


def small_disk(folder: Path, size: str) -> tuple[str, ...]:
    """Words before a command that give it a file system of its own at a folder; it ends with the process."""
    return (*_ON_SMALL_DISK, str(folder), size)


class BoardRing:
    """Boards with a ring that has joined, and one job for it."""

    def __init__(self, bed: Testbed, folder: Path, **changes: object) -> None:
        self.bed, self.folder = bed, folder
        self.processes: dict[str, Running] = {}
        self.model = tiny.write_model(folder / "model", num_blocks=4)
        self._num_runs = 0
        self.bed.coordinator = f"{HUB_ADDRESS}:7070"
        self.job = self._write_job(changes)
        self.start_coordinator()
        for name in NAMES:
            self.start(name)
        self._await_joined(*NAMES)
        watch = (sys.executable, "-m", "tests.support.members_watch", self.bed.coordinator, str(WATCH_S))
        self._watch = self.bed.start("watch", watch)
        self.wait_idle()
        self.plan = self._make_plan()

    def _write_job(self, changes: dict[str, object]) -> Path:
        values: dict[str, object] = {
            "model.dtype": "float64",
            "wire.dtype": "float64",
            "train.learning_rate": 0.01,
            "train.batch_size": 8,
            "train.microbatches": 2,
            "train.max_length": 16,
            "train.dropout": 0.0,
            "train.local_iterations": TURN,
            "train.max_steps": STEPS,
            "train.checkpoint_every": CHECKPOINT,
            "train.eval_every": 0,
            "unfreeze.every_steps": 8,
            "runtime.threads": 1,
            "runtime.lease_s": LEASE_S,
            "placement.replan": "never",
            "recovery.copies": "next",
            "recovery.wait_s": 0.0,  # a row says what comes at once; nobody is waited for
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        path = self.folder / "job.toml"
        path.write_text(Job(model=Model(path=str(self.model))).with_overrides(values).to_toml())
        return path

    # ---- processes --------------------------------------------------------------------------------

    def state_of(self, who: str) -> Path:
        """Where a process keeps what it has to keep."""
        return self.folder / "state" / who

    def start_coordinator(self, *, prefix: Sequence[str] = ()) -> None:
        """Start the coordinator at the address that it always has."""
        where = ("--bind", self.bed.coordinator, "--state", str(self.state_of(COORDINATOR)))
        options = ("--lease", f"{LEASE_S:g}", "--insecure", "--json")
        command = (*prefix, sys.executable, "-P", "-m", "ringtune.cli", "coordinator", *where, *options)
        self._keep(COORDINATOR, self.bed.start(COORDINATOR, command))
        self.said = Said(self.processes[COORDINATOR].log)

    def start(self, name: str, *, prefix: Sequence[str] = ()) -> None:
        """Start a node's process; its predecessor has ended."""
        command = agent_command(
            self.bed.layout,
            self.bed.layout.board(name),
            AgentSetup(model=self.model),
            coordinator=self.bed.coordinator,
            folder=self.folder,
            join_s=START_S,
        )
        self._keep(name, self.bed.start(name, (*prefix, *command), on=name))

    def _keep(self, who: str, running: Running) -> None:
        """Take a process in place of its predecessor; it outlives the test in which it was started again."""
        if (before := self.processes.get(who)) is not None:
            leaks.KEPT.discard(before.process.pid)
        self.processes[who] = running
        leaks.KEPT.add(running.process.pid)

    def restart(self, who: str, *, prefix: Sequence[str] = ()) -> None:
        """End a process in order, if it still runs, start it again, and wait until all nodes are there."""
        self.said.look()
        began_s = time.monotonic()
        processes.stop([self.processes[who]])
        if who == COORDINATOR:
            self.start_coordinator(prefix=prefix)
            self._await_joined(*NAMES)
        else:
            self.start(who, prefix=prefix)
            self._await_joined(who, after_s=began_s)
        self.wait_idle()

    def _await_joined(self, *names: str, after_s: float = 0.0) -> None:
        deadline_s = time.monotonic() + START_S
        while not all(self.said.first_s("note", after_s=after_s, text=f"node {name} joined from") for name in names):
            for name in (COORDINATOR, *names):
                assert self.processes[name].process.poll() is None, f"{name} ended: {self.processes[name].words()}"
            assert time.monotonic() < deadline_s, f"not all of {names} join; see {self.said.log}"
            time.sleep(WATCH_S)
            self.said.look()

    def members(self) -> dict[str, list[Any]]:
        """State, process and silence in seconds of each member, as the coordinator said last."""
        lines = self._watch.words().splitlines()
        return dict(json.loads(lines[-1])) if lines and lines[-1].endswith("}") else {}

    def wait_idle(self, *names: str) -> None:
        """Wait until these nodes, all by default, are idle members."""
        deadline_s = time.monotonic() + START_S
        while not all(self.members().get(name, [""])[0] == "idle" for name in names or NAMES):
            for name in (COORDINATOR, *(names or NAMES)):
                assert self.processes[name].process.poll() is None, f"{name} ended: {self.processes[name].words()}"
            assert time.monotonic() < deadline_s, f"not all of {names or NAMES} are idle: {self.members()}"
            time.sleep(WATCH_S)

    # ---- runs -------------------------------------------------------------------------------------

    def _make_plan(self) -> Path:
        path = self.folder / "plan.json"
        words = ("plan", str(self.job), "--nodes", str(len(NAMES)), "--save", str(path))
        assert self.ringtune(*words).wait(RUN_S) == 0, "no plan"
        plan = GivenPlan.from_json(json.loads(path.read_text())).plan
        still = Plan.of(plan.course, type(plan.placement)(slices=slices_of(SLICES))).with_copies(True)
        path.write_text(json.dumps(still.to_json()))
        return path

    def ringtune(self, *words: str, prefix: Sequence[str] = (), log: str = "command") -> Running:
        """Start a command of ringtune on the hub."""
        options = ("--coordinator", self.bed.coordinator, "--insecure", "--json")
        return self.bed.start(log, (*prefix, sys.executable, "-P", "-m", "ringtune.cli", *words, *options))

    def train(self, *options: str, prefix: Sequence[str] = (), out: Path | None = None) -> BoardRun:
        """Start the job, or with ``--resume`` and its folder go on with it."""
        self._num_runs += 1
        if out is None:
            out = self.folder / "runs" / str(self._num_runs)
            shutil.rmtree(out, ignore_errors=True)
        words = ("train", str(self.job), "--plan", str(self.plan), "--out", str(out), *options)
        if "--resume" in options:
            words = ("train", str(self.job), "--out", str(out), *options)
        return BoardRun(self.ringtune(*words, prefix=prefix, log=f"train-{self._num_runs}"), out)


def four_boards(folder: Path, name: str) -> Layout:
    """A board for each node; owners have rows."""
    boards = []
    for index, node in enumerate(NAMES):
        rows = tiny.write_rows(folder / f"{node}.csv", 30, seed=index) if node in OWNERS else None
        held_out = tiny.write_rows(folder / f"{node}-held-out.csv", 12, seed=10 + index) if node in OWNERS else None
        boards.append(
            Board(
                name=node,
                cpu_cores=0.4,
                memory_bytes=2 << 30,
                up_bytes_per_s=_LINK_BYTES_PER_S,
                down_bytes_per_s=_LINK_BYTES_PER_S,
                data=rows,
                eval_data=held_out,
            )
        )
    return Layout(boards=tuple(boards), name=name)


@contextmanager
def board_ring(
    folder: Path, *, name: str, capabilities: Capabilities | None = None, **changes: object
) -> Iterator[BoardRing]:
    """A ring on boards, which are removed afterwards."""
    with Testbed(four_boards(folder, name), folder=folder, capabilities=capabilities) as bed:
        ring = BoardRing(bed, folder, **changes)
        try:
            yield ring
        finally:
            leaks.KEPT.difference_update(running.process.pid for running in ring.processes.values())


RUN_S = 300.0
LOOK_S = 0.02


class Said:
    """The lines of JSON that a process prints, and when each was seen; safe for threads."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.events: list[tuple[float, dict[str, Any]]] = []
        self._lock = threading.Lock()
        self._read_bytes = 0

    def look(self) -> None:
        """Read what it has said since the last look."""
        with self._lock, self.log.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            now_s = time.monotonic()
            self.events += [(now_s, json.loads(line)) for line in whole.splitlines() if line.startswith(b"{")]

    def first_s(self, kind: str, *, after_s: float, text: str = "") -> float | None:
        """When an event of a kind, with some text in it, was first seen after a moment; None = it was not."""
        found = (at for at, event in self.events if at > after_s and event["event"] == kind and text in str(event))
        return next(found, None)


@contextmanager
def listening(*all_said: Said) -> Iterator[None]:
    """Look all the time at what processes say, whatever else is done."""
    over = threading.Event()

    def listen() -> None:
        while not over.wait(LOOK_S):
            for said in all_said:
                said.look()

    helper = threading.Thread(target=listen, name="listening")
    helper.start()
    try:
        yield
    finally:
        over.set()
        helper.join()
        for said in all_said:
            said.look()


class BoardRun(Said):
    """``ringtune train`` on the hub."""

    def __init__(self, running: Running, out: Path) -> None:
        super().__init__(running.log)
        self.running, self.out = running, out

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.running.process.poll()

    def until_steps(self, count: int) -> None:
        """Wait until so many steps were said."""
        deadline_s = time.monotonic() + RUN_S
        while len(self.steps()) < count:
            assert self.code is None, f"the run ended before {count} steps: {self.running.words()}"
            assert time.monotonic() < deadline_s, f"no {count} steps: {self.running.words()}"
            self.look()
            time.sleep(LOOK_S)

    def steps(self) -> list[int]:
        """The steps that it has said, in order; those that were done again are there again."""
        return [event["step"] for _, event in self.events if event["event"] == "step" and is_step(event)]

    @property
    def message(self) -> str:
        """What went wrong, as the last event says."""
        return next((str(event["message"]) for _, event in self.events[::-1] if event["event"] == "error"), "")

    def books(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        path = self.out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
