"""What processes on boards say in lines of JSON, and when; and a run among them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.run.run_text import is_step
from deploy.testbed.processes import Running

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
