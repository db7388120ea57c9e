"""Keep the present state of a run, taken from the events that its submitter gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.records.step_lines import LastStep
from ringtune.files.strict import read_object
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2

_FIGURES = ("round", "initiator", "depth", "trains", "loss")


class StatusBoard:
    """The present phase, helpers, step and figures of a run; written by the run's thread, read by any.

    Args:
        run_id: of the run.
        clock: monotonic seconds.
    """

    def __init__(self, run_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s = self._phase_since_s = clock()
        self._ended_s: float | None = None
        self._awaited_until_s = 0.0
        self._last = LastStep()
        self._now = control_pb2.RunStatus(run_id=run_id, phase="joining")

    def awaits(self, nodes: Sequence[str], why: str, until_s: float) -> None:
        """Note for whom the run waits, why, and until when on the board's clock; another phase ends that."""
        with self._lock:
            self._now.awaited[:] = nodes
            self._now.awaited_why, self._awaited_until_s = why, until_s

    def take(self, event: control_pb2.RunEvent) -> None:
        """Note the phase, plan, steps, figures or failure that an event tells of."""
        with self._lock:
            match event.WhichOneof("event"):
                case "state":
                    self._enter(event.state)
                case "plan_json":
                    self._take_plan(Plan.from_json(read_object(event.plan_json, "the plan")))
                case "step_json":
                    self._take_step(read_object(event.step_json, "a step"))
                case "failure":
                    self._now.message = event.failure.message
                    self._end("failed")
                case "done":
                    self._end("done")

    def _enter(self, phase: str) -> None:
        self._now.phase = phase
        for field in ("awaited", "awaited_why"):
            self._now.ClearField(field)
        self._phase_since_s = self._clock()

    def _take_plan(self, plan: Plan) -> None:
        self._now.num_steps = plan.course.num_steps
        self._now.ClearField("helpers")
        for one in plan.placement.joined_helpers():
            host = plan.placement.host_of(one.start)
            self._now.helpers.add(node=one.node, host=host, start=one.start, stop=one.stop)

    def _end(self, phase: str) -> None:
        self._enter(phase)
        self._now.is_over = True
        self._ended_s = self._phase_since_s

    def _take_step(self, step: dict[str, Any]) -> None:
        if not self._last.take(step):
            return
        self._now.steps_done = step["step"]
        for name in _FIGURES:
            if step.get(name) is None:
                self._now.ClearField(name)
            else:
                setattr(self._now, name, step[name])

    def read(self) -> control_pb2.RunStatus:
        """Return a copy of the run's state, with the seconds of the phase and of the run until now."""
        with self._lock:
            status = control_pb2.RunStatus()
            status.CopyFrom(self._now)
            now_s = self._clock()
            status.phase_s = now_s - self._phase_since_s
            status.awaited_s = max(0.0, self._awaited_until_s - now_s) if status.awaited_why else 0.0
            status.run_s = (now_s if self._ended_s is None else self._ended_s) - self._started_s
            return status
