"""``make faults``: each node fails at each place of a run, then at random ones; a part of ``build/bench/trust.json``.

A ring of two owners and three hosts carries one job in float64 out again and again. In each trial a process is killed,
stands still for a quarter of its lease, is late, or loses a call, where a failpoint says; in some the authority of
their certificates is rotated in mid-run, a host turns hostile (it sends nothing, halves or noise, or takes no links),
or a second process with a node's certificate comes. The run has to end by itself or, if an owner or nothing but the
beginning is lost, to be resumed; with the weights of the undisturbed run (1e-9) and with every step and evaluation in
the books once.

``python -m tests.bench.fault_matrix [--minutes 30] [--seed 0] [--only TEXT ...] [--go-on]``; exit code 1 if any trial
went otherwise. ``--only`` looks at orders, as "d: send h 9 cut", and at "moves", "two copies", "rotation", "lost and
back" and "duplicate".
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.bench.trust import Case, carry_out_part, read_options
from tests.support.faulty_runs import BEGUN, COORDINATOR, HOSTS, OWNERS, WHOLE, Fault, FaultyRing, faulty_ring

OF_ALL = ("answer Prepare 1", "answered Prepare 1", "answered Grant 3", "answer Collect 1", "answered Collect 1")
OF_OWNERS = ("embedding 9", "head 9", "after head 9", "send t 2", "receive t 2", "send h 9")
OF_HOSTS = (
    "forward* 9",
    "after forward* 12",
    "backward 4",
    "after backward 9",
    "update 3",
    "after update 9",
    "send h 9",
    "receive g 5",
    "write step-8* 1",
    "rename step-8* 1",
    "written step-16* 1",
    "call Keep 2",
    "answer Keep 3",
    "answered Keep 2",
)
OF_MOVES = ("answer Rest 1", "answered Rest 1", "answer Move 1", "answered Move 1", "answer Fetch 1")
OF_RECOVERIES = ("answer Rest 1", "answered Rest 1", "answer Move 1", "answered Move 1")
OF_HOSTILE = (
    *("send h 9 withhold", "send h 9 cut", "send h 9 garbage", "send h 9 flood"),
    *("answer Prepare 1 refuse", "answered Grant 3 withhold"),
)
CALLS_OF_NODES = ("Report 1", "Report 3", "Report 12", "Keep 2", "Heartbeat 1")
CALLS_OF_COORDINATOR = (
    *("Inspect 1", "Inspect 4", "Prepare 1", "Prepare 5", "Grant 3", "Grant 9"),
    *("Collect 1", "Collect 4", "Release 1"),
)
RANDOM_PLACES = (
    *("answer Prepare", "answered Grant", "embedding", "head", "forward*", "after forward*", "backward"),
    *("after backward", "update", "after update", "send *", "receive *", "write *", "rename *", "written *"),
    *("call Keep", "answer Keep", "answered Keep", "call Report", "answer Rest", "answer Move", "answered Move"),
)


PLAIN, ENCRYPTED = "plain", "encrypted"


def ring_of(folder: Path, name: str) -> AbstractContextManager[FaultyRing]:
    """The ring, in plain text or with certificates."""
    return faulty_ring(folder, is_encrypted=name == ENCRYPTED)


def _case(*faults: Fault, group: str = "matrix", **more: Any) -> Case:
    """A trial of ``FaultyRing``; its name has each order, and what else is done."""
    words = [f"{name}: {order}" for name, order in faults]
    words += ["moves"] * more.get("moves", False) + ["two copies"] * more.get("has_two", False)
    words += ["owner lost and back"] * more.get("comes_back", False)
    rotation, duplicate = more.get("rotation"), more.get("duplicate")
    words += ([f"{rotation} in mid-run"] if rotation else []) + ([f"duplicate of {duplicate}"] if duplicate else [])
    return Case(
        group,
        ", ".join(words),
        lambda ring: ring.trial(*faults, **more),
        ring=ENCRYPTED if rotation or duplicate else PLAIN,
        is_last=bool(rotation),  # a party renews a few times an hour only
    )


def matrix() -> Iterator[Case]:
    """Every case of the matrix."""
    for failure in ("kill", "stop"):
        for victim in (*OWNERS, *HOSTS):
            of_kind = OF_OWNERS if victim in OWNERS else OF_HOSTS
            yield from (_case(Fault(victim, f"{place} {failure}")) for place in (*OF_ALL, *of_kind))
    for failure in ("kill", "stop"):
        for victim in ("c", "d"):
            yield from (_case(Fault(victim, f"{place} {failure}"), moves=True) for place in OF_MOVES[:4])
        yield _case(Fault("c", f"answer Fetch 1 {failure}"), moves=True)
        first = Fault("c", "backward 4 kill")
        yield from (_case(first, Fault("e", f"{place} {failure}")) for place in OF_RECOVERIES)
    for below, above in (("c", "d"), ("d", "e")):  # two neighbours at once
        for place in ("answered Grant 3", "answered Grant 5"):
            yield _case(Fault(below, f"{place} kill"), Fault(above, f"{place} kill"), has_two=True)
    for victim in OWNERS:
        for place in ("answered Grant 3", "embedding 9", "after head 9", "send t 2"):
            yield _case(Fault(victim, f"{place} kill"), comes_back=True)
    for failure in ("drop-request", "drop-reply"):
        yield from (_case(Fault(victim, f"call {call} {failure}")) for victim in "acd" for call in CALLS_OF_NODES)
        yield from (_case(Fault(COORDINATOR, f"call {call} {failure}")) for call in CALLS_OF_COORDINATOR)
    yield from (_case(Fault("d", f"{place} delay 2")) for place in ("forward* 9", "send h 9", "write step-8* 1"))
    yield from (_case(Fault(victim, order)) for order in OF_HOSTILE for victim in HOSTS)
    yield from (_case(duplicate=node) for node in (*OWNERS, *HOSTS))
    yield _case(Fault("d", "after backward 9 kill"), duplicate="c")
    for rotation in (WHOLE, BEGUN):
        yield _case(rotation=rotation)
        yield from (_case(Fault("d", f"answered Grant 4 {failure}"), rotation=rotation) for failure in ("kill", "stop"))
        yield _case(Fault("c", "answer Move 1 kill"), moves=True, rotation=rotation)
        hostile = ("send h 9 cut", "answered Grant 3 withhold")
        yield from (_case(Fault("d", order), rotation=rotation) for order in hostile)
        yield _case(rotation=rotation, duplicate="c")


def soak(minutes: float, seed: int) -> Iterator[Case]:
    """Random cases for so many minutes."""
    rng = random.Random(seed)
    until_s = time.monotonic() + 60 * minutes
    while time.monotonic() < until_s:
        victims = rng.sample((*OWNERS, *HOSTS, *HOSTS), k=rng.choice([1, 1, 1, 2]))
        faults = [Fault(victim, _random_order(rng)) for victim in dict.fromkeys(victims)]
        yield _case(*faults, group="soak", moves=rng.random() < 0.3, all_fail=False)


def _random_order(rng: random.Random) -> str:
    failure = rng.choice(["kill", "kill", "stop", "delay 1"])
    return f"{rng.choice(RANDOM_PLACES)} {rng.randint(1, 12)} {failure}"


def main() -> int:
    """Read the command line, carry all out."""
    options = read_options(
        __doc__, minutes=(30.0, "of random faults after the matrix"), seed=(0, "of the random faults")
    )
    drawn = soak(options.minutes, options.seed)
    return carry_out_part("matrix", matrix(), ring_of, options, drawn=drawn)


if __name__ == "__main__":
    sys.exit(main())
