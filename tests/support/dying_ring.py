"""A ring of real nodes whose coordinator is killed at chosen moments, and comes back; what was trained is compared.

For tests and ``tests.bench.coordinator_death``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from coordinator.client.connection import Connection
from coordinator.client.run_folder import RunFolder
from coordinator.client.saved_run import read_run_file
from coordinator.client.submit import Client
from coordinator.planner.given_plan import GivenPlan
from coordinator.run.requests import RunRequest
from ringtune.errors import RingTuneError
from ringtune.schedule.plan import Plan
from tests.support import leaks
from tests.support.cluster import LEASE_S, START_S, TEMPLATE, Nodes, free_port
from tests.support.failpoints import VARIABLE, order_failure
from tests.support.fake_agents import Notes
from tests.support.killing import steps_of_metrics
from tests.support.moves import moving, slices_of
from tests.support.processes import RUN_S, start_ringtune
from tests.support.results import largest_difference, trained_in
from tests.support.trials import POLL_S, Trial, differences, wait_until
from tests.support.typed import run_here

NAME = "coordinator"


class DyingCoordinator:
    """Starts a coordinator again whenever it is killed, until it is closed."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.num_deaths = 0
        self.num_returns = 0
        self.on_death: Callable[[], object] = lambda: None
        self.orders = folder / "failpoints"
        self.orders.mkdir()
        self._arguments = ("--bind", self.address, "--state", folder / "state", "--lease", LEASE_S, "--json")
        self._closing = threading.Event()
        self._process = self._start()
        self._watch = threading.Thread(target=self._start_again, daemon=True)
        self._watch.start()

    def _start(self) -> subprocess.Popen[str]:
        process = start_ringtune(
            "coordinator", *self._arguments, module="tests.support.failing_command", **{VARIABLE: str(self.orders)}
        )
        leaks.KEPT.add(process.pid)
        assert process.stdout is not None
        listening = process.stdout.readline()
        assert json.loads(listening)["address"] == self.address
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        with process:  # closes its pipes
            assert process.stdout is not None
            for _ in process.stdout:
                pass

    def _start_again(self) -> None:
        while self._process.wait() == -signal.SIGKILL and not self._closing.is_set():
            leaks.KEPT.discard(self._process.pid)
            self.num_deaths += 1
            self._reader.join(RUN_S)
            self.on_death()
            self._process = self._start()
            self.num_returns += 1

    def kill(self) -> None:
        """Kill it now, and wait for its end; it comes back."""
        deaths = self.num_deaths
        self._process.send_signal(signal.SIGKILL)
        wait_until(lambda: self.num_deaths > deaths, lambda: "the coordinator is not killed", within_s=RUN_S)

    def close(self) -> None:
        """End it for good."""
        self._closing.set()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(RUN_S)
        finally:
            self._process.kill()
            leaks.KEPT.discard(self._process.pid)
            self._watch.join(RUN_S)
            self._reader.join(RUN_S)


OWNERS, HOSTS = ("a", "b"), ("c", "d")
NAMES = (*OWNERS, *HOSTS)
FIRST = (("a", 0, 1), ("c", 1, 3), ("d", 3, 4))
SECOND = (("a", 0, 2), ("d", 2, 3), ("c", 3, 4))
STEPS, TURN = 24, 4
JOB: dict[str, Any] = {
    "train__local_iterations": TURN,
    "train__max_steps": STEPS,
    "train__checkpoint_every": 8,
    "train__eval_every": 8,
    "recovery__copies": "auto",
}


class DyingRing:
    """Owners a and b and hosts c and d, as processes, of a coordinator that comes back."""

    def __init__(self, folder: Path, coordinator: DyingCoordinator, *, moves: bool = False, **changes: Any) -> None:
        self._folder, self.coordinator = folder, coordinator
        self._nodes = Nodes(folder / "ring", owners=OWNERS, hosts=HOSTS, failpoints=coordinator.orders)
        self._num_runs = 0
        self.job = self._nodes.job(**JOB | changes)
        self._steps = list(range(1, (self.job.train.max_steps or STEPS) + 1))
        for name in NAMES:
            self._nodes.spawn(name, coordinator.address)
        self.wait_idle()
        self._plan = self._make_plan(moves=moves)
        self._wanted = trained_in(self._train_once()[0])

    def _make_plan(self, *, moves: bool) -> Plan:
        with Client(self.coordinator.address) as client:
            plan, _, _ = client.plan(self.job, num_nodes=len(NAMES), join_s=START_S)
        first = Plan.of(plan.course, type(plan.placement)(slices=slices_of(FIRST)))
        return moving(first, (STEPS // TURN // 2, SECOND)) if moves else first

    # ---- nodes ------------------------------------------------------------------------------------

    def wait_idle(self) -> None:
        """Wait until all nodes are members, and none works on a run."""
        with Connection(self.coordinator.address) as client:

            def states() -> dict[str, str]:
                return {entry.joined.node: entry.state for entry in client.nodes()}

            wait_until(lambda: states() == dict.fromkeys(NAMES, "idle"), states, within_s=START_S)

    def close(self) -> None:
        """End all nodes."""
        self._nodes.close()

    # ---- runs -------------------------------------------------------------------------------------

    def _train_once(self) -> tuple[Path, list[str]]:
        self._num_runs += 1
        out, progress = self._folder / f"out-{self._num_runs}", Notes()
        request = RunRequest(job=self.job, join_s=START_S, plan=GivenPlan(plan=self._plan))
        with Client(self.coordinator.address) as client, RunFolder(out) as folder:
            client.run(request, progress=progress, folder=folder, coordinator_wait_s=RUN_S)
        return out, progress.texts

    def trial(self, order: str, *, node: str = "", loses: str = "") -> Trial:
        """Train while the coordinator is killed.

        Args:
            order: a failpoint of the coordinator; of ``node`` a place, at which the coordinator is killed.
            node: whose place tells the moment; empty = the coordinator's own.
            loses: a node that is killed after the first checkpoint, and comes back after the coordinator's death.
        """
        self.wait_idle()
        began_s, deaths = time.monotonic(), self.coordinator.num_deaths
        lost = threading.Event()
        if loses:
            order_failure(self.coordinator.orders, loses, "backward 24 kill")
            threading.Thread(target=self._replace, args=(loses, deaths, lost), daemon=True).start()
        if node:
            done = order_failure(self.coordinator.orders, node, f"{order} stop")
            threading.Thread(target=self._kill_when_done, args=(node, done), daemon=True).start()
        else:
            order_failure(self.coordinator.orders, NAME, f"{order} kill")
        out, notes, error = Path(), list[str](), ""
        try:
            out, notes = self._train_once()
        except RingTuneError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if loses:
            assert lost.wait(START_S)
        for name in (*NAMES, NAME):  # a place that was not reached
            (self.coordinator.orders / name).unlink(missing_ok=True)
        return self._trial(out, began_s, deaths, error, notes)

    def _trial(self, out: Path, began_s: float, deaths: int, error: str, notes: Sequence[str] = ()) -> Trial:
        """What came of a run; ``is_told``: that the coordinator was away and answers again.

        ``from_step`` is the step after which the run went on, -1 if it began anew; absent if it did neither.
        """
        difference, problems = float("inf"), [error] if error else []
        if not error:
            difference = largest_difference(trained_in(out), self._wanted)
            problems = differences(difference, steps_of_metrics(out), self._steps)
        told = [text.split(" ", 2)[2].partition(";")[0] for text in notes if text.startswith("coordinator ")]
        from_steps = [-1] if any("starts from the beginning" in text for text in notes) else []
        from_steps += [int(text.split()[-1]) for text in notes if text.startswith("resuming after step ")]
        figures = {
            "difference": difference,
            "deaths_of_the_coordinator": self.coordinator.num_deaths - deaths,
            "began_anew": from_steps[-1:] == [-1],
            "is_told": told == ["does not answer", "answers again"],
            **({"from_step": from_steps[-1]} if from_steps else {}),
        }
        return Trial(problems=tuple(problems), wall_s=time.monotonic() - began_s, error=error, figures=figures)

    def wait_given_up(self) -> None:
        """Wait until every node has given its run up, because its coordinator was silent for 12 leases."""
        self._wait_logged(f"has not answered for {12 * LEASE_S:g} s")

    def forget_turns(self) -> None:
        """Wait until every node has put the last turns on its disk, and take them away."""
        self._wait_logged("saved the ends of steps")
        for path in self._nodes.folder.glob("state/*/r*/copy-*"):
            path.unlink()

    def _wait_logged(self, text: str) -> None:
        wait_until(
            lambda: all(text in self._nodes.log(name) for name in NAMES),
            lambda: f"not every node has logged {text!r}",
            within_s=START_S + 12 * LEASE_S,
        )

    def submitter_trial(self, event: str, *, with_coordinator: bool = False) -> Trial:
        """Train while the submitter is killed, and fetch the run."""
        self.wait_idle()
        began_s, deaths = time.monotonic(), self.coordinator.num_deaths
        self._num_runs += 1
        out, job, plan = (self._folder / f"{name}-{self._num_runs}" for name in ("out", "job", "plan"))
        job.write_text(self.job.to_toml())
        plan.write_text(json.dumps(self._plan.to_json()))
        where = ("--coordinator", self.coordinator.address)
        with start_ringtune("train", job, *where, "--plan", plan, "--out", out, "--json") as submitter:
            assert submitter.stdout is not None
            assert any(event in line for line in submitter.stdout), f"no line with {event}"
            submitter.kill()
            if with_coordinator:
                self.coordinator.kill()
        fetched, error = self._folder / f"fetched-{self._num_runs}", ""
        try:
            self._wait_over(deaths + with_coordinator)
            run_id = read_run_file(out / "run.json")["run_id"]
            done = run_here(TEMPLATE.get, "fetch", run_id, "--out", fetched, *where)
            error = done.stderr if done.returncode else ""
        except RingTuneError as failure:
            error = f"{type(failure).__name__}: {failure}"
        return self._trial(fetched, began_s, deaths, error)

    def _wait_over(self, deaths: int) -> None:
        """Wait until the run is over that the coordinator drives after so many deaths."""
        wait_until(lambda: self.coordinator.num_returns >= deaths, lambda: "no coordinator is back", within_s=RUN_S)
        with Connection(self.coordinator.address) as client:
            *_, last = client.runs()
            for _ in client.events(last.run_id, wait=True, whole=False, with_files=False):
                pass

    def _kill_when_done(self, node: str, done: Path) -> None:
        """Kill the coordinator while the node stands still at its place, and let the node go on."""
        while (self.coordinator.orders / node).exists() or done.exists():  # until the place, then the next order
            if done.exists():
                self._nodes.wait_stopped(node)
                self.coordinator.kill()
                self._nodes.signal(node, signal.SIGCONT)
                return
            time.sleep(POLL_S / 10)

    def _replace(self, node: str, deaths: int, done: threading.Event) -> None:
        """Start a node again that is killed, once the coordinator was killed too."""
        self._nodes.agents[node].wait(RUN_S)
        wait_until(lambda: self.coordinator.num_deaths > deaths, lambda: "no coordinator has died", within_s=RUN_S)
        self._nodes.wait_exit(node)
        self._nodes.spawn(node, self.coordinator.address)
        done.set()


@contextmanager
def dying_ring(folder: Path, *, moves: bool = False, **changes: Any) -> Iterator[DyingRing]:
    """A ring with an undisturbed run behind it."""
    with ExitStack() as stack:
        coordinator = DyingCoordinator(folder)
        stack.callback(coordinator.close)
        ring = DyingRing(folder, coordinator, moves=moves, **changes)
        stack.callback(ring.close)
        yield ring
