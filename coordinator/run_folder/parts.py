"""Keep the parts of a run that was stopped and resumed, and add them up.

``report.json`` and ``trace.json`` are of the part that ended last: a coordinator knows no other. The lines of
``metrics.jsonl`` go through all parts, also those of a part that was killed, so the totals come from there. What a part
did after the checkpoint from which the next one went on was done again, and counts once.

::

    DIR/parts/stops.json     [40, 80]: the steps from which the run went on
    DIR/parts/1/trace.json   what the first attempt has left, if it lived long enough to leave it; and so on
    DIR/parts/1/adapter/     of a run that was done and then made longer: what it had trained until then; or model/
                             or users/
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.records.step_lines import is_step
from ringtune.files.durable import make_folder, rename_durably, storage_errors, write_durably
from ringtune.files.given_files import read_json
from ringtune.models.result_files import RESULT_FOLDERS

FOLDER = "parts"
_STOPS = "stops.json"
_OF_ONE_PART = ("trace.json", "report.json", *RESULT_FOLDERS)


class RunParts:
    """The parts of one run.

    Args:
        run_folder: of the run.
    """

    def __init__(self, run_folder: Path) -> None:
        self._run = run_folder
        self._folder = run_folder / FOLDER

    def stops(self) -> tuple[int, ...]:
        """List the steps from which the run was resumed, ascending; none if it never was, or the file is damaged."""
        try:
            found = read_json(self._folder / _STOPS)
            return tuple(sorted({int(step) for step in found}))
        except (OSError, ValueError, TypeError):
            return ()

    def begin(self, step: int) -> None:
        """Begin the part that goes on from ``step``: put the files of the part before away.

        Raises:
            StorageError: no room.
        """
        stops = (*(stop for stop in self.stops() if stop < step), step)
        target = self._folder / str(self._num_attempts() + 1)
        with storage_errors(target):
            make_folder(target)
            for name in _OF_ONE_PART:
                if (self._run / name).exists():
                    rename_durably(self._run / name, target / name)
        write_durably(self._folder / _STOPS, json.dumps(stops).encode())

    def _num_attempts(self) -> int:
        names = [entry.name for entry in self._folder.iterdir()] if self._folder.is_dir() else []
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def completed(self, report: Mapping[str, Any], metrics: Path) -> dict[str, Any]:
        """Add ``parts``, the totals of each earlier part, and ``whole``, the totals of all parts, to a report.

        Example: a run of 100 steps resumed at 40 has one part of 40 steps, and a whole of 100. The report of a run
        that was never resumed stays as it is.

        Args:
            report: of the last part.
            metrics: the lines of all steps.
        """
        stops = self.stops()
        if not stops:
            return dict(report)
        lines = [line for line in _lines(metrics) if is_step(line)]
        ends = (*stops, max((int(line["step"]) for line in lines), default=0))
        parts = [_totals(lines, done, stop) for done, stop in zip((0, *ends), ends, strict=False)]
        return {**report, "parts": parts[:-1], "whole": _totals(lines, 0, ends[-1])}


def _lines(path: Path) -> Iterable[Mapping[str, Any]]:
    if not path.exists():
        return
    with storage_errors(path), path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _totals(lines: Sequence[Mapping[str, Any]], done: int, stop: int) -> dict[str, Any]:
    """Add up the lines of the steps after ``done`` up to ``stop``: count, seconds, bytes by link, two losses."""
    chosen = [line for line in lines if done < int(line["step"]) <= stop]
    links: Counter[str] = Counter()
    for line in chosen:
        links.update({link: int(size) for link, size in line.get("bytes", {}).items()})
    losses = [line["loss"] for line in chosen if line.get("loss") is not None]
    return {
        "first_step": done + 1,
        "steps": len(chosen),
        "train_s": round(sum(float(line.get("seconds", 0.0)) for line in chosen), 6),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "links": dict(sorted(links.items())),
    }
