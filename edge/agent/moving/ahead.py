"""Get the base weights of another placement's slice while the run trains: from other nodes, and off the disk.

Nothing is held for it. What comes from other nodes lies in this node's cache of models, by digest, and what the next
slice reads is asked for from the disk, so that it lies in memory that the system has free, and takes back if it has to.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Protocol

from edge.agent.active_run import ActiveRun
from ringtune.errors import FrameError
from ringtune.files.strict import read_object
from ringtune.jobs.job import Job
from ringtune.models.families import family_named
from ringtune.models.folder import read_config
from ringtune.models.tensors import base_name, read_headers
from ringtune.quantities import format_bytes
from ringtune.schedule.plan import Plan

_LOG = logging.getLogger(__name__)


class Host(Protocol):
    """The part of ``edge.agent.agent.Agent`` that knows where base weights are."""

    models: Any

    def current(self) -> ActiveRun | None:
        """Return the run that is prepared or under way; None if there is none."""

    def job_of(self, run_id: str, job_toml: str) -> Job:
        """Read a job, with the model's folder as it is on this machine."""


def fetch_ahead(agent: Host, node: str, run_id: str, plan_json: str, job_toml: str, *, timeout_s: float) -> int:
    """Get what a node needs of the model in another placement of the run that is under way.

    Args:
        agent: of the node.
        node: its name.
        run_id: of the run.
        plan_json: the part of the plan with that placement.
        job_toml: of the run.
        timeout_s: for fetching.

    Returns:
        Bytes that came from other nodes.

    Raises:
        FrameError: another run is under way here.
        RingTuneError: nobody has the tensors, or they can't be fetched.
    """
    active = agent.current()
    if active is not None and active.run_id != run_id:
        raise FrameError(f"node {node} has run {active.run_id}, not run {run_id}; prepare it first")
    plan, job = Plan.from_json(read_object(plan_json, "the plan that came")), agent.job_of(run_id, job_toml)
    came = 0
    if agent.models is not None:
        before = agent.models.fetched_bytes
        job = agent.models.for_run(run_id, job, plan, timeout_s=timeout_s)
        came = agent.models.fetched_bytes - before
    piece = plan.slice_of(node)
    asked = read_ahead(Path(job.model.path), range(piece.start, piece.stop))
    _LOG.info(
        "run %s: blocks %s to come, %s fetched, %s asked for", run_id, piece.text, *map(format_bytes, (came, asked))
    )
    return came


def read_ahead(folder: Path, blocks: range) -> int:
    """Ask the system to read the tensors of some blocks from the disk, as far as it has memory free.

    Args:
        folder: of the model.
        blocks: absolute indices.

    Returns:
        Bytes that were asked for; 0 where the system takes no such advice.

    Raises:
        ModelError: the folder is no model's, or not readable.
        IntegrityError: a file of it is damaged.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    family, asked = family_named(read_config(folder)["model_type"]), 0
    prefixes = tuple(f"{family.block_prefix}{block}." for block in blocks)
    for name, stored in read_headers(folder).items():
        if prefixes and base_name(name, family).startswith(prefixes):
            with stored.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), stored.info.offset, stored.info.nbytes, os.POSIX_FADV_WILLNEED)
            asked += stored.info.nbytes
    return asked
