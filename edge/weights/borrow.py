"""Find a node's model: its own copy, offered to other nodes, or the tensors that other nodes offer.

With a copy the job stays as it is. Without one, ``for_planning`` replaces the job's ``model.path`` by the outline in
the cache, and ``for_run`` by the folder with the tensors of this node's slice; nothing after that knows the difference.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from edge.agent_options import AgentOptions
from edge.weights.fetch import Sources
from edge.weights.files import CheckedFile
from edge.weights.retrying import Wanted
from edge.weights.store import ModelCache
from ringtune.errors import ModelError
from ringtune.jobs.job import Job
from ringtune.models.family import CAUSAL_LM
from ringtune.models.folder import read_config
from ringtune.models.hub import name_of_folder
from ringtune.quantities import format_bytes
from ringtune.rpc.addresses import is_allowed
from ringtune.rpc.statuses import error_of_call
from ringtune.schedule.plan import Plan
from ringtune.weights.manifest import FileEntry, ModelManifest, TensorEntry, needed_files, needed_tensors
from ringtune.weights.source import Offers

_LOG = logging.getLogger(__name__)


class Borrower:
    """Finds the model of each run; one run at a time.

    Args:
        options: of the agent.
        find_sources: ``host:port`` of the other nodes, whether or not they have a copy; may raise what a call raises.

    Attributes:
        offers: what this node has, for others to fetch.
        fetched_bytes: of tensors, since this node began.
    """

    def __init__(self, options: AgentOptions, find_sources: Callable[[], Sequence[str]]) -> None:
        self.offers, self.fetched_bytes = Offers(), 0
        self._options = options
        self._find_sources = find_sources
        self._run_id = ""
        self._stop = threading.Event()
        self._manifest: ModelManifest | None = None
        self._lock = threading.Lock()

    def for_planning(self, run_id: str, job: Job, *, timeout_s: float) -> Job:
        """Return the job with a model folder that suffices to plan and to time a block.

        Args:
            run_id: of the run.
            job: with the model's folder as it is on this machine, if it is.
            timeout_s: for asking and fetching.

        Raises:
            ModelError: nobody has a copy.
            RingTuneError: it can't be fetched; see ``Sources`` and ``ModelCache``.
        """
        stop = self._begin(run_id)
        if self._has_copy(run_id, job):
            return job
        wanted = Wanted(run_id=run_id, deadline_s=time.monotonic() + timeout_s, stop=stop)
        with Sources(self._sources()) as peers:
            cache = self._cache(job, peers, wanted)
            with cache.locked(deadline_s=wanted.deadline_s, stop=stop):
                files = needed_files(cache.manifest, is_owner=self._options.data is not None)
                return _at(job, self._outline(cache, files, peers, wanted))

    def for_run(self, run_id: str, job: Job, plan: Plan, *, timeout_s: float) -> Job:
        """Return the job with a model folder that has the tensors of what the plan lets this node host.

        Args:
            run_id: of the run.
            job: as for ``for_planning``.
            plan: of the run.
            timeout_s: for asking and fetching.

        Raises:
            ModelError: nobody has a copy, or it lacks a tensor.
            RingTuneError: it can't be fetched; see ``Sources`` and ``ModelCache``.
        """
        stop = self._begin(run_id)
        if self._has_copy(run_id, job):
            return job
        wanted = Wanted(run_id=run_id, deadline_s=time.monotonic() + timeout_s, stop=stop)
        name = self._options.name
        is_owner = plan.owner(name) is not None
        piece = plan.slice_of(name)
        blocks = {*range(plan.placement.private_blocks if is_owner else 0), *range(piece.start, piece.stop)}
        with Sources(self._sources()) as peers:
            cache = self._cache(job, peers, wanted)
            with cache.locked(deadline_s=wanted.deadline_s, stop=stop):
                files = needed_files(cache.manifest, is_owner=is_owner)
                config = read_config(self._outline(cache, files, peers, wanted))
                tensors = needed_tensors(
                    cache.manifest,
                    config,
                    blocks=blocks,
                    is_owner=is_owner,
                    with_decoder=job.model.task == CAUSAL_LM,
                    with_unused=is_owner and job.method.full_parameters,  # it is a part of the model that is left
                )
                self.fetched_bytes += _fetch_tensors(cache, tensors, peers, wanted)
                return _at(job, cache.publish(files))

    def release(self, run_id: str) -> None:
        """Stop fetching for a run and offer nothing to it any more; from any thread, empty = any run."""
        with self._lock:
            if run_id in ("", self._run_id):
                self._stop.set()
                self.offers.drop(self._run_id)

    # ---- parts --------------------------------------------------------------------------------------

    def _begin(self, run_id: str) -> threading.Event:
        with self._lock:
            if run_id != self._run_id or self._stop.is_set():
                self._stop.set()
                self._stop = threading.Event()
                self._manifest = None if run_id != self._run_id else self._manifest
                self._run_id = run_id
            return self._stop

    def _has_copy(self, run_id: str, job: Job) -> bool:
        """Whether nothing has to be fetched: the model's folder is here, or the user named one with ``--model``.

        A folder that is here is offered to other nodes.
        """
        folder = Path(job.model.path)
        is_here = folder.is_dir()
        self.offers.put(run_id, folder if is_here else None)
        return is_here or self._options.model is not None

    def _sources(self) -> list[str]:
        """List the addresses to ask: other nodes, from a place that depends on this node's name, then the coordinator.

        In plain text without ``--insecure`` other machines' nodes are left out.
        """
        try:
            found = self._find_sources()
        except grpc.RpcError as error:
            raise error_of_call(error, peer=f"the coordinator {self._options.coordinator}") from error
        allowed = sorted({address for address in found if is_allowed(address, insecure=self._options.insecure)})
        start = sum(self._options.name.encode()) % max(1, len(allowed))
        return [*allowed[start:], *allowed[:start], self._options.coordinator]

    def _cache(self, job: Job, peers: Sources, wanted: Wanted) -> ModelCache:
        if self._manifest is None:
            try:
                self._manifest = peers.manifest(wanted)
            except ModelError as error:
                raise ModelError(
                    f"node {self._options.name} has no model folder {job.model.path}, and {error}; check model.path, "
                    "or start a node with --model DIR"
                ) from error
        root = self._options.cache
        return ModelCache(root, self._manifest, name_of_folder(Path(job.model.path)))

    def _outline(self, cache: ModelCache, files: Sequence[FileEntry], peers: Sources, wanted: Wanted) -> Path:
        missing = [file for file in map(cache.file, files) if not file.is_complete()]
        _complete(cache, missing, peers, wanted)
        folder = cache.write_outline()
        read_config(folder)  # by allow-list, before anything else looks at it
        return folder


def _fetch_tensors(cache: ModelCache, tensors: Sequence[TensorEntry], peers: Sources, wanted: Wanted) -> int:
    """Fetch the tensors that the cache lacks, and return how many bytes came; equal contents travel once."""
    start_s = time.monotonic()
    missing = [file for file in map(cache.tensor, tensors) if not file.is_complete()]
    first: dict[str, CheckedFile] = {}
    for file in missing:
        first.setdefault(file.sha256, file)
    came = _complete(cache, list(first.values()), peers, wanted)
    for file in missing:
        if first[file.sha256] is not file:
            for data in first[file.sha256].content():
                file.write(data, "an equal tensor")
            file.finish()
    _LOG.info(
        "run %s: %d of %d tensors were in the cache; %s came in %.1f s",
        wanted.run_id,
        len(tensors) - len(missing),
        len(tensors),
        format_bytes(came),
        time.monotonic() - start_s,
    )
    return came


def _complete(cache: ModelCache, missing: Sequence[CheckedFile], peers: Sources, wanted: Wanted) -> int:
    for file in missing:
        file.resume()
    cache.require_room(missing)
    return peers.fetch(missing, wanted)


def _at(job: Job, folder: Path) -> Job:
    return job.with_overrides({"model.path": str(folder)})
