"""Which node keeps a copy of what another one has trained, in a placement whose hosts keep the ends of turns.

A ring of a [0,3), b [3,5), c [5,6): b keeps a copy for a, c for b, and a for c. Hosts of one stage are copies of one
another already, so that nobody keeps one for them.
"""

from __future__ import annotations

from typing import Final

from ringtune.schedule.placement import Placement

TURNS_KEPT: Final = 3
"""Train turns of which a node keeps what it has trained: the committed one, and two that may be granted since."""


def copy_holder(placement: Placement, node: str) -> str:
    """The node that keeps a copy of what a host has trained; empty if none does, or a replica has it anyway.

    Example: on a [0,3), b [3,6) b keeps a copy for a, and a for b. A host of all blocks has nobody.
    """
    hosts = placement.hosts
    own = placement.slice_of(node)
    if not own.num_blocks or sum((piece.start, piece.stop) == (own.start, own.stop) for piece in hosts) > 1:
        return ""
    at = hosts.index(own)
    return next((piece.node for piece in (*hosts[at + 1 :], *hosts[:at]) if piece.node != node), "")


def copied_from(placement: Placement, node: str) -> tuple[str, ...]:
    """The hosts of which a node keeps copies, in ring order; see ``copy_holder``."""
    return tuple(piece.node for piece in placement.hosts if copy_holder(placement, piece.node) == node)
