"""Trials that an earlier call of a benchmark has carried out, a line of JSON each, so that the call can be repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path("build/bench/trials")


class KeptTrials:
    """The trials of one benchmark, each written as soon as it is done.

    Args:
        name: of the benchmark.
        go_on: whether those of earlier calls count; else they are forgotten.
    """

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
