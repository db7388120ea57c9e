"""``make faults``: each node fails at each place of a run, then at random ones; a part of ``build/bench/trust.json``.

A ring of two owners and three hosts carries one job in float64 out again and again. In each trial a process is killed,
stands still for a quarter of its lease, is late, or loses a call, where a failpoint says; in some the authority of
their certificates is rotated in mid-run, a host turns hostile (it sends nothing, halves or noise, or takes no links),
or a second process with a node's certificate comes. The run has to end by itself or, if an owner or nothing but the
beginning is lost, to be resumed; with the weights of the undisturbed run (1e-9) and with every step and evaluation in
the books once.

``python -m tests.bench.fault_matrix [--minutes 30] [--seed 0] [--only TEXT ...] [--go-on]``; exit code 1 if any trial
went otherwise. With ``--go-on`` what an earlier call has carried out of the matrix is not done again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.trust import KeptTrials, say, spread, write_part
from tests.support.cluster import TEMPLATE
from tests.support.faulty_runs import BEGUN, COORDINATOR, HOSTS, OWNERS, WHOLE, Fault, FaultyRing, Trial, faulty_ring

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
_NO_END = "no end"
_LOG_CHARACTERS = 1500
RANDOM_PLACES = (
    *("answer Prepare", "answered Grant", "embedding", "head", "forward*", "after forward*", "backward"),
    *("after backward", "update", "after update", "send *", "receive *", "write *", "rename *", "written *"),
    *("call Keep", "answer Keep", "answered Keep", "call Report", "answer Rest", "answer Move", "answered Move"),
)


class Case(NamedTuple):
    """A trial: who fails; whether the run has a second placement, two copies, or an owner that is lost and back.

    ``rotation`` is that of the authority in mid-run, with certificates; empty = none, in plain text. ``duplicate`` is
    the node of which a second process comes in mid-run, with the same certificate; empty = none.
    """

    faults: tuple[Fault, ...]
    moves: bool = False
    has_two: bool = False
    rotation: str = ""
    comes_back: bool = False
    duplicate: str = ""

    def __str__(self) -> str:
        """The key of its kept trial; without the last four that of earlier versions."""
        more = ", two copies" * self.has_two + (f", {self.rotation} in mid-run" if self.rotation else "")
        more += ", owner lost and back" * self.comes_back
        more += f", duplicate of {self.duplicate}" * bool(self.duplicate)
        return f"Case(faults={self.faults}, moves={self.moves}){more}"

    @property
    def names(self) -> list[str]:
        """What ``--only`` looks at: the case, and each order."""
        return [str(self), *(f"{name}: {order}" for name, order in self.faults)]

    @property
    def is_encrypted(self) -> bool:
        """Whether nodes have certificates."""
        return bool(self.rotation or self.duplicate)


def matrix() -> Iterator[Case]:
    """Every case of the matrix."""
    for failure in ("kill", "stop"):
        for victim in (*OWNERS, *HOSTS):
            of_kind = OF_OWNERS if victim in OWNERS else OF_HOSTS
            yield from (Case((Fault(victim, f"{place} {failure}"),)) for place in (*OF_ALL, *of_kind))
    for failure in ("kill", "stop"):
        for victim in ("c", "d"):
            yield from (Case((Fault(victim, f"{place} {failure}"),), moves=True) for place in OF_MOVES[:4])
        yield Case((Fault("c", f"answer Fetch 1 {failure}"),), moves=True)
        first = Fault("c", "backward 4 kill")
        yield from (Case((first, Fault("e", f"{place} {failure}"))) for place in OF_RECOVERIES)
    for below, above in (("c", "d"), ("d", "e")):  # two neighbours at once
        for place in ("answered Grant 3", "answered Grant 5"):
            yield Case((Fault(below, f"{place} kill"), Fault(above, f"{place} kill")), has_two=True)
    for victim in OWNERS:
        for place in ("answered Grant 3", "embedding 9", "after head 9", "send t 2"):
            yield Case((Fault(victim, f"{place} kill"),), comes_back=True)
    for failure in ("drop-request", "drop-reply"):
        yield from (Case((Fault(victim, f"call {call} {failure}"),)) for victim in "acd" for call in CALLS_OF_NODES)
        yield from (Case((Fault(COORDINATOR, f"call {call} {failure}"),)) for call in CALLS_OF_COORDINATOR)
    yield from (Case((Fault("d", f"{place} delay 2"),)) for place in ("forward* 9", "send h 9", "write step-8* 1"))
    yield from (Case((Fault(victim, order),)) for order in OF_HOSTILE for victim in HOSTS)
    yield from (Case((), duplicate=node) for node in (*OWNERS, *HOSTS))
    yield Case((Fault("d", "after backward 9 kill"),), duplicate="c")
    for rotation in (WHOLE, BEGUN):
        yield Case((), rotation=rotation)
        yield from (
            Case((Fault("d", f"answered Grant 4 {failure}"),), rotation=rotation) for failure in ("kill", "stop")
        )
        yield Case((Fault("c", "answer Move 1 kill"),), moves=True, rotation=rotation)


def soak(minutes: float, seed: int) -> Iterator[Case]:
    """Random cases for so many minutes."""
    rng = random.Random(seed)
    until_s = time.monotonic() + 60 * minutes
    while time.monotonic() < until_s:
        victims = rng.sample((*OWNERS, *HOSTS, *HOSTS), k=rng.choice([1, 1, 1, 2]))
        faults = tuple(Fault(victim, _random_order(rng)) for victim in dict.fromkeys(victims))
        yield Case(faults, moves=rng.random() < 0.3)


def _random_order(rng: random.Random) -> str:
    failure = rng.choice(["kill", "kill", "stop", "delay 1"])
    return f"{rng.choice(RANDOM_PLACES)} {rng.randint(1, 12)} {failure}"


def carry_out(cases: Iterable[Case], *, all_fail: bool, kept: KeptTrials) -> list[tuple[Trial, bool]]:
    """Carry trials out, print a line of JSON for each, and say which are good."""
    found, ahead = [], iter(cases)
    case = next(ahead, None)
    while case is not None:
        is_encrypted = case.is_encrypted
        with (
            tempfile.TemporaryDirectory(prefix="ringtune-faults-") as folder,
            faulty_ring(Path(folder), is_encrypted=is_encrypted) as ring,
        ):
            while case is not None and case.is_encrypted == is_encrypted:
                earlier = kept.of(str(case))
                try:
                    trial = (
                        _again(earlier[0])
                        if earlier
                        else ring.trial(
                            *case.faults,
                            moves=case.moves,
                            has_two=case.has_two,
                            rotation=case.rotation,
                            comes_back=case.comes_back,
                            duplicate=case.duplicate,
                        )
                    )
                except AssertionError as error:  # it does not end, say: the others get a ring of their own
                    trial = _without_end(case, f"{error}; {_said_last(ring)}")
                if not earlier:
                    kept.add(str(case), dataclasses.asdict(trial))
                judged = trial if all_fail else dataclasses.replace(trial, failed=len(trial.faults))
                found.append((trial, judged.is_good))
                say(json.dumps({"good": judged.is_good, **dataclasses.asdict(trial)}))
                case = next(ahead, None)
                if trial.ended.startswith(_NO_END) or trial.rotation:  # a party renews a few times an hour only
                    break
    return found


def _again(kept: dict[str, Any]) -> Trial:
    return Trial(**{**kept, "faults": tuple(Fault(*fault) for fault in kept["faults"])})


def _said_last(ring: FaultyRing) -> str:
    """Of each node its exit code, None while it lives, and the end of its log."""
    cluster = ring.cluster
    said = {name: (cluster.agents[name].poll(), cluster.log(name)[-_LOG_CHARACTERS:]) for name in cluster.names}
    return "; ".join(f"{name} ({code}): ...{text}" for name, (code, text) in said.items())


def _without_end(case: Case, why: str) -> Trial:
    return Trial(
        faults=case.faults,
        moves=case.moves,
        failed=0,
        ended=f"{_NO_END}: {why}",
        recoveries=0,
        difference=float("inf"),
        has_right_books=False,
        recovery_s=0.0,
        noticed_s=0.0,
        wall_s=0.0,
    )


def summary(found: list[tuple[Trial, bool]]) -> dict[str, object]:
    """The figures of some trials."""
    trials = [trial for trial, _ in found]
    recovered = [trial for trial in trials if trial.recoveries]
    figures: dict[str, object] = {
        "trials": len(trials),
        "good": sum(good for _, good in found),
        "failures": sum(trial.failed for trial in trials),
        "went_on_by_themselves": sum(not trial.ended for trial in trials),
        "resumed": sum(bool(trial.ended) for trial in trials),
        "largest_difference": max((trial.difference for trial in trials), default=0.0),
        "with_wrong_books": sum(not trial.has_right_books for trial in trials),
    }
    if recovered:
        figures["from_failure_to_going_on"] = spread([trial.noticed_s for trial in recovered])
        figures["of_these_recovering"] = spread([trial.recovery_s for trial in recovered])
    return figures


def main() -> int:
    """Read the command line, carry all out, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of random faults after the matrix")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="of the matrix only the orders with one of these texts; 'two copies', 'rotation', 'lost and back', "
        "'duplicate'; 'd: send h 9 cut'",
    )
    parser.add_argument("--go-on", action="store_true", help="with what earlier calls have carried out of the matrix")
    options = parser.parse_args()
    cases = [
        case
        for case in matrix()
        if not options.only or any(text in name for text in options.only for name in case.names)
    ]
    found = carry_out(cases, all_fail=True, kept=KeptTrials("fault_matrix", go_on=options.go_on))
    figures = {"matrix": summary(found)}
    if options.minutes:
        drawn = soak(options.minutes, options.seed)
        later = carry_out(drawn, all_fail=False, kept=KeptTrials("fault_soak", go_on=False))
        figures["soak"] = {"minutes": options.minutes, "seed": options.seed, **summary(later)}
        found += later
    TEMPLATE.close()
    if not options.only:
        write_part("faults", figures)
    say(json.dumps(figures, indent=1))
    return 0 if all(good for _, good in found) else 1


if __name__ == "__main__":
    sys.exit(main())
