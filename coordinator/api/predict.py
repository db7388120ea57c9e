"""``Run.predict``: what the result of a run says of new rows."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from coordinator.api.folders import RunLike, folder_of, python_words
from coordinator.api.table import Table
from ringtune.errors import UsageError
from ringtune.jobs.job import Job
from ringtune.jobs.rows import input_columns
from ringtune.models.family import IMAGE_CLASSIFICATION

_LOG = logging.getLogger(__name__)
Rows: TypeAlias = str | PathLike[str] | Sequence[Mapping[str, Any]] | Sequence[str]
"""A file of rows, the rows themselves, or texts."""


def predict(
    run: RunLike,
    data: Rows,
    *,
    save: str | PathLike[str] | None = None,
    model: str | PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    missing: str = "",
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
    from coordinator.run_folder.saved_run import read_run, with_data

    with python_words():
        saved = with_data(read_run(folder_of(run)), columns or {}, missing)
    how = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    base = Path(model) if model is not None else None
    with _file_of(data, saved.job) as (rows, names), python_words(names):
        for note in check_request(saved, rows, how, user):
            _LOG.warning("%s", note)
        with writer_to(Path(save), rows) if save is not None else nullcontext() as writer:
            found = []
            for each in predict_rows(saved, rows, how, model=base, user=user, tell=_LOG.warning):
                found.append(joined(each))
                if writer is not None:
                    writer.add(each)
    return Table(found)


@contextmanager
def _file_of(data: Rows, job: Job) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Give the file of rows; rows that are given lie in one of their own meanwhile, on this machine.

    Returns:
        The file, and what it is called in messages where it is none of the user's.

    Raises:
        UsageError: what is given is neither.
    """
    if isinstance(data, str | PathLike):
        yield Path(data), {}
        return
    if job.model.task == IMAGE_CLASSIFICATION:
        raise UsageError("rows are a folder of pictures or an .npz file; give its path")
    columns = input_columns(job.model.task, job.data)
    takes_texts = list(columns) == ["data.text"]
    rows: list[Any] = [{job.data.text: row} if takes_texts and isinstance(row, str) else row for row in data]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        named = ", ".join(f"{name!r}: ..." for name in columns.values())
        texts = ", texts" if takes_texts else ""
        raise UsageError(f"rows are a file{texts} or mappings, e.g. [{{{named}}}]; give one at least")
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        path = Path(name) / "rows.jsonl"
        try:
            path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
        except (TypeError, ValueError) as error:
            raise UsageError("a row has a value that JSON has no form for; give texts and numbers") from error
        yield path, {str(path): "the rows"}
