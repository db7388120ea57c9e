"""Read ``metrics.jsonl`` of a run, also while the run still writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.run_folder.folder import METRICS
from ringtune.errors import IntegrityError
from ringtune.files.given_files import read_given
from ringtune.files.strict import parse_json


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's ``metrics.jsonl``; none where there is no such file yet.

    Raises:
        IntegrityError: a whole line is not readable; names it.
    """
    path = folder / METRICS
    try:
        text = read_given(path)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{path} can't be read ({error}); copy the run's folder again") from error
    whole = text[: text.rfind("\n") + 1]  # the rest is being written
    return [_line(line, f"{path}, line {number}") for number, line in enumerate(whole.splitlines(), start=1)]


def _line(text: str, where: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise IntegrityError(f"{where} is no JSON ({error}); copy the run's folder again") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{where} is no JSON object; copy the run's folder again")
    return value
