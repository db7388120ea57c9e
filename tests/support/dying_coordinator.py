"""A coordinator as a process that is killed at a failpoint and started again at its address, with its state."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import leaks
from tests.support.cluster import free_port
from tests.support.failpoints import VARIABLE, Order
from tests.support.processes import RUN_S, start_ringtune

NAME = "coordinator"


class DyingCoordinator:
    """Starts a coordinator again whenever it is killed, until it is closed.

    Args:
        folder: for its state and the orders to fail.
        lease_s: of its nodes.
        more: further arguments.
        on_back: called each time that it listens again, on another thread.

    Attributes:
        address: where it listens.
        num_deaths: how often it was killed.
        num_returns: how often it listened again.
        on_death: called before it is started again, on another thread.
        orders: folder of the orders to fail, also for its nodes.
    """

    def __init__(
        self, folder: Path, *, lease_s: float, more: tuple[str, ...] = (), on_back: Callable[[], object] = lambda: None
    ) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.num_deaths = 0
        self.num_returns = 0
        self.on_death: Callable[[], object] = lambda: None
        self.orders = folder / "failpoints"
        self.orders.mkdir()
        self._arguments = ("--bind", self.address, "--state", folder / "state", "--lease", lease_s, "--json", *more)
        self._on_back = on_back
        self._lines: list[str] = []
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
            for line in process.stdout:
                self._lines.append(line)

    def _start_again(self) -> None:
        while self._process.wait() == -signal.SIGKILL and not self._closing.is_set():
            leaks.KEPT.discard(self._process.pid)
            self.num_deaths += 1
            self._reader.join(RUN_S)
            self.on_death()
            self._process = self._start()
            self.num_returns += 1
            self._on_back()

    @property
    def notes(self) -> list[str]:
        """What it said so far, without how it listens."""
        return [found["text"] for found in map(json.loads, list(self._lines)) if found["event"] == "note"]

    def order(self, text: str) -> None:
        """Let it fail once."""
        partial = self.orders / f".{NAME}"
        partial.write_text(str(Order.parse(text)))
        partial.replace(self.orders / NAME)

    def kill(self) -> None:
        """Kill it now; it comes back."""
        self._process.send_signal(signal.SIGKILL)

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


@contextmanager
def dying_coordinator(
    folder: Path, *, lease_s: float, more: tuple[str, ...] = (), on_back: Callable[[], object] = lambda: None
) -> Iterator[DyingCoordinator]:
    """A coordinator that comes back until the context ends."""
    made = DyingCoordinator(folder, lease_s=lease_s, more=more, on_back=on_back)
    try:
        yield made
    finally:
        made.close()
