"""How long the pieces of a step take on one node: measured points, and times between them.

The planner adds these times up, the simulator replays them. A *work* is what one timing covers; the time of an action
is put together from works in ``ringtune.costs.times.seconds``. Times grow with the size of the micro-batch, counted
in padded tokens (rows x tokens); between two measured sizes the time is taken as linear. So is the time of a block
with a share of its subnets active, between a measured part of them and the whole; norms, adapters and masks take
theirs whatever the share.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ringtune.errors import InvalidInputError, PlanError


class Work(enum.StrEnum):
    """What one timing covers; of one micro-batch unless said otherwise."""

    EMBED = "embed"  # token ids to hidden state
    FORWARD = "forward"  # one block without graph
    GRAPH = "graph"  # one block with graph, with trainable blocks below it
    GRAPH_LOWEST = "graph_lowest"  # the lowest trainable block: its graph begins at its adapter
    BACKWARD = "backward"  # of a block with trainable blocks below it
    BACKWARD_LOWEST = "backward_lowest"  # of the lowest trainable block: no gradient for its input
    HEAD = "head"  # head, loss and the head's backward
    HEAD_FREE = "head_free"  # head and loss in an evaluation
    UPDATE = "update"  # optimizer step of one block, once a step
    UPDATE_HEAD = "update_head"  # optimizer step of the head, once a step
    ENCODE = "encode"  # a hidden state to the bytes of the wire
    DECODE = "decode"  # and back
    HAND_OVER = "hand_over"  # head and moments to bytes and back, once a turn
    SAVE = "save"  # a shard to the disk, once a checkpoint
    FIT = "fit"  # at a helper: the gradients of one block's adapters from its pairs
    FORWARD_PART = "forward_part"  # as FORWARD, with the share of the block's subnets that the point says
    GRAPH_PART = "graph_part"  # so of the others
    GRAPH_LOWEST_PART = "graph_lowest_part"
    BACKWARD_PART = "backward_part"
    BACKWARD_LOWEST_PART = "backward_lowest_part"


PART_OF: Final = {
    Work.FORWARD: Work.FORWARD_PART,
    Work.GRAPH: Work.GRAPH_PART,
    Work.GRAPH_LOWEST: Work.GRAPH_LOWEST_PART,
    Work.BACKWARD: Work.BACKWARD_PART,
    Work.BACKWARD_LOWEST: Work.BACKWARD_LOWEST_PART,
}
"""The work of a whole block, and the same with a part of its subnets."""

WHOLE_WORKS: Final = tuple(work for work in Work if work not in {*PART_OF.values(), Work.FIT})
"""All works but those of a part of a block, and that of helpers, which has an estimate where it was not measured."""

BLOCK_WORKS: Final = (Work.FORWARD, Work.GRAPH, Work.GRAPH_LOWEST, Work.BACKWARD)
"""Works whose times, where a run recorded them, have in them what messages took of the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkTime:
    """The measured time of one work at one size.

    Attributes:
        work: a value of ``Work``.
        rows: of the micro-batch; 0 where the size does not matter.
        tokens: padded length of each row.
        median_s: after the burn-in, seconds; of recorded actions the mean, because batches differ.
        low_s: first quartile.
        high_s: third quartile.
        samples: how many timings.
        share: of the block's subnets that were active: below 1 exactly for the works of a part.
    """

    work: str
    rows: int
    tokens: int
    median_s: float
    low_s: float
    high_s: float
    samples: int
    share: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an unknown work, negative figures, no samples, and what does not belong together.

        Quartiles have to enclose the median, and the works of a part have to have a share above 0 and below 1.
        """
        if self.work not in set(Work):
            raise InvalidInputError(f"work {self.work!r} is not one of {', '.join(Work)}; measure anew")
        for name in ("rows", "tokens", "median_s", "low_s", "high_s"):
            if not getattr(self, name) >= 0:
                raise InvalidInputError(f"{self.work}.{name} is {getattr(self, name)}, it has to be at least 0")
        if not self.low_s <= self.median_s <= self.high_s:
            raise InvalidInputError(
                f"{self.work}: quartiles {self.low_s} and {self.high_s} do not enclose the median {self.median_s}"
            )
        if self.samples < 1:
            raise InvalidInputError(f"{self.work}.samples is {self.samples}, it has to be at least 1")
        is_part = self.work in PART_OF.values()
        if not (0 < self.share < 1 if is_part else self.share == 1):
            wanted = "above 0 and below 1" if is_part else "1"
            raise InvalidInputError(f"{self.work}.share is {self.share}, it has to be {wanted}; measure anew")

    @property
    def size(self) -> int:
        """Padded tokens of the micro-batch."""
        return self.rows * self.tokens


class WorkTable:
    """The measured points of one node, and times for any size.

    Args:
        points: of any works.
        where: for messages, e.g. ``node pi-3``.
    """

    def __init__(self, points: Iterable[WorkTime], *, where: str) -> None:
        self._where = where
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._shares: dict[str, float] = {}
        for point in points:
            self._shares[point.work] = point.share
            self._points.setdefault(point.work, []).append((point.size, point.median_s))
        for found in self._points.values():
            found.sort()

    def __contains__(self, work: str) -> bool:
        """Whether ``work`` was measured."""
        return work in self._points

    def seconds(self, work: str, size: float = 0.0) -> float:
        """Seconds that ``work`` takes for ``size`` padded tokens.

        Example: measured as 1 s at 100 tokens and 3 s at 200, a size of 150 takes 2 s, one of 300 takes 5 s.

        Between two measured sizes the time is linear, beyond the largest the line goes on unless it falls. Below the
        smallest it goes on too, but never below the smallest one's time scaled in proportion. A single point is
        scaled in proportion, if it has a size.

        Raises:
            PlanError: ``work`` was not measured.
        """
        points = self._points.get(work)
        if not points:
            raise PlanError(f"{self._where} has no measured time for '{work}'; measure anew with 'ringtune measure'")
        if len(points) == 1:
            at, value = points[0]
            return value * size / at if at else value
        right = min(max(1, bisect.bisect_left(points, (size, 0.0))), len(points) - 1)
        (left_size, left_s), (right_size, right_s) = points[right - 1], points[right]
        slope = (right_s - left_s) / (right_size - left_size) if right_size > left_size else 0.0
        line = left_s + slope * (size - left_size)
        if size > right_size:
            return max(line, right_s)  # of two noisy points the larger one may be the faster one
        return max(line, left_s * size / left_size if left_size and size < left_size else 0.0)

    def share_s(self, work: Work, size: float) -> float:
        """Seconds of ``work`` that all subnets of a block take together: what it takes less without any of them.

        Example: 10 s with all subnets and 6 s with half of them are 8 s for the subnets, 2 s for all else. Where no
        part was measured, subnets take all the time. They take none where a part took longer than the whole.
        """
        whole_s, part = self.seconds(work, size), PART_OF.get(work, work)
        if part is work or part not in self._points:
            return whole_s
        found_s = (whole_s - self.seconds(part, size)) / (1 - self._shares[part])
        return min(whole_s, max(0.0, found_s))
