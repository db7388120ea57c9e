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
those that keep their trials go on where they were. Exit code 1 if any part did not go as it has to; a part that this
machine can't carry out is named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.testbed.capabilities import SKIPPED_EXIT_CODE
from ringtune.storage.durable import write_durably

OUT = Path("build/bench/trust.json")
FOLDER = Path("build/bench/trials")
DONE = FOLDER / "parts.json"
DRAWS = "5000"
_KEEP_TRIALS = ("matrix", "outcomes")


def write_part(name: str, figures: Mapping[str, object]) -> None:
    """Put the figures of one benchmark in the place of those that are there under its name."""
    known = _known()
    write_durably(OUT, (json.dumps({**known, name: figures}, indent=2, sort_keys=True) + "\n").encode())


def known_part(name: str) -> dict[str, object]:
    """The figures of a benchmark that are there already; empty if there are none."""
    return dict(_known().get(name, {}))


def _known() -> dict[str, dict[str, object]]:
    return dict(json.loads(OUT.read_text(encoding="utf-8"))) if OUT.is_file() else {}


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


class KeptTrials:
    """The trials of one benchmark, each written as soon as it is done."""

    def __init__(self, name: str, *, go_on: bool) -> None:
        self._path = FOLDER / f"{name}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not go_on:
            self._path.unlink(missing_ok=True)

    def of(self, case: str) -> list[dict[str, Any]]:
        """What is kept of a case, in order."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        return [entry["trial"] for entry in map(json.loads, lines) if entry["case"] == case]

    def add(self, case: str, trial: dict[str, Any]) -> None:
        """Keep a trial."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, "trial": trial}) + "\n")


def commands(minutes: float) -> dict[str, tuple[str, ...]]:
    """The words after ``python -m`` of each part."""
    return {
        "draws": ("pytest", "-q", "tests/suites/test_faults_on_virtual_clock.py", "-o", "timeout=0"),
        "matrix": ("tests.bench.fault_matrix", "--minutes", f"{minutes * 2 / 3:g}"),
        "outcomes": ("tests.bench.outcomes", "--minutes", f"{minutes / 3:g}"),
        "deaths": ("tests.bench.coordinator_death",),
        "kills": ("tests.bench.kill",),
    }


def carry_out(parts: Mapping[str, Sequence[str]], done: dict[str, str], *, go_on: bool) -> dict[str, str]:
    """Carry parts out, and write down after each how it went."""
    for name, words in parts.items():
        if done.get(name, "").startswith("done"):
            continue
        began_s = time.monotonic()
        more = ("--go-on",) if go_on and name in _KEEP_TRIALS else ()
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
    found = carry_out(parts, done, go_on=options.go_on)
    write_part("parts", found)
    for name, how in found.items():
        say(f"{name:<10}{how}")
    return int(any(how.startswith("failed") for how in found.values()))


if __name__ == "__main__":
    sys.exit(main())
