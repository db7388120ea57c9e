"""What benches in parts share: results that were kept a file each, how they are told, and how such a bench ends."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ringtune.storage.durable import write_durably


def results_of(folder: Path) -> list[dict[str, Any]]:
    """Every result that was kept, by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def kept_result(path: Path, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result that a file keeps; without a file, that of ``train``, which is written and told."""
    if not path.exists():
        result = train()
        write_durably(path, (json.dumps(result) + "\n").encode())
        say(f"{path.stem}: {result['accuracy']:.4f} in {result['seconds']:.0f} s")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def spread_text(values: Sequence[float]) -> str:
    """Mean and spread in percent: ``81.2 % (80.1 to 82.0, 3 seeds)``."""
    least, most = 100 * min(values), 100 * max(values)
    seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
    return f"{100 * statistics.mean(values):.1f} % ({least:.1f} to {most:.1f}, {seeds})"


def say(text: str) -> None:
    """A line, as soon as it is known."""
    print(text, flush=True)  # noqa: T201


def conclude(out: Path, results: Sequence[Any], table: str, missed: Sequence[str], *, is_tried_out: bool) -> int:
    """Write figures to ``out.json`` and the table to ``out.md``, unless runs were short; say table and misses."""
    if not is_tried_out:
        figures = {"runs": results, "missed": missed}
        write_durably(out.with_suffix(".json"), (json.dumps(figures, indent=1) + "\n").encode())
        write_durably(out.with_suffix(".md"), table.encode())
    say(table)
    for line in missed:
        say(f"missed: {line}")
    return 1 if missed else 0
