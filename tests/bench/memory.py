"""``make bench-memory``: what memory a run needs, and what saving it costs. Exit code 1 if a figure misses its bound.

Each part is a file of this folder with ``measure(folder)``, which gives figures, and ``missed(figures)``, which names
those that miss their bound. ``--only PART ...`` measures some of them::

    boards        is what the plan says what a board needs, to the end of the run?
    saved         what blocks keep under each policy for activations, and what that costs in time
    hift          what the optimizer's state takes where one group of units trains at a time

Writes ``build/bench/memory.json``: a key for each part, where parts that were not asked for keep what they had, and the
figures that a part has under ``figures`` beside them. Where no testbed can be built the exit code is 77.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from deploy.testbed.capabilities import SKIPPED_EXIT_CODE, MissingCapability

OUT: Final = Path("build/bench/memory.json")
PARTS: Final = {
    "boards": "tests.bench.memory_boards",
    "saved": "tests.bench.saved_activations",
    "hift": "tests.bench.hift_state",
}

Figures = dict[str, Any]


def main() -> int:
    """Measure part by part, write the figures, and say what was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), default=list(PARTS), help="parts")
    misses: list[str] = []
    skipped = False
    for name in parser.parse_args().only:
        part = importlib.import_module(PARTS[name])
        OUT.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(prefix=f"memory-{name}-", dir=OUT.parent) as folder:
                figures = part.measure(Path(folder).resolve())
        except MissingCapability as missing:
            print(f"{name} not measured: {missing}", flush=True)  # noqa: T201
            skipped = True
            continue
        write(name, figures)
        misses += [f"{name}: {miss}" for miss in part.missed(figures)]
    for miss in misses:
        print(f"MISSED {miss}")  # noqa: T201
    return 1 if misses else SKIPPED_EXIT_CODE if skipped else 0


def write(name: str, figures: Figures) -> None:
    """Put a part's figures into the file, beside those of other parts."""
    written = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    written |= {name: figures, **figures.get("figures", {})}
    OUT.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
