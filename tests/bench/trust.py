"""``make faults``: everything that is measured of faults, in one command, a part after the other.

========= =========================================================================================== =============
draws     engines and rounds on a virtual clock under 5,000 drawn sets of faults                        4 minutes
matrix    real processes that fail at each place, then at random ones                                   1 hour
outcomes  processes stopped, links, disks, memory and clocks, on boards of the testbed, then at random  1 hour
deaths    the coordinator, or the submitter, killed at each place                                       15 minutes
kills     a local run's processes killed at random moments, then resumed                                10 minutes
========= =========================================================================================== =============

``python -m tests.bench.trust [--only PART ...] [--minutes 30] [--go-on]``. Of the minutes of random
faults two thirds are those of *matrix*, one third those of *outcomes*. Each part writes its own
figures to ``build/bench/trust.json``. With ``--go-on`` parts that went well in an earlier call are not done again, and
those of trials go on where they were. Exit code 1 if any part did not go as it has to; a part that this
machine can't carry out is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from deploy.testbed.capabilities import SKIPPED_EXIT_CODE, MissingCapability
from ringtune.storage.durable import write_durably
from tests.support.cluster import TEMPLATE
from tests.support.trials import Trial

OUT = Path("build/bench/trust.json")
FOLDER = Path("build/bench/trials")
DONE = FOLDER / "parts.json"
DRAWS = "5000"


class Case(NamedTuple):
    """A trial to be carried out on a ring.

    Attributes:
        group: of the figures.
        name: what is done, for who reads or chooses it; cases of one name are repetitions.
        carry_out: does it.
        ring: which one; the same as long as the name is the same and all trials have an outcome.
        is_last: whether the ring is not used any more after it.
    """

    group: str
    name: str
    carry_out: Callable[[Any], Trial]
    ring: str = ""
    is_last: bool = False


OpenRing = Callable[[Path, str], AbstractContextManager[Any]]
"""Make a ring, by its name, in a folder."""


class KeptTrials:
    """The trials of one part, each written as soon as it is done; earlier ones are taken in place of new ones."""

    def __init__(self, part: str, *, go_on: bool) -> None:
        self._path, self._earlier = FOLDER / f"{part}.jsonl", dict[str, list[Trial]]()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not go_on:
            self._path.unlink(missing_ok=True)
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []:
            entry = json.loads(line)
            trial = Trial(**{**entry["trial"], "problems": tuple(entry["trial"]["problems"])})
            self._earlier.setdefault(entry["case"], []).append(trial)

    def take(self, case: Case) -> Trial | None:
        """The next trial of a case that is there already; None = it has to be carried out."""
        trials = self._earlier.get(f"{case.group}: {case.name}", [])
        return trials.pop(0) if trials else None

    def add(self, case: Case, trial: Trial) -> None:
        """Keep a trial."""
        with self._path.open("a", encoding="utf-8") as file:
            entry = {"case": f"{case.group}: {case.name}", "trial": dataclasses.asdict(trial)}
            file.write(json.dumps(entry) + "\n")


def carry_out(cases: Iterable[Case], open_ring: OpenRing, kept: KeptTrials) -> dict[str, list[Trial]]:
    """Carry trials out and print a line of JSON for each; one without an outcome leaves the others a ring of their own.

    Returns:
        The trials of each group.
    """
    groups, ring, open_name = dict[str, list[Trial]](), None, None
    with ExitStack() as stack:
        for case in cases:
            if (trial := kept.take(case)) is None:
                began_s = time.monotonic()
                try:
                    if case.ring != open_name:
                        open_name = None
                        stack.close()
                        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ringtune-faults-"))
                        ring, open_name = stack.enter_context(open_ring(Path(folder), case.ring)), case.ring
                    trial = case.carry_out(ring)
                    open_name = None if case.is_last else open_name
                except AssertionError as error:
                    trial = Trial(problems=(f"no outcome: {error}",), wall_s=time.monotonic() - began_s)
                    open_name = None
                kept.add(case, trial)
            groups.setdefault(case.group, []).append(trial)
            say(json.dumps({"group": case.group, "case": case.name, **dataclasses.asdict(trial)}))
    return groups


def summary(trials: Sequence[Trial]) -> dict[str, object]:
    """The figures of some trials: of seconds their spread; of other numbers the sum and the largest."""
    figures: dict[str, object] = {
        "trials": len(trials),
        "good": sum(not trial.problems for trial in trials),
        "problems": [problem for trial in trials for problem in trial.problems],
        "ended_with_an_error": sum(bool(trial.error) for trial in trials),
        "wall": spread([trial.wall_s for trial in trials]),
    }
    for name in sorted({name for trial in trials for name in trial.figures}):
        values = [+trial.figures[name] for trial in trials if name in trial.figures]
        figures[name] = spread(values) if name.endswith("_s") else {"sum": sum(values), "largest": max(values)}
    return figures


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Count, median, 95th percentile and longest of some durations, which are at least one."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "median_s": round(statistics.median(ordered), 3),
        "p95_s": round(ordered[min(last, -(-95 * len(ordered) // 100) - 1)], 3),
        "longest_s": round(ordered[-1], 3),
    }


def read_options(doc: str | None, **numbers: tuple[float, str]) -> argparse.Namespace:
    """Read the command line of a part, with its numbers: the default, which gives the type, and what it is."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default:g})")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="of the fixed cases those with one of these texts"
    )
    parser.add_argument("--go-on", action="store_true", help="with the trials that earlier calls have carried out")
    return parser.parse_args()


def carry_out_part(
    part: str,
    fixed: Iterable[Case],
    open_ring: OpenRing,
    options: argparse.Namespace,
    *,
    drawn: Iterable[Case] = (),
    known: Mapping[str, object] | None = None,
) -> int:
    """Carry a part out, print its figures, write them to trust.json where all cases were asked for.

    Args:
        part: its name.
        fixed: cases, of which ``--only`` chooses.
        open_ring: makes the rings.
        options: of ``read_options``.
        drawn: cases that follow.
        known: figures of groups that can't be carried out here.

    Returns:
        The exit code: 1 if a trial has a problem, 77 if this machine can't.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which ends rings and removes boards
    chosen = [case for case in fixed if not options.only or any(text in case.name for text in options.only)]
    try:
        groups = carry_out(chain(chosen, drawn), open_ring, KeptTrials(part, go_on=options.go_on))
    except MissingCapability as reason:
        sys.stderr.write(f"skipped: this machine can't: {reason}\n")
        return SKIPPED_EXIT_CODE
    finally:
        TEMPLATE.close()
    figures = {**(known or {}), **{group: summary(trials) for group, trials in groups.items()}}
    if not options.only:
        write_part(part, figures)
    say(json.dumps(figures, indent=1))
    return int(any(trial.problems for trials in groups.values() for trial in trials))


def write_part(part: str, figures: Mapping[str, object]) -> None:
    """Put the figures of a part in the place of those that are there under its name."""
    known = json.loads(OUT.read_text(encoding="utf-8")) if OUT.is_file() else {}
    write_durably(OUT, (json.dumps({**known, part: figures}, indent=2, sort_keys=True) + "\n").encode())


def commands(minutes: float) -> dict[str, tuple[str, ...]]:
    """The words after ``python -m`` of each part."""
    return {
        "draws": ("pytest", "-q", "tests/suites/test_faults_on_virtual_clock.py", "-o", "timeout=0"),
        "matrix": ("tests.bench.fault_matrix", "--minutes", f"{minutes * 2 / 3:g}"),
        "outcomes": ("tests.bench.outcomes", "--minutes", f"{minutes / 3:g}"),
        "deaths": ("tests.bench.coordinator_death",),
        "kills": ("tests.bench.kill",),
    }


def carry_out_all(parts: Mapping[str, Sequence[str]], done: dict[str, str], *, go_on: bool) -> dict[str, str]:
    """Carry parts out, and write down after each how it went."""
    for name, words in parts.items():
        if done.get(name, "").startswith("done"):
            continue
        began_s = time.monotonic()
        more = ("--go-on",) if go_on and name != "draws" else ()
        environment = {**os.environ, "RINGTUNE_FAULT_EXAMPLES": DRAWS}
        code = subprocess.run([sys.executable, "-m", *words, *more], env=environment, check=False).returncode  # noqa: S603
        how = {0: "done", SKIPPED_EXIT_CODE: "can't be done here"}.get(code, f"failed with {code}")
        done[name] = f"{how}, {(time.monotonic() - began_s) / 60:.1f} minutes"
        write_durably(DONE, json.dumps(done, indent=1).encode())
        say(f"== {name}: {done[name]}")
    return {name: done[name] for name in parts}


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Read the command line, carry all out, print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="only these parts")
    parser.add_argument("--minutes", type=float, default=30.0, help="of random faults")
    parser.add_argument("--go-on", action="store_true", help="with what earlier calls have done")
    options = parser.parse_args()
    parts = commands(options.minutes)
    if unknown := set(options.only) - parts.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    parts = {name: words for name, words in parts.items() if name in (options.only or parts)}
    done = json.loads(DONE.read_text(encoding="utf-8")) if options.go_on and DONE.is_file() else {}
    found = carry_out_all(parts, done, go_on=options.go_on)
    write_part("parts", found)
    for name, how in found.items():
        say(f"{name:<10}{how}")
    return int(any(how.startswith("failed") for how in found.values()))


if __name__ == "__main__":
    sys.exit(main())
