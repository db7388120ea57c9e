"""What a node hands in: its part of the result, and at the end of a run its totals."""

from __future__ import annotations

import json
from typing import Final

from edge.agent.active_run import ActiveRun
from edge.run.loop import AgentRun
from ringtune.files.pieces import Pieces

_FLUSH_S: Final = 5.0


def collect(
    active: ActiveRun, run: AgentRun, *, with_head: bool, with_private: bool, goes_on: bool, timeout_s: float
) -> dict[str, Pieces]:
    """Collect the trained tensors, and at the end of a run this node's totals, as files by name.

    Nothing is copied: files are read from the tensors as they are sent, so nothing may train meanwhile.

    Args:
        active: the run.
        run: its loop.
        with_head: also the head.
        with_private: also the private blocks.
        goes_on: the run trains on afterwards.
        timeout_s: longest time to wait for the tensors, in seconds.

    Raises:
        DivergedError: a trained weight is not finite.
    """
    executor, reporter = active.executor, active.reporter
    active.is_collected = active.is_collected or not goes_on
    files: dict[str, Pieces] = dict(
        run.call(
            lambda: executor.adapter_files(with_head=with_head, with_private=with_private),
            timeout_s=timeout_s,
            what="the trained tensors",
        )
    )
    if goes_on:
        return files
    files["totals.json"] = Pieces.of(json.dumps(active.figures()).encode())
    if reporter is not None:
        reporter.flush(min(_FLUSH_S, timeout_s))  # so that the trace is complete when the run ends
    return files
