"""Ask a node about itself: what it has, and what its work takes, timed as the run will do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.drive.agent_calls import AgentCalls, ask_frozen
from coordinator.drive.answers import Facts
from ringtune.jobs.job import Job
from ringtune.schedule.frozen_weights import FrozenWeights
from ringtune.v1 import control_pb2

MEASURE_S: Final = 1.0
"""A run measures briefly as it starts; 'ringtune measure' takes longer, and nodes remember the better one."""


def ask_about_itself(
    calls: AgentCalls,
    job: Job,
    *,
    measure: bool,
    neighbours: int,
    frozen: FrozenWeights | None,
    put: Callable[[Facts], None],
    extend: Callable[[control_pb2.InspectRequest], None] = lambda request: None,
) -> None:
    """Ask a node for its facts; the answer takes ``runtime.wait_s`` at most.

    Args:
        calls: to the node.
        job: of the run.
        measure: whether it shall time its work.
        neighbours: other nodes of its machine, which are timed at the same moment, as they will compute.
        frozen: how it shall hold frozen weights while it is timed; None = as it computes.
        put: takes the answer, from any thread.
        extend: adds which shards are asked about.
    """

    def more(request: control_pb2.InspectRequest) -> None:
        request.measure_s, request.neighbours = MEASURE_S, neighbours
        ask_frozen(request, frozen)
        extend(request)

    calls.inspect(
        job.to_toml(),
        measure=measure,
        timeout_s=job.runtime.wait_s,
        on_result=lambda reply: put(Facts.of(calls.node, reply)),
        extend=more,
    )
