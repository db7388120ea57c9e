"""Count the steps of a rehearsal and say when they are enough."""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.records.step_lines import STEP_KIND
from ringtune.costs.measured.rehearsal import REHEARSAL_S
from ringtune.files.strict import read_object
from ringtune.v1 import control_pb2


class Rehearsing:
    """An event sink that ends a rehearsal after so many steps, or after ``REHEARSAL_S`` seconds of training.

    Args:
        num_steps: how many are enough.
        end: ends the run of this id.
        clock: seconds; for tests.

    Attributes:
        is_enough: whether the end was asked for.
    """

    def __init__(
        self, num_steps: int, end: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_enough = False
        self._left = num_steps
        self._end = end
        self._clock = clock
        self._run_id = ""
        self._until_s = float("inf")

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Take one event."""
        match event.WhichOneof("event"):
            case "run_id":
                self._run_id = event.run_id
            case "state" if event.state == "training":
                self._until_s = self._clock() + REHEARSAL_S
            case "step_json":
                self._left -= read_object(event.step_json, "a step").get("kind") == STEP_KIND
        if not self.is_enough and (self._left <= 0 or self._clock() > self._until_s):
            self.is_enough = True
            self._end(self._run_id)
