"""Time what surrounds every action of a run: its loop, its engine, and the report of its span.

A run's own loop and reporter carry out a few steps of a plan in which this node hosts everything, with an executor that
does nothing. What that takes is what any action takes besides its work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edge.run.loop import AgentRun
from edge.run.reporter import Entry, Failed, Reporter, TurnDone
from ringtune.errors import DeadlineError, error_from_name
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import Turn, turn_sequence
from ringtune.v1 import control_pb2

_FLUSH_S = 5.0


def handling_s(plan: Plan, node: str, clock: Callable[[], float]) -> float:
    """Seconds that an action takes besides its work, by ``clock``.

    Args:
        plan: in which ``node`` owns and hosts everything.
        node: this one.
        clock: of the measurement.

    Raises:
        DeadlineError: the reports were not made in time.
        RingTuneError: what ended the loop before its last turn.
    """
    turns = list(turn_sequence(plan.course))
    reporter = Reporter(
        run_id="measure",
        node=node,
        num_blocks=plan.course.num_blocks,
        send=control_pb2.ReportRequest.SerializeToString,
        on_refused=lambda reason: None,
    )
    reports = _Reports(reporter, turns[-1].index)
    try:
        run = AgentRun(
            plan=plan, node=node, executor=_Idle(), links={}, ack=lambda source, boundary: None, reports=reports
        )
        reports.stop = lambda: run.stop("measured")
        run.grant(turns)
        started_s = clock()
        run.loop()
        is_flushed = reporter.flush(_FLUSH_S)
        taken_s = clock() - started_s
    finally:
        reporter.close()
    if reports.failed is not None:
        raise error_from_name(reports.failed.error, reports.failed.message)
    if not is_flushed:
        raise DeadlineError(f"node {node}: waited {_FLUSH_S:g} s for the reports of idle steps; measure again")
    return taken_s / max(1, run.totals.actions)


class _Reports:
    """Passes entries on, and stops the run when its last turn is done or when it failed."""

    def __init__(self, reporter: Reporter, last_turn: int) -> None:
        self.stop: Callable[[], object] = lambda: None
        self.failed: Failed | None = None
        self._reporter, self._last_turn = reporter, last_turn

    def put(self, entry: Entry) -> None:
        self._reporter.put(entry)
        if isinstance(entry, Failed):
            self.failed = self.failed or entry
            self.stop()
        elif isinstance(entry, TurnDone) and entry.turn == self._last_turn:
            self.stop()


class _Idle:
    """An executor whose actions do nothing."""

    def grant(self, turn: Turn) -> None:
        """Ignore a turn."""

    def forget_turn(self, index: int) -> str:
        """Ignore the end of a turn."""
        return ""

    def run(self, action: Action) -> tuple[tuple[str, float], ...]:
        """Yield what a head yields, so that steps are reported."""
        return (("count", 1.0), ("loss_sum", 0.0)) if action.op is Op.HEAD else ()

    def copy_digest(self, start: int, stop: int) -> str:
        """Return no digest: nothing is computed here."""
        return ""

    def take_scores(self, turn: int) -> tuple[BlockScores, ...]:
        """Give nothing."""
        return ()

    def put_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> None:
        """Ignore a tensor."""

    def take_tensor(self, key: TensorKey) -> tuple[Any, Any]:
        """Give nothing."""
        return None, None

    def head_blob(self) -> Any:
        """Give nothing."""
        return b""

    def load_head_blob(self, data: Any) -> None:
        """Ignore a head."""

    def take_parcel(self, key: TensorKey) -> Any:
        """Give nothing."""
        return b""

    def put_parcel(self, key: TensorKey, data: Any) -> None:
        """Ignore a parcel."""

    def drop_head_state(self) -> None:
        """Hold no head."""

    def shard(self, metadata: Mapping[str, str], *, with_head: bool) -> Any:
        """Give nothing."""
        return b""
