"""The template of a machine's agents: a process that loads the libraries once, and forks the agents.

Agents that load torch and the model libraries each for itself need the processor seconds and the memory that often. A
forked agent has them from its first moment, and shares the memory until it writes there::

    launcher -> template   {"agent": 1, "arguments": [...], "environment": {...}}   fork; the agent's 0, 1, 2 beside it
                           {"agent": 1, "signal": 15}                               send a signal
    template -> launcher   {"ready": true}                                          the libraries are loaded
                           {"agent": 1, "pid": 71}                                  forked
                           {"agent": 1, "code": -9}                                 ended; negative for a signal

Each message is one packet on the socket that the template has as its standard input; the launcher writes them in
``coordinator.client.local_nodes``. An agent gets what a process of its own would get: session, descriptors,
variables, random numbers, exit code. When the socket ends, the launcher has ended: the agents end by themselves, and
those that do not are killed. When the template ends, however it does, the kernel kills its agents (Linux only).

Only the thread that calls ``fork`` lives on in the child, and a lock that another one held stays locked for ever. Nor
does an accelerator work in a child whose parent has used it. So the template has one thread and no channel, and looks
before each fork: where a package has started threads or touched the device when it was imported, the agent is started
as ``python -m edge.template agent PARENT ...``, which loads the libraries for itself, and the template's log says so.

Source: PyTorch, multiprocessing notes ("the CUDA runtime does not support the fork start method").
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from edge.machine.libraries import limit_libraries, load_libraries, require_libraries
from ringtune.machine.process import die_with_parent, exit_code_of
from ringtune.machine.resources import usable_cores

END_S: Final = 10.0
"""Seconds that agents may take to end by themselves after their launcher has ended."""

LOADED = ["edge.cli.node", "edge.agent.process", "edge.agent.torch_backend", "grpc._server", "numpy.random"]
"""Modules that each agent loads besides the libraries of a run."""

AGENT: Final = "agent"
"""First argument of a process that is an agent from the start."""

_MAX_BYTES: Final = 1 << 20
_NUM_DESCRIPTORS: Final = 3


def main() -> int:
    """Serve the launcher at the standard input, or be an agent that could not be forked; return the exit code."""
    if sys.argv[1:2] == [AGENT]:
        return _be_agent(sys.argv[3:], {}, int(sys.argv[2]))
    control = _take_standard_input()
    set_command_line([sys.executable, "-m", "edge.template"])

    def serve() -> None:
        require_libraries()
        load_everything()
        Template(control).serve()

    return exit_code_of(serve)


def load_everything() -> None:
    """Import the modules that every agent needs, and keep the garbage collector off their objects."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it starts its threads when it is loaded; agents compute with torch
    limit_libraries(usable_cores())
    gc.disable()
    load_libraries()
    for module in LOADED:
        importlib.import_module(module)
    from edge.cli.node import app

    # the first command line that typer reads makes it load more: a tenth of a second for each agent
    typer.main.get_command(app).make_context("node", [], resilient_parsing=True)
    gc.freeze()


class Template:
    """Forks agents for one launcher and tells it of their ends.

    Args:
        control: connected to the launcher; keeps the limits of packets.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._agents: dict[int, int] = {}
        self._has_said = False
        self._ended, self._wake = os.pipe()

    def serve(self) -> None:
        """Carry out the launcher's requests until the launcher ends; then wait for the agents."""
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._control.settimeout(END_S)
        self._tell({"ready": True})
        while True:
            readable = self._wait(self._control, self._ended)
            self._reap()
            if self._control in readable and not self._take_request():
                break
        deadline_s = time.monotonic() + END_S
        while self._agents and time.monotonic() < deadline_s:  # the kernel kills those that stay
            self._wait(self._ended, timeout_s=deadline_s - time.monotonic())
            self._reap()

    def _wait(self, *sources: socket.socket | int, timeout_s: float | None = None) -> list[socket.socket | int]:
        """Wait until a source has something to read, and list such sources; no deadline while there is a launcher."""
        readable, _, _ = select.select(sources, [], [], timeout_s)
        if self._ended in readable:
            os.read(self._ended, _MAX_BYTES)
        return readable

    def _reap(self) -> None:
        for number, pid in tuple(self._agents.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._agents[number]
                self._tell({"agent": number, "code": os.waitstatus_to_exitcode(status)})

    # ---- requests ---------------------------------------------------------------------------------

    def _take_request(self) -> bool:
        """Carry out one request; False when the launcher has ended."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, _MAX_BYTES, _NUM_DESCRIPTORS)
        except ConnectionError:
            return False
        if not packet:
            return False
        request = json.loads(packet)
        number = request["agent"]
        if "signal" not in request:
            self._start(number, request, descriptors)
        elif number in self._agents:  # not yet waited for, so the process id is still its own
            os.kill(self._agents[number], request["signal"])
        return True

    def _start(self, number: int, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        reason = no_fork_reason()
        if reason and not self._has_said:
            self._has_said = True
            sys.stderr.write(f"{reason}: nodes load the libraries each for itself\n")
            sys.stderr.flush()
        start = self._spawn if reason else self._fork
        try:
            pid = start(request["arguments"], request["environment"], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._agents[number] = pid
        self._tell({"agent": number, "pid": pid})

    def _tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher has ended, which the next request tells
            self._control.send(json.dumps(message).encode())

    def _fork(self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._let_go(descriptors)
                code = _be_agent(arguments, environment, self._pid)
            finally:
                _end(code)
        return pid

    def _spawn(self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Start an agent as a process that shares nothing with the template but the descriptors."""
        moves = [(os.POSIX_SPAWN_DUP2, descriptor, number) for number, descriptor in enumerate(descriptors)]
        ends = [(os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in descriptors]
        command = [sys.executable, "-P", "-m", "edge.template", AGENT, str(self._pid), *arguments]
        return os.posix_spawn(
            sys.executable, command, {**os.environ, **environment}, file_actions=[*moves, *ends], setsid=True
        )

    def _let_go(self, descriptors: Sequence[int]) -> None:
        """Take the agent's descriptors and drop the template's, in the forked child."""
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._control.detach(), self._ended, self._wake):
            os.close(descriptor)


def no_fork_reason() -> str:
    """Why no agent can be forked from this process as it is now; empty if one can."""
    if (threads := count_threads()) != 1:
        return f"a package that was imported has started threads, {threads} run where a fork may have 1"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a package that was imported has used the accelerator, which no forked process can use then"
    return ""


# ---- in the child --------------------------------------------------------------------------------


def _be_agent(arguments: Sequence[str], environment: Mapping[str, str], parent: int) -> int:
    """Run an agent in the child as ``python -m edge`` would; return its exit code."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    if not die_with_parent(parent):
        return 0
    os.environ.update(environment)
    set_command_line([sys.executable, "-m", "edge", *arguments])
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # agents draw differently; Python seeds ``random`` itself, and torch's seed is fixed
    gc.enable()
    sys.argv[1:] = arguments
    from edge.cli.node import main as be_agent

    return be_agent()


def _end(code: int) -> None:
    from edge.cli.node import end

    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    end(code)


def _take_standard_input() -> socket.socket:
    """Take the socket that this process was started with out of descriptor 0, which is empty then."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    return control


_ARG_START, _ARG_END = 45, 46  # of the fields of /proc/PID/stat behind the name, counted from 0


def count_threads() -> int:
    """Number of threads of this process, those of libraries included."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return threading.active_count()


def set_command_line(words: Sequence[str]) -> None:
    """Show these words as the command line of this process, as many as there is room for; nothing happens but on Linux.

    The room is what the process was started with; the kernel reads the command line from there.

    Source: Linux, proc(5), ``/proc/PID/stat`` fields 48 and 49.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, room = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
    except (OSError, ValueError, IndexError):
        return
    if start > 0 and room > 1:
        text = b"\0".join(os.fsencode(word) for word in words)[: room - 1]
        ctypes.memmove(start, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # as in ``edge.cli.node.end``
