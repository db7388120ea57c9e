"""The events of a run on their way to the screen."""

from __future__ import annotations

from collections.abc import Mapping
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
                show_step(self._progress, read_object(event.step_json, "a step"))
            case "note":
                self._progress.note(event.note)
            case "resumed_json":
                self._show_resumed(read_object(event.resumed_json, "where the run goes on"))
            case "done" if self._outcome.report:
                self._progress.report(self._outcome.report)

    def _show_resumed(self, resumed: dict[str, Any]) -> None:
        for reason in resumed["passed_over"]:
            self._progress.note(str(reason))
        self._progress.note(f"going on after step {int(resumed['step'])}")


def show_step(progress: Progress, step: Mapping[str, Any]) -> None:
    """Show an item that is done, an evaluation, or a decision of a run.

    Args:
        progress: where.
        step: its numbers, with its ``kind``; a step without is one that trains.
    """
    match step.get("kind"):
        case "evaluation":
            progress.evaluation(step)
        case "unfreeze":
            progress.unfreeze(step)
        case "operations":
            progress.operations(step)
        case _:
            progress.step(step)
