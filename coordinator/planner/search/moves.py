"""A move is a small change of a ring, written as a kind and up to four numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from coordinator.planner.predict.step_time import Ring


class Move(NamedTuple):
    """A small change of a ring.

    Kinds: ``give`` k blocks from stage i to stage j; ``drop`` stage i, its blocks go to stage j; ``swap`` the nodes
    of i and j; ``replace`` the node of i by node j; ``insert`` node j before stage i with k blocks of stage l;
    ``move`` stage i to position j; ``reverse`` the stages from i to j.
    """

    kind: str
    i: int
    j: int
    k: int = 0
    l: int = 0  # noqa: E741 - a fourth number


def moves(ring: Ring, free: Sequence[int], max_hosts: int) -> Iterator[Move]:
    """Yield all moves of a ring; only nodes in ``free`` may come in."""
    length = len(ring.nodes)
    for i in range(length):
        for j in range(length):
            if i == j:
                continue
            yield from (Move("give", i, j, k) for k in (1, 2, 4) if ring.counts[i] > k)
            if abs(i - j) == 1:
                yield Move("drop", i, j)
            if i < j:
                yield Move("swap", i, j)
            if i < j - 1:
                yield Move("reverse", i, j)
            yield Move("move", i, j)
        yield from (Move("replace", i, node) for node in free)
    if length < max_hosts:
        for at in range(length + 1):
            for donor in {max(0, at - 1), min(at, length - 1)}:
                for k in {1, ring.counts[donor] // 2}:
                    if 0 < k < ring.counts[donor]:
                        yield from (Move("insert", at, node, k, donor) for node in free)


def applied(ring: Ring, move: Move) -> Ring | None:
    """Apply a move to a ring; None if the move is impossible on it, because the ring has changed since."""
    kind, i, j, k, donor = move
    nodes, counts = list(ring.nodes), list(ring.counts)
    length = len(nodes)
    if i >= length + (kind == "insert") or (kind not in ("replace", "insert") and (j >= length or i == j)):
        return None
    if kind == "give":
        if counts[i] <= k:
            return None
        counts[i] -= k
        counts[j] += k
    elif kind == "drop":
        counts[j] += counts[i]
        del nodes[i], counts[i]
    elif kind == "swap":
        nodes[i], nodes[j] = nodes[j], nodes[i]
    elif kind == "replace":
        if j in nodes:
            return None
        nodes[i] = j
    elif kind == "insert":
        if j in nodes or donor >= length or counts[donor] <= k:
            return None
        counts[donor] -= k
        nodes.insert(i, j)
        counts.insert(i, k)
    elif kind == "move":
        nodes.insert(j, nodes.pop(i))
        counts.insert(j, counts.pop(i))
    else:
        nodes[i : j + 1] = nodes[i : j + 1][::-1]
        counts[i : j + 1] = counts[i : j + 1][::-1]
    return Ring(nodes=tuple(nodes), counts=tuple(counts))
