"""Give up a run that no coordinator drives any more, so that the one that comes back can go on from its last turn."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from ringtune.errors import RingTuneError

if TYPE_CHECKING:
    from edge.agent.agent import Agent

_LOG = logging.getLogger(__name__)
_SAVE_S: Final = 60.0
"""How long the action under way and the disk may take; what is not saved by then is done again."""


def give_up(agent: Agent, run_id: str, reason: str) -> None:
    """Stop a run, put the ends of its last turns on this node's disk, and release it.

    Args:
        agent: of this node.
        run_id: of the run; empty = whatever runs.
        reason: why it is given up.
    """
    active = agent.current()
    if active is not None and run_id in ("", active.run_id):
        agent.end(active, reason)
    kept, files = agent.moves.kept.everything()
    if files and run_id in ("", kept):
        try:
            agent.on_compute_thread(agent.moves.save, "save the last turns", timeout_s=_SAVE_S)
        except RingTuneError as error:
            _LOG.warning("the last turns of run %s are not saved: %s", kept, error)
    agent.release(run_id, reason)
