"""How a node shall time itself; free of torch, so that an agent can read this before torch is loaded."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.schedule.frozen_weights import FrozenWeights

DEFAULT_BUDGET_S = 4.0


class TimingRequest(NamedTuple):
    """The coordinator's wishes for a measurement of one node.

    Attributes:
        budget_s: about how long all timings may take, in seconds; slow boards take longer.
        neighbours: other nodes of this machine that are timed at the same moment.
        is_fresh: measure anew even what the node remembers.
        frozen: how frozen weights are held; None = in the type of the computation.
    """

    budget_s: float = DEFAULT_BUDGET_S
    neighbours: int = 0
    is_fresh: bool = False
    frozen: FrozenWeights | None = None
