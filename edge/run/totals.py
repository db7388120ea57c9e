"""The figures of one run at one node."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from ringtune.machine.cores import machine_load


class ReportNumbers:
    """Gives each report of a run at one node a number of its own, from 1: the coordinator takes each number once.

    The reporter of a placement may still be sending when that of the next one begins.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def draw(self) -> int:
        """Return the next number."""
        with self._lock:
            self._last += 1
            return self._last


class Totals:
    """Counts of one run at one node: actions, busy seconds, processor seconds and bytes sent to each peer.

    They go on when the run moves to another placement, as the numbers of its reports do.
    """

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self.report_numbers = ReportNumbers()
        self.actions = 0
        self.busy_s = 0.0
        self.started_s = time.monotonic()
        self.cpu_start_s = time.process_time()
        self.sent_bytes: dict[str, int] = {}

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``totals.json``; keys end in ``_s`` for seconds, ``_bytes`` for bytes.

        ``load`` is that of the machine, for each of its ``cores``.
        """
        return {
            "actions": self.actions,
            "busy_s": self.busy_s,
            "wall_s": time.monotonic() - self.started_s,
            "cpu_s": time.process_time() - self.cpu_start_s,
            "sent_bytes": dict(sorted(self.sent_bytes.items())),
            "load": machine_load(),
            "cores": os.cpu_count() or 1,
        }
