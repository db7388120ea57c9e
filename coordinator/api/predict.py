"""``Run.predict``: what the result of a run says of new rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from coordinator.api.folders import RunLike, folder_of
from coordinator.api.table import Table
from ringtune.errors import UsageError

Rows: TypeAlias = str | PathLike[str] | Sequence[Mapping[str, Any]]
"""A file of rows, or the rows themselves."""


def predict(
    run: RunLike,
    data: Rows,
    *,
    save: str | PathLike[str] | None = None,
    model: str | PathLike[str] | None = None,
    user: str = "",
    max_new_tokens: int = 50,
    temperature: float = 0.0,
    seed: int = 0,
) -> Table:
    """Predict for rows with the adapter or model of a run, as ``ringtune predict`` does; see ``Run.predict``.

    Raises:
        RingTuneError: whatever it failed with.
    """
    from coordinator.predicting.of_run import check_request, predict_rows
    from coordinator.predicting.process import Sampling
    from coordinator.predicting.writing import joined, writer_to
    from coordinator.run_folder.saved_run import read_run

    saved = read_run(folder_of(run))
    how = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    base = Path(model) if model is not None else None
    with _file_of(data) as rows:
        check_request(saved, rows, how, user)
        with writer_to(Path(save), rows) if save is not None else nullcontext() as writer:
            found = []
            for each in predict_rows(saved, rows, how, model=base, user=user):
                found.append(joined(each))
                if writer is not None:
                    writer.add(each)
    return Table(found)


@contextmanager
def _file_of(data: Rows) -> Iterator[Path]:
    """Give the file of rows; rows that are given lie in one of their own meanwhile, on this machine.

    Raises:
        UsageError: what is given is neither.
    """
    if isinstance(data, str | PathLike):
        yield Path(data)
        return
    if not data or not all(isinstance(row, Mapping) for row in data):
        raise UsageError('rows are a file or mappings, e.g. [{"text": "good"}]; give one at least')
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        path = Path(name) / "rows.jsonl"
        try:
            path.write_text("".join(json.dumps(dict(row)) + "\n" for row in data), encoding="utf-8")
        except (TypeError, ValueError) as error:
            raise UsageError("a row has a value that JSON has no form for; give texts and numbers") from error
        yield path
