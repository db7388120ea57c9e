"""Keep account of what operations left to be done in a run, and of what they saved.

Only train steps save; what gathering scores took is counted beside it. What steps would have taken with everything full
is not measured but reckoned: seconds by the times that the run itself recorded, bytes by the mean lengths of the
owners' rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ringtune.costs.profile import Profile
from ringtune.costs.times.operation_shares import Done, all_full, done_of, total
from ringtune.costs.times.seconds import CourseCosts
from ringtune.engine.spans import Span
from ringtune.errors import PlanError
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import Item, StepKind, Turn, items

_BLOCK_OPS = (Op.FORWARD, Op.FORWARD_FREE, Op.BACKWARD)
_BETWEEN_BLOCKS = (Payload.HIDDEN, Payload.GRAD)


class OperationsLedger:
    """The account of one run's operations; it stays empty where everything is full.

    Args:
        plan: of the run.
        profile: what the run was planned with, which predicts.
    """

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan = plan
        self._is_kept = plan.course.may_skip
        self._costs = _costs(plan, profile) if self._is_kept else None
        self._busy_s: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._bytes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._done = {node: Done() for node in plan.nodes}
        self._steps: dict[tuple[Plan, str, int], int] = defaultdict(int)
        self._items: dict[tuple[Plan, str, int], Item] = {}
        self._total_busy_s: dict[str, float] = defaultdict(float)
        self._total_bytes: dict[str, int] = defaultdict(int)
        self._scored = 0
        self._score_busy_s = 0.0
        self._score_bytes = 0

    def joined(self, node: str) -> None:
        """Count what one more node does."""
        self._done.setdefault(node, Done())

    # ---- what nodes report ------------------------------------------------------------------------

    def add_spans(self, node: str, spans: Iterable[Span]) -> None:
        """Count the seconds of forwards and backwards of blocks."""
        if self._is_kept:
            for span in spans:
                if span.action.op in _BLOCK_OPS:
                    self._busy_s[span.action.seq][node] += max(0.0, span.end_s - span.start_s)

    def add_traffic(self, node: str, seq: int, payload: str, sent_bytes: int) -> None:
        """Count the bytes of hidden states and gradients."""
        if self._is_kept and payload in _BETWEEN_BLOCKS:
            self._bytes[seq][node] += sent_bytes

    def turn_done(self, turn: Turn) -> None:
        """Close a turn that every node has done; what neither trains nor scores is forgotten."""
        if not self._is_kept:
            return
        plan = self._plan.decided(turn.unfreeze_at, turn.operations)
        for seq in range(turn.first_seq, turn.end_seq):
            busy_s, sent = self._busy_s.pop(seq, {}), self._bytes.pop(seq, {})
            if turn.kind is StepKind.TRAIN:
                _add(self._total_busy_s, busy_s)
                _add(self._total_bytes, sent)
            elif turn.kind is StepKind.SCORE:
                self._score_busy_s += sum(busy_s.values())
                self._score_bytes += sum(sent.values())
        if turn.kind is StepKind.SCORE:
            self._scored += turn.num_items
        if turn.kind is StepKind.TRAIN:
            for item in items(plan.course, turn):
                _add_done(self._done, done_of(plan, item, self._costs), 1)
                alike = (all_full(plan.plain), item.owner, _depth(plan, item))
                self._steps[alike] += 1
                self._items[alike] = item

    # ---- the end ----------------------------------------------------------------------------------

    def report(self, recorded: Profile) -> dict[str, Any] | None:
        """Write what was done and saved; None where everything was full, or nothing was trained.

        Args:
            recorded: the times that the run recorded, which measure.
        """
        if not self._steps:
            return None
        done = self._done
        full, full_recorded = (self._all_full(costs) for costs in (self._costs, _costs(self._plan, recorded)))
        all_done, everything, measured = total(done.values()), total(full.values()), total(full_recorded.values())
        busy_s, sent = sum(self._total_busy_s.values()), sum(self._total_bytes.values())
        all_full_s = measured.work_s if _was_full_where_it_counts(done, full) else None
        return {
            "steps": sum(self._steps.values()),
            "nodes": {node: each.shares() for node, each in done.items()},
            "compute": {
                "busy_s": busy_s,
                "all_full_s": all_full_s,
                "measured": _share(busy_s, all_full_s or 0.0),
                "predicted": _share(all_done.work_s, everything.work_s),
                "paper": _share(all_done.paper_compute, everything.paper_compute),
            },
            "bytes": {
                "sent_bytes": sent,
                "all_full_bytes": measured.sent_bytes,
                "measured": _share(sent, measured.sent_bytes),
                "predicted": _share(all_done.sent_bytes, everything.sent_bytes),
                "paper": _share(all_done.paper_sent, everything.paper_sent),
            },
            "scores": {"batches": self._scored, "busy_s": self._score_busy_s, "sent_bytes": self._score_bytes},
        }

    def _all_full(self, costs: CourseCosts | None) -> dict[str, Done]:
        """What each node would have done with everything full, where items of an owner are alike at each depth."""
        sums = {node: Done() for node in self._plan.nodes}
        for alike, times in self._steps.items():
            _add_done(sums, done_of(alike[0], self._items[alike], costs), times)
        return sums


def _was_full_where_it_counts(done: Mapping[str, Done], full: Mapping[str, Done]) -> bool:
    """Whether each node that trains blocks has done anything full: else nothing says how long that takes there."""
    return all(done[node].full > 0 for node, each in full.items() if each.full > 0)


def _add_done(sums: dict[str, Done], more: Mapping[str, Done], times: float) -> None:
    for node, each in more.items():
        sums[node] += each.times(times)


def _add(sums: dict[str, Any], more: Mapping[str, float]) -> None:
    for node, value in more.items():
        sums[node] += value


def _depth(plan: Plan, item: Item) -> int:
    return plan.course.method.trained(plan.course, item.step).lowest


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _costs(plan: Plan, profile: Profile) -> CourseCosts | None:
    try:
        return CourseCosts.of(plan, profile)
    except PlanError:  # an old plan on nodes that nobody measured
        return None
