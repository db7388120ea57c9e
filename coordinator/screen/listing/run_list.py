"""Write the runs that a coordinator keeps, as a table and as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence

from coordinator.kept_runs.record import RunRecord
from coordinator.kept_runs.taking_up import taken_up_by
from coordinator.screen.text_table import table_lines
from ringtune.texts import printable

_TITLES = ("run", "state", "model", "method", "by", "started", "steps", "saved", "fetched")
_LEFT = 6


def run_lines(records: Sequence[RunRecord]) -> list[str]:
    """Write one JSON line for each run."""
    return [json.dumps({**dataclasses.asdict(record), "can_go_on": record.can_go_on}) for record in records]


def run_table(records: Sequence[RunRecord]) -> list[str]:
    """Write a table of runs, oldest first, and below it why those ended that did not end well."""
    if not records:
        return ["no run is kept here yet"]
    by_id = {record.run_id: record for record in records}
    failed = [f"{record.run_id}: {_why(record, by_id)}" for record in records if record.message]
    return [*table_lines(_TITLES, [_row(record) for record in records], left=_LEFT), *failed]


def _why(record: RunRecord, records: Mapping[str, RunRecord]) -> str:
    after = taken_up_by(records, record.run_id)
    return printable(record.message) + (f"; {after.run_id} goes on with it" if after is not None else "")


def _row(record: RunRecord) -> tuple[str, ...]:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_unix_s))
    steps = f"{record.steps_done}/{record.num_steps}" if record.num_steps else "-"
    saved = str(record.saved_step) if record.saved_step >= 0 else "-"
    fetched = "-" if not record.has_books else "yes" if record.is_fetched else "no"
    return (
        record.run_id,
        record.state,
        record.model,
        record.method,
        record.submitted_by or "-",
        started,
        steps,
        saved,
        fetched,
    )
