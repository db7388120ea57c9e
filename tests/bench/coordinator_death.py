"""Kill the coordinator, or the submitter, at each place of a run of real nodes, then at random ones.

``python -m tests.bench.coordinator_death``, or ``--random 20 --seed 1``, or ``--only Move``; the figures go to
``build/bench/trust.json``.

Every run must end by itself with the weights of the undisturbed one (1e-9 in float64) and each step once in its
books; one whose submitter was killed is fetched.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.bench.trust import Case, carry_out_part, read_options
from tests.support.dying_ring import DyingRing, dying_ring

OF_COORDINATOR = ("call Inspect 2", "call Prepare 2", "call Grant 2", "call Grant 20", "answer Report 6")
AT_END = ("answered Report 30", "call Release 1", "write run.json 2")
OF_NODES = (
    ("c", "answer Prepare 1"),
    ("a", "embedding 9"),
    ("c", "forward* 20"),
    ("c", "backward 9"),
    ("d", "backward 30"),
    ("d", "update 9"),
    ("c", "after update 9"),
    ("a", "send h 30"),
    ("a", "head 20"),
    ("a", "send t 1"),
    ("b", "receive t 1"),
    ("c", "write step-8.safetensors 1"),
    ("d", "written step-16.safetensors 1"),
    ("a", "answer Collect 1"),
)
OF_RECOVERIES = (("", "call Rest 1"), ("", "call Move 1"), ("", "call Move 3"), ("d", "answered Move 1"))
OF_MOVES = (*OF_RECOVERIES, ("c", "answer Move 1"))
OF_SUBMITTERS = ('"preparing"', '"step": 1,', '"step": 10', '"step": 24', '"collecting"')
RANDOM = {  # how often a node comes to a place at least
    "ab": {"embedding": 30, "head": 20, "send h": 30, "send t": 1, "answer Grant": 3, "write *": 3},
    "cd": {"forward*": 40, "backward": 30, "update": 20, "send h": 30, "send g": 20, "answer Grant": 3, "write *": 3},
}


_RINGS: dict[str, dict[str, Any]] = {"still": {}, "moves": {"moves": True}, "copies": {"recovery__copies": "next"}}


def ring_of(folder: Path, name: str) -> AbstractContextManager[DyingRing]:
    """One of the rings."""
    return dying_ring(folder, **_RINGS[name])


def _death(ring: str, node: str, order: str, loses: str = "", group: str = "matrix") -> Case:
    name = f"{node or 'coordinator'}: {order}, {ring}"
    return Case(group, name, lambda made: made.trial(order, node=node, loses=loses), ring)


def _submitter(event: str, *, with_coordinator: bool) -> Case:
    who = "submitter and coordinator" if with_coordinator else "submitter"
    return Case(
        "matrix",
        f"{who}: {event}",
        lambda made: made.submitter_trial(event, with_coordinator=with_coordinator),
        ring="still",
    )


def matrix() -> Iterator[Case]:
    """Every case."""
    yield from (_death("still", "", order) for order in (*OF_COORDINATOR, *AT_END))
    yield from (_death("still", node, order) for node, order in OF_NODES)
    for with_coordinator in (False, True):
        yield from (_submitter(event, with_coordinator=with_coordinator) for event in OF_SUBMITTERS)
    yield from (_death("moves", node, order) for node, order in OF_MOVES)
    yield from (_death("copies", node, order, loses="c") for node, order in OF_RECOVERIES)


def at_random(count: int, seed: int) -> Iterator[Case]:
    """So many deaths of the coordinator at a random place of a random node."""
    rng, drawn = random.Random(seed), list[Case]()
    for _ in range(count):
        ring, nodes = rng.choice(["still", "moves"]), rng.choice(sorted(RANDOM))
        place, times = rng.choice(sorted(RANDOM[nodes].items()))
        drawn.append(_death(ring, rng.choice(nodes), f"{place} {rng.randint(1, times)}", group="random"))
    yield from sorted(drawn, key=lambda case: case.ring)


def main() -> int:
    """Read the command line, carry all out."""
    options = read_options(
        __doc__, random=(20, "deaths at random places after the matrix"), seed=(0, "of the random places")
    )
    drawn = at_random(options.random, options.seed)
    return carry_out_part("deaths", matrix(), ring_of, options, drawn=drawn)


if __name__ == "__main__":
    sys.exit(main())
