"""``make bench-cola``: what helpers that fit adapters save and cost. Exit code 1 if a figure misses its bound.

Each part is a file of this folder with ``measure(folder)``, which gives figures, and ``missed(figures)``, which names
those that miss their bound. ``--only PART ...`` measures some of them::

    host_bytes    what a host of helped blocks holds at most in a step, by adapter, batch size, merged or not
    speedup       a step with a helper over one without, on boards of the testbed; as root, in five minutes

Writes ``build/bench/cola.json``: a key for each part, where parts that were not asked for keep what they had, and the
figures of a part under ``figures`` in it. Those on boards tell times; the bytes are counted in this process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from ringtune.storage.durable import write_durably

OUT: Final = Path("build/bench/cola.json")
PARTS: Final = {
    "host_bytes": "tests.bench.cola_host_bytes",
    "speedup": "tests.bench.cola_speedup",
}


def main() -> int:
    """Measure part by part, write the figures, and say what was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="parts")
    misses: list[str] = []
    for name in parser.parse_args().only:
        part = importlib.import_module(PARTS[name])
        OUT.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"cola-{name}-", dir=OUT.parent) as folder:
            figures = part.measure(Path(folder).resolve())
        write(name, figures)
        misses += [f"{name}: {miss}" for miss in part.missed(figures)]
    for miss in misses:
        print(f"MISSED {miss}")  # noqa: T201
    return 1 if misses else 0


def write(name: str, figures: dict[str, Any]) -> None:
    """Put a part's figures into the file, beside those of other parts, and print what sums them up."""
    written = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    write_durably(OUT, (json.dumps(written | {name: figures}, indent=1) + "\n").encode())
    print(json.dumps({name: figures["figures"]}, indent=1), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
