"""What the coordinator's state machine is told of placements to come, and what it asks for them: values only."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan

# ---- events ----


class Replanned(NamedTuple):
    """The driver found another placement that the run shall move to, as soon as it may.

    Attributes:
        placement: the other one.
        stays_s: predicted seconds of the steps that are left, on the present placement.
        moves_s: on the other one.
        cost_s: of the move.
    """

    placement: Placement
    stays_s: float = 0.0
    moves_s: float = 0.0
    cost_s: float = 0.0


class FetchedAhead(NamedTuple):
    """A node has the base weights that the placement with this number wants from it; ``problem`` says why it has not.

    ``num_bytes`` came from other nodes, in ``seconds``.
    """

    node: str
    placement_number: int
    num_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""


# ---- commands ----


class FetchAhead(NamedTuple):
    """Let a node fetch the base weights of its slice in this part of the plan; ``FetchedAhead`` answers."""

    node: str
    part: Plan


class LogFetched(NamedTuple):
    """Log what nodes have fetched of base weights, while the run trained, for the placement with this number.

    Attributes:
        placement_number: to which the run is to move.
        fetched_bytes: by node.
        seconds: until the last one had all.
        problems: by node, why it has not; it fetches them in the move, if the run moves.
    """

    placement_number: int
    fetched_bytes: tuple[tuple[str, int], ...]
    seconds: float
    problems: tuple[tuple[str, str], ...] = ()
