"""The events of a run on their way to the screen."""

from __future__ import annotations

from typing import Any

from coordinator.screen.progress import Progress
from coordinator.submit.outcome import Outcome
from ringtune.files.strict import read_object
from ringtune.v1 import control_pb2


class ShownEvents:
    """Shows what events tell.

    Args:
        progress: where.
        outcome: heard the same event before.
    """

    def __init__(self, progress: Progress, outcome: Outcome) -> None:
        self._progress, self._outcome = progress, outcome

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Show one event.

        Raises:
            IntegrityError: the event is not readable.
        """
        match event.WhichOneof("event"):
            case "state":
                self._progress.state(event.state)
            case "plan_json" if self._outcome.plan is not None:
                self._progress.plan(self._outcome.plan, self._outcome.memory)
            case "step_json":
                self._show_step(read_object(event.step_json, "a step"))
            case "note":
                self._progress.note(event.note)
            case "resumed_json":
                self._show_resumed(read_object(event.resumed_json, "where the run goes on"))
            case "done" if self._outcome.report:
                self._progress.report(self._outcome.report)

    def _show_step(self, step: dict[str, Any]) -> None:
        match step.get("kind"):
            case "evaluation":
                self._progress.evaluation(step)
            case "unfreeze":
                self._progress.unfreeze(step)
            case "operations":
                self._progress.operations(step)
            case _:
                self._progress.step(step)

    def _show_resumed(self, resumed: dict[str, Any]) -> None:
        for reason in resumed["passed_over"]:
            self._progress.note(str(reason))
        self._progress.note(f"going on after step {int(resumed['step'])}")
