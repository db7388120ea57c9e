"""Say what happens at a coordinator, one line each: who comes and goes, and which runs begin and end."""

from __future__ import annotations

import json
from collections.abc import Callable

from coordinator.members.registry import Member
from ringtune.errors import InterruptedRunError
from ringtune.quantities import format_bytes, format_seconds
from ringtune.v1 import control_pb2


def joined_line(member: Member) -> str:
    """Describe a node that has joined.

    Example: ``node pi joined from 10.0.0.7:4000: 4 threads, 3,788 MiB, cpu, owns rows``.
    """
    owns = ", owns rows" if member.has_data else ""
    guest = ", a guest" if member.is_guest else ""
    return (
        f"node {member.node} joined from {member.address}: {member.threads} threads, "
        f"{format_bytes(member.memory_bytes)}, {member.device}{owns}{guest}"
    )


def lost_line(member: Member, silent_s: float) -> str:
    """Describe a node of which nothing was heard for a whole lease."""
    return f"node {member.node} is lost: last heard of {format_seconds(silent_s)} ago"


class SpokenRun:
    """Says when a run begins and how it ends, from its events.

    Args:
        what: kind of work: run, measurement, plan, evaluation.
        who: submitted it; empty = it did not say.
        model: that it is about.
        say: takes a line.
        clock: monotonic seconds.
    """

    def __init__(
        self, what: str, *, who: str, model: str, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._what, self._who, self._model = what, who, model
        self._say, self._clock = say, clock
        self._name = what
        self._started_s = clock()
        self._steps = 0

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Say a line if the event begins or ends the run."""
        match event.WhichOneof("event"):
            case "run_id":
                self._name = f"{self._what} {event.run_id}"
                by = f" by {self._who}" if self._who else ""
                self._say(f"{self._name} of {self._model} started{by}")
            case "step_json":
                step = json.loads(event.step_json)
                self._steps += step["kind"] == "train"
            case "done":
                self._say(f"{self._name} done: {self._so_far()}")
            case "failure":
                stopped = event.failure.error == InterruptedRunError.__name__
                self._say(f"{self._name} {'' if stopped else 'failed: '}{event.failure.message}; {self._so_far()}")

    def _so_far(self) -> str:
        steps = f"{self._steps} steps, whole run " if self._what == "run" else ""
        return f"{steps}{format_seconds(self._clock() - self._started_s)}"
