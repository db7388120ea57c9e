"""Which host of a stage takes which micro-batch, where the stage has several.

A *stage* is a range of blocks that one or more nodes host; several hosts are *replicas* of each other. Each micro-batch
passes one host of each stage. Hosts take them in turn, as often as their shares ask for, and the pattern repeats
itself, in evaluations too. Shares 2 and 1 of a and b below, 1 and 1 of c and d above::

    micro-batch   0   1   2   3   4   5 | 6
    below         a   b   a   a   b   a | a
    above         c   d   c   d   c   d | c
    lane          0   1   0   3   4   3 | 0      named by the first micro-batch with these hosts

So a micro-batch's way follows from its number alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Final

from ringtune.errors import PlanError
from ringtune.schedule.owner_turns import owner_indices, turns_until_repeat
from ringtune.schedule.placement import Placement, Slice

MOST_DEALT: Final = 4096
"""Micro-batches within which the hosts of all stages have to repeat themselves."""


@functools.lru_cache(maxsize=256)
def _hosts(placement: Placement) -> tuple[tuple[Slice, ...], ...]:
    """The hosts of each micro-batch, bottom to top, up to where the pattern repeats itself."""
    stages, count = placement.stages, _period(placement)
    dealt = [
        [stage[index] for index in itertools.islice(owner_indices([piece.share for piece in stage], 0), count)]
        for stage in stages
    ]
    return tuple(zip(*dealt, strict=True)) if dealt else ((),)


def _period(placement: Placement) -> int:
    own = ([piece.share for piece in stage] for stage in placement.stages if len(stage) > 1)
    return math.lcm(*(turns_until_repeat(shares) for shares in own))


def check_shares(placement: Placement) -> None:
    """Refuse shares by which the hosts repeat themselves only after very many micro-batches.

    Raises:
        PlanError: names the number.
    """
    period = _period(placement)
    if period > MOST_DEALT:
        raise PlanError(
            f"the shares of replicas repeat themselves after {period} micro-batches, at most {MOST_DEALT} are taken; "
            "use small shares, such as 1, 2 and 3"
        )


@functools.lru_cache(maxsize=256)
def _lanes(placement: Placement) -> tuple[int, ...]:
    hosts = _hosts(placement)
    first: dict[tuple[Slice, ...], int] = {}
    return tuple(first.setdefault(each, at) for at, each in enumerate(hosts))


def num_lanes_of(placement: Placement) -> int:
    """Micro-batches after which the hosts of the stages repeat themselves; 1 where no stage has replicas."""
    return len(_hosts(placement))


def lane_of(placement: Placement, micro: int) -> int:
    """The lane of a micro-batch: the first micro-batch that passes the same hosts."""
    found = _lanes(placement)
    return found[micro % len(found)]


def lanes(placement: Placement) -> tuple[int, ...]:
    """Every lane, in ascending order."""
    return tuple(sorted(set(_lanes(placement))))


def hosts_of_lane(placement: Placement, lane: int) -> tuple[Slice, ...]:
    """The slices that micro-batches of a lane pass, bottom to top."""
    return _hosts(placement)[lane]


def width(placement: Placement) -> int:
    """The most hosts that a stage has; 1 where no stage has replicas."""
    return max((len(stage) for stage in placement.stages), default=1)


def num_dealt(placement: Placement, node: str, microbatches: int) -> int:
    """How many of so many micro-batches a node hosts; all of them where it has no replica, none if it hosts nothing."""
    found = _hosts(placement)
    return sum(any(piece.node == node for piece in found[micro % len(found)]) for micro in range(microbatches))


@functools.lru_cache(maxsize=1024)
def replicas(placement: Placement, node: str) -> tuple[str, ...]:
    """The hosts of a node's stage in ring order, itself among them; empty if it is the only one, or hosts nothing."""
    for stage in placement.stages:
        names = tuple(piece.node for piece in stage)
        if node in names and len(names) > 1:
            return names
    return ()


def replica_links(placement: Placement) -> frozenset[tuple[str, str]]:
    """Every pair of replicas of one stage: each sends its gradients to the other."""
    names = ([piece.node for piece in stage] for stage in placement.stages)
    return frozenset(itertools.chain.from_iterable(itertools.permutations(each, 2) for each in names))
