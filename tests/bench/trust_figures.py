"""``build/bench/trust.json``: what comes of faults; every benchmark of them writes its own part."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringtune.storage.durable import write_durably

OUT = Path("build/bench/trust.json")


def write_part(name: str, figures: Mapping[str, object], path: Path = OUT) -> None:
    """Put the figures of one benchmark in the place of those that are there under its name."""
    known = _known(path)
    write_durably(path, (json.dumps({**known, name: figures}, indent=2, sort_keys=True) + "\n").encode())


def known_part(name: str, path: Path = OUT) -> dict[str, object]:
    """The figures of a benchmark that are there already; empty if there are none."""
    return dict(_known(path).get(name, {}))


def _known(path: Path) -> dict[str, dict[str, object]]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


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
