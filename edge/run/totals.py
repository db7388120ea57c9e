"""The figures of one run at one node."""

from __future__ import annotations

import time
from typing import Any


class Totals:
    """Counts of one run at one node: actions, busy seconds, processor seconds and bytes sent to each peer.

    They go on when the run moves to another placement, as the numbers of its reports do.
    """

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self.num_reports = 0
        self.actions = 0
        self.busy_s = 0.0
        self.started_s = time.monotonic()
        self.cpu_start_s = time.process_time()
        self.sent_bytes: dict[str, int] = {}

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``totals.json``; keys end in ``_s`` for seconds, ``_bytes`` for bytes."""
        return {
            "actions": self.actions,
            "busy_s": self.busy_s,
            "wall_s": time.monotonic() - self.started_s,
            "cpu_s": time.process_time() - self.cpu_start_s,
            "sent_bytes": dict(sorted(self.sent_bytes.items())),
        }
