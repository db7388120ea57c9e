"""Local nodes: agents as processes of this machine, forked from a template, and ended with the run.

The template is ``python -m edge.template``, which documents the messages; this package never imports agents. A forked
agent is a child of the template, so its signals and exit code pass through the template. Its standard input is a pipe
from this process: when this process ends, even if it is killed, the agent ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringtune.errors import CapacityError, DeadlineError, JobError, RingTuneError, UsageError
from ringtune.job.job import Job
from ringtune.machine.process import exit_error
from ringtune.machine.resources import LIBRARY_BYTES, free_bytes, usable_cores
from ringtune.quantities import format_bytes
from ringtune.storage.durable import itself, make_folder, storage_errors

LOAD_S: Final = 120.0
"""Time limit for loading the libraries: a few seconds on a laptop, half a minute on a small board."""

COMMAND: Final = (sys.executable, "-P", "-m", "edge.template", "_" * 100)
"""The command of a template; its last word is room for each agent's own command line."""

_WHO: Final = "the template of the local nodes"
_FORK_S: Final = 60.0
_END_S: Final = 30.0
_MAX_BYTES: Final = 1 << 16


class ForkedAgent:
    """An agent that was forked from a template.

    Args:
        standard_input: the writing end of the agent's input.
    """

    def __init__(self, template: AgentTemplate, number: int, pid: int, standard_input: int) -> None:
        self.pid = pid
        self._template = template
        self._number = number
        self._input = standard_input

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the agent runs."""
        return self._template.code_of(self._number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the exit code; None after ``timeout_s`` without one."""
        self._template.wait_for(lambda: self.poll() is not None, timeout_s)
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent; no effect if it has ended."""
        self._template.send_signal(self._number, number)

    def close_input(self) -> None:
        """Close the agent's standard input, which ends the agent; a second call has no effect."""
        if self._input >= 0:
            os.close(self._input)
            self._input = -1


class AgentTemplate:
    """A template process, which runs in the context.

    Args:
        log: gets the output of the template.
        environment: variables of the template and its agents.
    """

    def __init__(self, log: Path, environment: Mapping[str, str], *, command: Sequence[str] = COMMAND) -> None:
        self._log = log
        self._command = command
        self._environment = environment
        self._changed = threading.Condition()
        self._is_ready = False
        self._is_over = False
        self._count = 0
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def __enter__(self) -> AgentTemplate:
        """Start the template, which then loads the libraries.

        Raises:
            UsageError: this system can't end the agents with their launcher.
            StorageError: the log can't be written.
        """
        if sys.platform != "linux":
            raise UsageError(
                "nodes on this machine (--local) need Linux; start 'ringtune coordinator' and 'ringtune node' by hand, "
                "and give --coordinator HOST:PORT"
            )
        with contextlib.ExitStack() as undo, storage_errors(self._log), open(self._log, "wb", opener=itself) as log:
            self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._control.close)
            with other:
                # a session of its own: Ctrl-C is for the launcher, which then ends the run in order
                self._process = subprocess.Popen(  # noqa: S603 - our own module
                    self._command,
                    stdin=other.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self._environment,
                )
            undo.pop_all()
        self._reader = threading.Thread(target=self._read, name="agent-template", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the template, and with it the agents that still run."""
        self._process.kill()
        self._process.wait(_END_S)
        self._reader.join(_END_S)
        self._control.close()

    @property
    def pid(self) -> int:
        """Process id of the template."""
        return self._process.pid

    def error(self) -> RingTuneError | None:
        """Make the error with which the template has ended; None while it runs."""
        if not self._is_over:
            return None
        return exit_error(_WHO, self._process.wait(_END_S), log=self._log)

    def start(
        self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> ForkedAgent:
        """Wait until the libraries are loaded, then fork an agent.

        The output is appended to ``log``; ``environment`` has variables that differ from the template's.

        Raises:
            RingTuneError: the template has ended, or does not answer in time.
            StorageError: the log can't be written.
        """
        self._await(lambda: self._is_ready, LOAD_S, "to load the libraries")
        with self._changed:
            number = self._count = self._count + 1
        request = {"agent": number, "arguments": list(arguments), "environment": dict(environment or {})}
        with storage_errors(log), open(log, "ab", opener=itself) as file:
            read, write = os.pipe()
            try:
                self._send(request, [read, file.fileno(), file.fileno()])
                self._await(lambda: number in self._pids, _FORK_S, "to fork a node")
                return ForkedAgent(self, number, self._pids[number], write)
            except BaseException:
                os.close(write)
                raise
            finally:
                os.close(read)

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until messages of the template make ``predicate`` true; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(predicate, timeout_s)

    def code_of(self, number: int) -> int | None:
        """Exit code of an agent, None while it runs; -9 after the template's end, as the kernel then kills it."""
        with self._changed:
            return self._codes.get(number, -signal.SIGKILL if self._is_over else None)

    def send_signal(self, number: int, signal_number: signal.Signals) -> None:
        """Send a signal to an agent; no effect if it has ended."""
        if self.code_of(number) is None:
            self._send({"agent": number, "signal": int(signal_number)})

    def _send(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(ConnectionError):  # the template has ended, as whoever waits for it learns
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)

    def _await(self, predicate: Callable[[], bool], timeout_s: float, what: str) -> None:
        in_time = self.wait_for(lambda: predicate() or self._is_over, timeout_s)
        error = self.error()
        if error is not None:
            raise error
        if not in_time:
            raise DeadlineError(f"waited {timeout_s:g} s for {_WHO} {what}; see {self._log} and repeat the run")

    def _read(self) -> None:
        while packet := self._receive():
            message: dict[str, Any] = json.loads(packet)
            with self._changed:
                if "code" in message:
                    self._codes[message["agent"]] = message["code"]
                elif "pid" in message:
                    self._pids[message["agent"]] = message["pid"]
                else:
                    self._is_ready = True
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _receive(self) -> bytes:
        """Receive the next message; empty when the template has ended."""
        try:
            return self._control.recv(_MAX_BYTES)
        except OSError:
            return b""


OWN_COORDINATOR: Final = "--own-coordinator"
"""Option of agents with rows and coordinator of one user: evaluations hide no counts of classes."""

_TERM_S = 5.0
_KILL_S = 2.0
_POLL_S = 0.1

OnExit = Callable[[str, RingTuneError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSetup:
    """Number, threads and memory of the local nodes of one run.

    Attributes:
        num_owners: number of first nodes with data.
    """

    num_nodes: int
    num_owners: int
    threads: int
    memory_bytes: int

    @staticmethod
    def of(
        job: Job, num_nodes: int, *, available_bytes: int | None = None, base_bytes: int | None = None
    ) -> LocalSetup:
        """Divide this machine's cores and free memory among ``num_nodes`` nodes.

        ``available_bytes`` are of free memory, None = measured here; ``base_bytes`` of an agent that hosts
        nothing, None = ``LIBRARY_BYTES``.

        Raises:
            UsageError: ``num_nodes`` is below 1.
            JobError: no data, or more owners than nodes.
            CapacityError: so many processes do not fit in memory.
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
    """Local agents, which run in the context.

    Args:
        setup: number and resources.
        job: names the data.
        coordinator: ``host:port`` that they join.
        logs: folder for their output.
        on_exit: called if an agent ends by itself.
        names: of the agents; by default those of ``node_name``.
        states: parent of each agent's folder for shards; None = the agent's default.
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

        Raises ``RingTuneError``: the template of the agents could not be started.
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

    def __exit__(self, *_: object) -> None:
        """End every agent: SIGTERM, then SIGKILL."""
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
        running = {*self._agents}
        while running and not self._stopping.wait(_POLL_S):
            for name, agent in self._agents.items():
                if name in running and (code := agent.poll()) is not None and not self._stopping.is_set():
                    running.remove(name)
                    log = self._logs / f"{name}.log"
                    self._on_exit(name, self._template.error() or exit_error(f"node {name}", code, log=log))

    def _stop(self) -> None:
        self._stopping.set()
        try:
            self._signal(signal.SIGTERM, _TERM_S)
        finally:  # also if a second Ctrl-C cuts the waiting short
            self._signal(signal.SIGKILL, _KILL_S)
            for agent in self._agents.values():
                agent.close_input()

    def _signal(self, number: signal.Signals, timeout_s: float) -> None:
        """Send a signal to the agents that run, and wait up to ``timeout_s`` for their end."""
        running = [agent for agent in self._agents.values() if agent.poll() is None]
        for agent in running:
            agent.send_signal(number)
        deadline_s = time.monotonic() + timeout_s
        for agent in running:
            agent.wait(max(0.0, deadline_s - time.monotonic()))


def node_name(index: int, num_nodes: int) -> str:
    """Name of a local node; names sort like numbers: the third of 12 nodes is ``node-02``."""
    return f"node-{index:0{len(str(num_nodes - 1))}}"
