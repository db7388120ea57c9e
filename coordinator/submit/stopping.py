"""Stop a run from outside the command that submitted it, and wait for its end."""

from __future__ import annotations

import time

from coordinator.kept_runs.taking_up import last_of
from coordinator.submit.connection import Connection, who_submits
from ringtune.errors import ConnectionFailedError, DeadlineError, UsageError
from ringtune.v1 import control_pb2

_POLL_S = 0.2


def stop_run(client: Connection, run_id: str, *, now: bool, wait_s: float) -> str:
    """Stop a run and wait until it is over.

    Args:
        client: of the coordinator.
        run_id: of the run; empty = the one that is driven.
        now: at once, without a further checkpoint.
        wait_s: how long to wait for its end, seconds.

    Returns:
        How it ended.

    Raises:
        UsageError: no run is driven, or another one.
        DeadlineError: it goes on for longer.
    """
    driven = client.status().run
    if run_id and run_id != driven.run_id:
        run_id = last_of({record.run_id: record for record in client.runs()}, run_id)
    if not driven.run_id or driven.is_over or (run_id and run_id != driven.run_id):
        raise UsageError(f"run {run_id} is not driven there now" if run_id else "no run is driven there now")
    client.stop_run(driven.run_id, f"stopped by {who_submits()}", now=now)
    return _end_of(client, driven.run_id, wait_s)


def _end_of(client: Connection, run_id: str, wait_s: float) -> str:
    deadline_s = time.monotonic() + wait_s
    status = control_pb2.RunStatus()
    while time.monotonic() < deadline_s:
        try:
            status = client.status().run
        except ConnectionFailedError:  # the coordinator of a local run ends with it
            return f"run {run_id} is over"
        if status.is_over or status.run_id != run_id:
            return f"run {run_id}: {status.message or status.phase}"
        time.sleep(_POLL_S)
    raise DeadlineError(
        f"run {run_id} has not ended within {wait_s:g} s (it is {status.phase}); it ends when its turns are done, "
        "or stop it with --now"
    )
