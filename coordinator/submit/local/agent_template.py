"""The launcher's end of a template, the process that loads the libraries once and is forked for each agent.

The template is ``python -m edge.template``, which describes the messages; agents are never imported here. A
forked agent is a child of the template, so its signals and its exit code go through the template. Its standard input
is a pipe that this process holds: when this process ends, the agent ends too.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ringtune.errors import DeadlineError, RingTuneError, UsageError
from ringtune.files.durable import storage_errors
from ringtune.machine.exit_errors import exit_error

LOAD_S: Final = 120.0
"""Most seconds that the libraries may take to load: a few on a laptop, half a minute on a small board."""

COMMAND: Final = (sys.executable, "-P", "-m", "edge.template", "_" * 100)
"""The command that starts a template; its last word is room where each agent writes its own command line."""

_WHO: Final = "the template of the local nodes"
_FORK_S: Final = 10.0
_END_S: Final = 5.0
_MAX_BYTES: Final = 1 << 16


class ForkedAgent:
    """An agent that was forked from a template.

    Args:
        template: it.
        number: by which the template knows the agent.
        pid: the agent's process id.
        standard_input: the end of the agent's input at which one writes.
    """

    def __init__(self, template: AgentTemplate, number: int, pid: int, standard_input: int) -> None:
        self.pid = pid
        self._template = template
        self._number = number
        self._input = standard_input

    def poll(self) -> int | None:
        """Exit code of the agent, negative for a signal; None while it runs."""
        return self._template.code_of(self._number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the agent's exit code; None if it still runs after ``timeout_s`` seconds."""
        self._template.wait_for(lambda: self.poll() is not None, timeout_s)
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent; nothing happens if it has ended."""
        self._template.send_signal(self._number, number)

    def close_input(self) -> None:
        """Close the agent's standard input, which tells it that its launcher has ended; a second call does nothing."""
        if self._input >= 0:
            os.close(self._input)
            self._input = -1


class AgentTemplate:
    """Runs a template while in its context.

    Args:
        log: gets what the template prints.
        environment: variables of the template and its agents.
        command: starts the template.
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
        """Start the template; it loads the libraries while this process goes on.

        Raises:
            UsageError: this system can't end the agents with their launcher.
            StorageError: the log can't be written.
        """
        if sys.platform != "linux":
            raise UsageError(
                "nodes on this machine (--local) need Linux; start 'ringtune coordinator' and 'ringtune node' by hand, "
                "and give --coordinator HOST:PORT"
            )
        with contextlib.ExitStack() as undo, storage_errors(self._log), self._log.open("wb") as log:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        output = self._log.read_text(encoding="utf-8", errors="replace")
        return exit_error(_WHO, self._process.wait(_END_S), output, log=self._log)

    def start(
        self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> ForkedAgent:
        """Wait until the libraries are loaded, then fork an agent.

        Args:
            arguments: of ``ringtune node``.
            log: gets what the agent prints, behind what is there.
            environment: variables that differ from the template's.

        Raises:
            RingTuneError: the template has ended, or does not answer in time.
            StorageError: the log can't be written.
        """
        self._await(lambda: self._is_ready, LOAD_S, "to load the libraries")
        with self._changed:
            number = self._count = self._count + 1
        request = {"agent": number, "arguments": list(arguments), "environment": dict(environment or {})}
        with storage_errors(log), log.open("ab") as file:
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
        """Wait until messages of the template make ``predicate`` true; False if it is not in ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(predicate, timeout_s)

    def code_of(self, number: int) -> int | None:
        """Exit code of an agent, None while it runs; -9 after the template's end, because the kernel then kills it."""
        with self._changed:
            return self._codes.get(number, -signal.SIGKILL if self._is_over else None)

    def send_signal(self, number: int, signal_number: signal.Signals) -> None:
        """Send a signal to an agent; nothing happens if it has ended."""
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
        """Receive the next message of the template; empty when the template has ended."""
        try:
            return self._control.recv(_MAX_BYTES)
        except OSError:
            return b""
