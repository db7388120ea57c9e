"""Keep what a node has trained, while its run moves: for the node itself, and for those that host its blocks next.

A snapshot is there from the node's rest until the first turn after the move, or until the run is over.
"""

from __future__ import annotations

import threading
from typing import Final

from edge.agent.snapshots import SnapshotLike
from ringtune.errors import FrameError


class SnapshotShelf:
    """Keeps the snapshot of a node for itself and others; safe for threads.

    Args:
        node: whose.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._of: tuple[str, int] = ("", -1)
        self._snapshot: SnapshotLike | None = None

    def put(self, run_id: str, placement_number: int, snapshot: SnapshotLike | None) -> None:
        """Keep a snapshot in place of the one before; None = keep none."""
        with self._lock:
            self._of, self._snapshot = (run_id, placement_number), snapshot

    def drop(self, run_id: str = "") -> None:
        """Let the snapshot of a run go; empty = of any run."""
        with self._lock:
            if run_id in ("", self._of[0]):
                self._of, self._snapshot = ("", -1), None

    def drop_others(self, run_id: str) -> None:
        """Let the snapshot of any other run go."""
        with self._lock:
            if run_id != self._of[0]:
                self._of, self._snapshot = ("", -1), None

    def get(self, run_id: str, placement_number: int) -> SnapshotLike:
        """Return the snapshot of a run in a placement.

        Raises:
            FrameError: there is none.
        """
        with self._lock:
            if self._snapshot is None or self._of != (run_id, placement_number):
                raise FrameError(f"node {self._node} keeps no snapshot of run {run_id} in placement {placement_number}")
            return self._snapshot


HEAD_FILE: Final = "head.safetensors"


def part_name(start: int, stop: int) -> str:
    """Name the file of some blocks on the wire."""
    return f"blocks-{start}-{stop}.safetensors"
