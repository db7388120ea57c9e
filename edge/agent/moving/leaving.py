"""Put the ends of the last turns on the disk when the coordinator is gone: it may come back and go on from one of them.

A node that hears that its coordinator is gone releases its run, and with it all that it keeps in memory of the last
turns. One of them is the last that every node had done. Which one, the coordinator's books say.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from edge.agent.moving.kept import KeptFile
from edge.shards.parts import SavedParts
from edge.shards.state_folder import StateFolder
from ringtune.errors import BusyError, StorageError

_LOG = logging.getLogger(__name__)


def save_turns(
    state: Path, node: str, shards_run: str, attempt: str, files: Sequence[KeptFile], *, rows: str = ""
) -> tuple[int, ...]:
    """Write what a node keeps of the ends of turns beside the shards of its run; none of its folder's locks is held.

    Args:
        state: the node's folder.
        node: its name.
        shards_run: under which run shards are kept.
        attempt: id of the run that trained them.
        files: what it keeps.
        rows: digest of the node's rows for this run; empty = it has none.

    Returns:
        The steps, ascending; none where that failed, which a line in the log says: the run goes on from its newest
        checkpoint then.
    """
    steps = tuple(sorted({file.step for file in files}))
    try:
        with StateFolder(state) as folder:
            shards = folder.run(shards_run)
            parts = SavedParts(shards, node)
            shards.keep_rows(rows)
            for file in files:
                parts.write(file.step, attempt, file.content, is_head=file.is_head)
            parts.drop_before(min((*steps, *shards.steps())))
    except (BusyError, StorageError) as error:
        _LOG.warning("node %s did not save the last turns of run %s: %s", node, attempt, error)
        return ()
    _LOG.info("node %s saved the ends of steps %s of run %s", node, ", ".join(map(str, steps)), attempt)
    return steps
