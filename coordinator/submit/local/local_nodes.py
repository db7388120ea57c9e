"""Run nodes on this machine: agents as processes, started, watched and ended with the run.

Agents are never imported; they are forked from a template that has loaded the libraries once. They end when the
standard input that they were given ends, so even a killed launcher leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from coordinator.submit.local.agent_template import AgentTemplate, ForkedAgent
from ringtune.errors import CapacityError, JobError, RingTuneError, UsageError
from ringtune.files.durable import make_folder, storage_errors
from ringtune.jobs.job import Job
from ringtune.machine.cores import usable_cores
from ringtune.machine.exit_errors import exit_error
from ringtune.machine.memory import LIBRARY_BYTES, free_bytes
from ringtune.quantities import format_bytes

OWN_COORDINATOR: Final = "--own-coordinator"
"""Option of agents whose rows and coordinator are one user's: evaluations hide no counts of classes."""

_TERM_S = 5.0
_KILL_S = 2.0
_POLL_S = 0.1
_TAIL_BYTES = 4096

OnExit = Callable[[str, RingTuneError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSetup:
    """The number of local nodes and owners of one run, with the threads and memory of each.

    Attributes:
        num_nodes: how many.
        num_owners: the first so many own data.
        threads: compute threads of each.
        memory_bytes: budget of each.
    """

    num_nodes: int
    num_owners: int
    threads: int
    memory_bytes: int

    @staticmethod
    def of(
        job: Job, num_nodes: int, *, available_bytes: int | None = None, base_bytes: int | None = None
    ) -> LocalSetup:
        """Share this machine's cores and free memory out to ``num_nodes`` nodes.

        Args:
            job: names the data, and how many nodes own it.
            num_nodes: at least 1.
            available_bytes: memory that is free here; found out if not given.
            base_bytes: what an agent takes before it hosts anything; ``LIBRARY_BYTES`` if not given.

        Raises:
            UsageError: not even one node.
            JobError: no data, or more owners than nodes.
            CapacityError: so many processes do not fit here.
        """
        if num_nodes < 1:
            raise UsageError(f"--local {num_nodes} has to be at least 1")
        if not job.data.train:
            raise JobError("data.train is empty; with --local it names the rows that the nodes share")
        owners = job.data.owners or num_nodes
        if owners > num_nodes:
            raise JobError(f"data.owners = {owners} is more than --local {num_nodes}; lower it or start more nodes")
        available = free_bytes() if available_bytes is None else available_bytes
        base = LIBRARY_BYTES if base_bytes is None else base_bytes
        share = available // num_nodes - base
        if share <= 0:
            raise CapacityError(_too_little(num_nodes, available, base))
        threads = job.runtime.threads or max(1, usable_cores() // num_nodes)
        return LocalSetup(num_nodes=num_nodes, num_owners=owners, threads=threads, memory_bytes=share)


def _too_little(num_nodes: int, available_bytes: int, base_bytes: int) -> str:
    """Say that so many nodes do not fit in memory, and how many do."""
    nodes = "1 local node needs" if num_nodes == 1 else f"{num_nodes} local nodes need"
    they = "it hosts" if num_nodes == 1 else "they host"
    most = available_bytes // (base_bytes + 1)
    remedy = f"use at most --local {most}" if most else "not even one fits: free memory, or use another machine"
    return (
        f"{nodes} {format_bytes(num_nodes * base_bytes)} before {they} anything, but "
        f"{format_bytes(available_bytes)} are free here; {remedy}"
    )


class LocalNodes:
    """Runs agents while in its context.

    Args:
        setup: how many, and with what.
        job: names the data.
        coordinator: ``host:port`` that they join.
        logs: folder for what they print.
        on_exit: called if one ends by itself.
        names: of the agents; by default those of ``node_name``.
        options: further options of each agent.
        states: folder in which each agent gets one for its parts of checkpoints; None = their own default.
    """

    def __init__(
        self,
        setup: LocalSetup,
        job: Job,
        coordinator: str,
        *,
        logs: Path,
        on_exit: OnExit,
        names: Sequence[str] = (),
        options: Sequence[str] = (),
        states: Path | None = None,
    ) -> None:
        self._setup = setup
        self._job = job
        self._coordinator = coordinator
        self._logs = logs
        self._on_exit = on_exit
        self._names = tuple(names) or tuple(node_name(index, setup.num_nodes) for index in range(setup.num_nodes))
        self._options = tuple(options)
        self._states = states.absolute() if states else None
        threads = str(setup.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self._template = AgentTemplate(logs / "template.log", environment)
        self._agents: dict[str, ForkedAgent] = {}
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch-nodes", daemon=True)

    def __enter__(self) -> LocalNodes:
        """Start every agent, once the libraries are loaded.

        Raises:
            RingTuneError: the template of the agents could not be started.
        """
        make_folder(self._logs)
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._template)
            undo.callback(self._stop)
            for index, name in enumerate(self._names):
                log = self._logs / f"{name}.log"
                with storage_errors(log):
                    log.write_bytes(b"")
                self._agents[name] = self._template.start(self._arguments(index, name), log=log)
            self._undo = undo.pop_all()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End every agent: SIGTERM, then SIGKILL for those that do not listen."""
        self._undo.close()

    def _arguments(self, index: int, name: str) -> list[str]:
        arguments = ["--coordinator", self._coordinator, "--name", name, "--watch-parent"]
        arguments += ["--threads", str(self._setup.threads), "--memory", str(self._setup.memory_bytes)]
        arguments += ["--device-nodes", str(self._setup.num_nodes)]
        if index < self._setup.num_owners:
            arguments += ["--data", self._job.data.train, "--share", f"{index}/{self._setup.num_owners}"]
            if self._job.data.eval:
                arguments += ["--eval-data", self._job.data.eval]
        if self._states is not None:
            arguments += ["--state", str(self._states / name)]
        return [*arguments, *self._options]

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            for name, agent in self._agents.items():
                code = agent.poll()
                if code is not None and not self._stopping.is_set():
                    log = self._logs / f"{name}.log"
                    lost = self._template.error()
                    self._on_exit(name, lost or exit_error(f"node {name}", code, self._tail(name), log=log))
                    return

    def _tail(self, name: str) -> str:
        with (self._logs / f"{name}.log").open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            return log.read().decode(errors="replace")

    def _stop(self) -> None:
        self._stopping.set()
        try:
            self._signal(signal.SIGTERM, _TERM_S)
        finally:  # also if a second Ctrl-C cuts the waiting short
            self._signal(signal.SIGKILL, _KILL_S)
            for agent in self._agents.values():
                agent.close_input()

    def _signal(self, number: signal.Signals, timeout_s: float) -> None:
        """Send a signal to the agents that still run, and wait until they have ended, ``timeout_s`` at most."""
        running = [agent for agent in self._agents.values() if agent.poll() is None]
        for agent in running:
            agent.send_signal(number)
        deadline_s = time.monotonic() + timeout_s
        for agent in running:
            agent.wait(max(0.0, deadline_s - time.monotonic()))


def node_name(index: int, num_nodes: int) -> str:
    """Name of a local node; names sort like numbers: the third of 12 nodes is ``node-02``."""
    return f"node-{index:0{len(str(num_nodes - 1))}}"
