"""A testbed while it is there: built, agents started in it, a command run, all of it removed.

From Python::

    layout = load_layout(Path("deploy/testbed/boards.toml"))
    with Testbed(layout, folder=Path("build/testbed")) as bed:
        bed.start_coordinator()
        bed.start_agents(AgentSetup(data=Path("train.csv")))
        code = bed.run(["ringtune", "train", "job.toml", "--coordinator", "{coordinator}", "--insecure", ...])
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import psutil

from deploy.testbed import agents, groups, processes
from deploy.testbed.agents import AgentSetup
from deploy.testbed.boards import Board, Layout
from deploy.testbed.capabilities import Capabilities, find_capabilities
from deploy.testbed.cleanup import LEDGERS, Ledger
from deploy.testbed.groups import GroupUse
from deploy.testbed.network import HUB_ADDRESS, Shaper, build_commands
from deploy.testbed.processes import Running, call
from ringtune.errors import DataError, DeadlineError, PeerLostError, UsageError
from ringtune.quantities import format_bytes

DAY_S = 86_400.0
_POLL_S = 0.05
_ASK_S = 1.0
_COORDINATOR_S = 60.0
_ANSWER_S = 30.0
# A command under test that is to stop may save first.
_COMMAND_TERM_S = 30.0


class Testbed:
    """Boards on this machine, for as long as its context lasts.

    Args:
        folder: for logs, and for what each agent keeps (``logs``, ``state``, ``cache``); made if missing.
        capabilities: of this machine; found out if not given.
    """

    # not a class of tests, whatever pytest thinks of its name
    __test__ = False

    def __init__(
        self, layout: Layout, *, folder: Path, capabilities: Capabilities | None = None, ledgers: Path = LEDGERS
    ) -> None:
        self.layout = layout
        self.folder = folder.resolve()
        self.coordinator = ""
        self.notes: list[str] = []
        self._capabilities = capabilities
        self._ledger = Ledger(layout.name, folder=ledgers)
        self._agents: dict[str, Running] = {}
        self._others: list[Running] = []

    def __enter__(self) -> Testbed:
        """Build everything; raises ``MissingCapability``, ``CapacityError`` or ``BusyError``."""
        self._mounts, shaper = (self._capabilities or find_capabilities()).choose(self.layout)
        free_bytes = int(psutil.virtual_memory().available)
        self.notes = self.layout.check_fits(num_cores=len(os.sched_getaffinity(0)), free_bytes=free_bytes)
        self._ledger.open()
        try:
            self._build(shaper)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything."""
        self.close()

    def close(self) -> None:
        """End all processes and remove what was created; raises ``RingTuneError``."""
        with _handlers(signal.SIG_IGN):  # no signal cuts the removal short
            try:
                processes.stop([*self._agents.values(), *reversed(self._others)])
            finally:
                self._ledger.remove_all()

    # ---- building ---------------------------------------------------------------------------------

    def _build(self, shaper: Shaper) -> None:
        layout, mounts = self.layout, self._mounts
        groups.hand_down(mounts)
        self._make_group()
        groups.apply(groups.bed_settings(mounts, layout.name))
        self._make_group("hub")
        for board in layout.boards:
            self._make_group(f"board-{board.name}")
            groups.apply(groups.board_settings(mounts, layout, board))
        for namespace in (layout.hub, *(layout.namespace(board) for board in layout.boards)):
            self._ledger.add_namespace(namespace)
            call(("ip", "netns", "add", namespace))
        for command in build_commands(layout, shaper):
            call(command)

    def _make_group(self, *parts: str) -> None:
        for folder in self._mounts.folders(self.layout.name, *parts):
            self._ledger.add_folder(folder)
            folder.mkdir()

    # ---- processes --------------------------------------------------------------------------------

    def start(self, name: str, command: Sequence[str], *, on: str = "") -> Running:
        """Start any command in the background.

        ``on`` is the board; empty = the hub.
        """
        running = self._start(name, command, on=on, threads=1)
        self._others.append(running)
        return running

    def _start(self, name: str, command: Sequence[str], *, on: str, threads: int) -> Running:
        return processes.start(
            name,
            agents.fill_in(command, self.coordinator),
            folders=self.folders(on),
            namespace=self.namespace(on),
            log=self.folder / "logs" / f"{name}.log",
            environment=agents.environment(threads=threads, coordinator=self.coordinator),
        )

    def folders(self, on: str = "") -> tuple[Path, ...]:
        """The control groups of a board, or of the hub."""
        return self._mounts.folders(self.layout.name, f"board-{self.layout.board(on).name}" if on else "hub")

    def namespace(self, on: str = "") -> str:
        """The namespace of a board, or of the hub."""
        return self.layout.namespace(self.layout.board(on)) if on else self.layout.hub

    def start_coordinator(self, *, lease_s: float = 10.0) -> str:
        """Start a coordinator on the hub and wait until it listens; return its address.

        Raises:
            PeerLostError: it ended.
            DeadlineError: it does not get ready.
        """
        running = self.start("coordinator", agents.coordinator_command(lease_s=lease_s))
        deadline_s = time.monotonic() + _COORDINATOR_S
        while not self.coordinator:
            for line in running.words().splitlines(keepends=True):
                if line.startswith("{") and line.endswith("\n") and "address" in (event := json.loads(line)):
                    self.coordinator = str(event["address"])
            if not self.coordinator and running.wait(_POLL_S) is not None:
                raise PeerLostError(f"the coordinator ended: {running.last_words()}; see {running.log}")
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"the coordinator does not listen within {_COORDINATOR_S:g} s; see {running.log}")
        return self.coordinator

    def start_agents(self, setup: AgentSetup | None = None, *, join_s: float = 180.0) -> None:
        """Start an agent on each board and wait until all have joined.

        ``join_s`` is for all of them; a slow board takes a while to start Python.

        Raises:
            UsageError: no coordinator yet.
            DataError: rows that are not there.
            PeerLostError: an agent ended.
            DeadlineError: not all have joined in time.
        """
        if not self.coordinator:
            raise UsageError("agents join a coordinator; call start_coordinator() first")
        setup = setup or AgentSetup()
        self._check_rows(setup)
        for board in self.layout.boards:
            command = agents.agent_command(
                self.layout, board, setup, coordinator=self.coordinator, folder=self.folder, join_s=join_s
            )
            self._agents[board.name] = self._start(board.name, command, on=board.name, threads=setup.threads)
        deadline_s = time.monotonic() + join_s
        while missing := sorted(set(self._agents) - self._joined()):
            if ended := self.ended():
                raise PeerLostError("; ".join(ended))
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"{', '.join(missing)} did not join within {join_s:g} s; see {self.folder / 'logs'}, or allow more"
                )
            self._agents[missing[0]].wait(_ASK_S)

    def _check_rows(self, setup: AgentSetup) -> None:
        rows = {setup.data, setup.eval_data} | {
            path for board in self.layout.boards for path in (board.data, board.eval_data)
        }
        for path in rows - {None}:
            if path is not None and not path.exists():
                raise DataError(f"rows {path} are not there; correct the path")

    def _joined(self) -> set[str]:
        """The nodes that the coordinator knows."""
        command = processes.inside(self.folders(), self.namespace(), agents.nodes_command(self.coordinator))
        try:
            done = subprocess.run(  # noqa: S603 - our own command line
                command,
                capture_output=True,
                timeout=_ANSWER_S,
                check=False,
                env=agents.environment(),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return set()
        return {str(json.loads(line)["node"]) for line in done.stdout.splitlines() if done.returncode == 0}

    def ended(self) -> list[str]:
        """A line for each board whose agent has ended, with the likely cause."""
        codes = {name: running.process.poll() for name, running in self._agents.items()}
        return [self._cause(self.layout.board(name), code) for name, code in codes.items() if code is not None]

    def _cause(self, board: Board, code: int) -> str:
        running = self._agents[board.name]
        if self.times_out_of_memory(board.name):
            return f"board {board.name}: the kernel ended it at its limit of {format_bytes(board.memory_bytes)}"
        return f"board {board.name}: its agent ended with {code} ({running.last_words()[:300]}); see {running.log}"

    def process_id(self, on: str) -> int:
        """The process of a board's agent."""
        return self._agents[self.layout.board(on).name].process.pid

    def memory_use(self, on: str) -> GroupUse:
        """What a board is charged with now, besides what its processes have of their own."""
        return groups.memory_use(self._mounts, self.layout.name, f"board-{self.layout.board(on).name}")

    def lower_memory(self, on: str, limit_bytes: int) -> None:
        """Lower the memory limit of a board, whose agent continues; raises ``RingTuneError``."""
        folder = self._mounts.memory / self.layout.name / f"board-{self.layout.board(on).name}"
        groups.apply(groups.memory_settings(self._mounts, folder, limit_bytes))

    def restore_memory(self, on: str) -> None:
        """Give a board its memory limit again, after a lower one."""
        board = self.layout.board(on)
        folder = self._mounts.memory / self.layout.name / f"board-{board.name}"
        groups.apply(reversed(groups.memory_settings(self._mounts, folder, board.memory_bytes)))

    def set_cores(self, on: str, cores: float) -> None:
        """Give a board another quota of processor time, while its agent continues."""
        board = dataclasses.replace(self.layout.board(on), cpu_cores=cores)
        groups.apply(groups.quota_settings(self._mounts, self.layout, board))

    def times_out_of_memory(self, on: str) -> int:
        """How often the kernel killed a process of a board because of its memory limit."""
        return groups.times_out_of_memory(self._mounts, self.layout.name, f"board-{self.layout.board(on).name}")

    def run(self, command: Sequence[str], *, on: str = "", timeout_s: float = DAY_S) -> int:
        """Run the command under test, with this process's own input and output; raises ``DeadlineError``.

        ``{coordinator}`` in its words becomes the address, which is in ``RINGTUNE_COORDINATOR`` too. Ctrl-C is the
        command's; SIGTERM is passed on to it.

        ``on`` is the board; empty = the hub.

        Returns:
            Its exit code, as a shell gives it: 128 + N for signal N.
        """
        words = processes.inside(self.folders(on), self.namespace(on), agents.fill_in(command, self.coordinator))
        environment = agents.environment(coordinator=self.coordinator)
        with _signals_for_command() as started:
            process = subprocess.Popen(words, env=environment)  # noqa: S603 - it is what was asked for
            started.append(process)
            running = Running(command[0], process, Path("/dev/null"))
            try:
                code = running.wait(timeout_s)
            finally:
                if process.poll() is None:
                    processes.stop([running], term_s=_COMMAND_TERM_S)
        if code is None:
            raise DeadlineError(f"'{command[0]}' did not end within {timeout_s:g} s; allow more")
        return code if code >= 0 else 128 - code

    @property
    def address(self) -> str:
        """The hub's address."""
        return HUB_ADDRESS


@contextlib.contextmanager
def _signals_for_command() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Leave Ctrl-C to the command, which the terminal sends it to as well, and pass SIGTERM on.

    Gives the list in which to put its process.
    """
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        """Pass a signal on; unlike SIG_IGN this is not inherited."""
        for process in started if number != signal.SIGINT else ():
            process.send_signal(number)

    with _handlers(pass_on):
        yield started


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """A handler of SIGINT and SIGTERM for a while; only the main thread has any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
