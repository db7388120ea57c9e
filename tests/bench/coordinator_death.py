"""Kill the coordinator, or the submitter, at each place of a run of real nodes, then at random ones.

``python -m tests.bench.coordinator_death``, or ``--random 20 --seed 1``, or ``--only Move``; the figures go to
``build/bench/trust.json``.

Every trial must end by itself with the weights of the undisturbed run (1e-9 in float64) and each step once in its
books; a trial whose submitter was killed is fetched.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.trust import say, spread, write_part
from tests.support.cluster import TEMPLATE
from tests.support.dying_ring import DyingRing, Trial, dying_ring

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


class Case(NamedTuple):
    """A trial, by its name, on one of the rings: ``still``, ``moves`` or ``copies``."""

    name: str
    ring: str
    carry_out: Callable[[DyingRing], Trial]


def _death(ring: str, node: str, order: str, loses: str = "") -> Case:
    return Case(f"{node or 'coordinator'}: {order}", ring, lambda made: made.trial(order, node=node, loses=loses))


def _submitter(event: str, *, with_coordinator: bool) -> Case:
    who = "submitter and coordinator" if with_coordinator else "submitter"
    return Case(f"{who}: {event}", "still", lambda made: made.submitter_trial(event, with_coordinator=with_coordinator))


def matrix() -> Iterator[Case]:
    """Every case."""
    yield from (_death("still", "", order) for order in (*OF_COORDINATOR, *AT_END))
    yield from (_death("still", node, order) for node, order in OF_NODES)
    yield from (_death("moves", node, order) for node, order in OF_MOVES)
    yield from (_death("copies", node, order, loses="c") for node, order in OF_RECOVERIES)
    for with_coordinator in (False, True):
        yield from (_submitter(event, with_coordinator=with_coordinator) for event in OF_SUBMITTERS)


def at_random(count: int, seed: int) -> Iterator[Case]:
    """So many deaths of the coordinator at a random place of a random node."""
    rng = random.Random(seed)
    for _ in range(count):
        ring, nodes = rng.choice(["still", "moves"]), rng.choice(sorted(RANDOM))
        place, times = rng.choice(sorted(RANDOM[nodes].items()))
        yield _death(ring, rng.choice(nodes), f"{place} {rng.randint(1, times)}")


def summary(trials: list[Trial]) -> dict[str, object]:
    """The figures of some trials."""
    went_on = [trial for trial in trials if trial.from_step >= 0]
    return {
        "trials": len(trials),
        "good": sum(trial.is_good for trial in trials),
        "deaths_of_the_coordinator": sum(trial.deaths for trial in trials),
        "went_on_from_a_checkpoint": len(went_on),
        "began_anew": sum(trial.from_step == -1 for trial in trials),
        "largest_difference": max((trial.difference for trial in trials), default=0.0),
        **({"wall": spread([trial.wall_s for trial in trials])} if trials else {}),
    }


def carry_out(cases: list[Case]) -> list[Trial]:
    """Carry trials out, ring by ring, and print a line of JSON for each."""
    found = []
    for name, settings in _RINGS.items():
        of_ring = [case for case in cases if case.ring == name]
        if not of_ring:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="ringtune-death-") as folder,
            dying_ring(Path(folder), **settings) as ring,
        ):
            for case in of_ring:
                trial = case.carry_out(ring)
                found.append(trial)
                line = {"case": case.name, "ring": name, "good": trial.is_good, **dataclasses.asdict(trial)}
                say(json.dumps(line))
                ring.wait_idle()
    return found


def main() -> int:
    """Read the command line, carry all out, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=20, help="deaths at random places after the matrix")
    parser.add_argument("--seed", type=int, default=0, help="of the random places")
    parser.add_argument("--only", default="", help="only the cases with this text")
    options = parser.parse_args()
    fixed = carry_out([case for case in matrix() if options.only in case.name])
    drawn = carry_out(list(at_random(options.random, options.seed)))
    TEMPLATE.close()
    figures = {"matrix": summary(fixed), "random": {"seed": options.seed, **summary(drawn)}}
    if not options.only:
        write_part("coordinator_death", figures)
    say(json.dumps(figures, indent=1))
    return 0 if all(trial.is_good for trial in (*fixed, *drawn)) else 1


if __name__ == "__main__":
    sys.exit(main())
