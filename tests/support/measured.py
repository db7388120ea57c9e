"""What nodes of earlier tests have measured of themselves, for those of later ones: each kind of job is timed once.

The file is the nodes' own (``edge.profiler.timing``), whose keys tell apart whatever changes a timing. Tests
that are about measuring use folders of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coordinator.client.checkpoints import RunCheckpoints
from edge.checkpoint.state_folder import CACHE_FILE
from edge.profiler.timing import SCHEMA
from ringtune.storage.durable import claim

_ENTRIES: dict[str, Any] = {}


def recall(states: Iterable[Path]) -> None:
    """Give nodes what others have measured; ``states`` are their folders."""
    for state in states:
        if _ENTRIES and not (state / CACHE_FILE).exists():
            state.mkdir(parents=True, exist_ok=True)
            (state / CACHE_FILE).write_text(json.dumps({"schema": SCHEMA, "entries": _ENTRIES}))


def recall_in(out: Path, names: Iterable[str]) -> list[Path]:
    """Give local nodes what others have measured, in the folder of their run; return the nodes' folders."""
    states = [RunCheckpoints(out).node_states() / name for name in names]
    if _ENTRIES:
        claim(out, "run")
        recall(states)
    return states


def keep(states: Iterable[Path]) -> None:
    """Take in what nodes have measured."""
    for state in states:
        if (state / CACHE_FILE).exists():
            _ENTRIES.update(json.loads((state / CACHE_FILE).read_text())["entries"])
