"""A node's part in the migration of its run to the next placement: snapshot, and build of another slice.

::

    fetch   the run trains; base weights of the next slice are fetched into the cache, and read ahead from the disk
    rest    the loop pauses; the trained tensors of the slice are a snapshot, which other nodes may fetch
    move    other nodes' blocks are fetched, the old slice is freed, the new one is built, links are opened
    grant   the first turn after the move: the snapshot is freed

The old slice is freed before the new one is built, so a move never needs the memory of both. The snapshot stays in
memory until the grant; a return to the old placement is a move from the node's own snapshot.

``fetch`` takes no memory of the process: fetched tensors go to the weight cache on the disk, and the kernel reads the
files of the next slice into its page cache.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from edge.agent.active_run import ANSWER_SHARE, ActiveRun, TorchBackend, check_private
from edge.checkpoint.shard_saver import ResumeShard, Saver, finish_run, saved_parts
from edge.checkpoint.snapshot_servicer import SnapshotFetcher
from edge.checkpoint.snapshots import (
    MigratedState,
    SnapshotFile,
    SnapshotShelf,
    TurnSnapshots,
    block_digests,
    metadata,
)
from edge.checkpoint.state_folder import RunShards
from edge.checkpoint.turn_snapshots import CheckpointCopier, CopySender, TurnSnapshotter, save_turns
from edge.options import AgentOptions
from edge.runtime.loop import AgentRun
from edge.transport.access import RunAccess
from ringtune.errors import (
    ConnectionFailedError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    RingTuneError,
    StorageError,
    TrustError,
    UsageError,
)
from ringtune.job.job import Job, parse_job
from ringtune.models.families import family_named
from ringtune.models.folder import base_name, read_config, read_headers
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.access import NOT_PLANNED, CopyBytes
from ringtune.schedule.migration import Source
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn
from ringtune.storage.pieces import Pieces
from ringtune.storage.strict import read_object

_LOG = logging.getLogger(__name__)
_FLUSH_S = 5.0
# Of a source of trained state; the next one is asked at once.
_SAYS_NO = (IntegrityError, TrustError)


class NextPlacement(NamedTuple):
    """Arguments of a move to the next placement.

    Attributes:
        from_placement_number: of the placement in which the sources hosted the blocks.
        from_step: the run recovers from the copies after so many steps; None = it moves.
        head_from: the node that sends the head of ``from_step``; empty = none.
        digests: of units as kept after ``from_step``; a unit without one is not checked.
        others: further nodes that keep blocks, asked if a source has other ones.
        other_head: a further node that keeps the head; empty = none.
    """

    run_id: str
    placement_number: int
    plan_json: str
    job_toml: str
    addresses: Mapping[str, str]
    shards_run: str
    start: StartPoint
    from_placement_number: int
    sources: Sequence[Source]
    from_step: int | None = None
    head_from: str = ""
    digests: Mapping[int, str] = {}
    others: Sequence[Source] = ()
    other_head: str = ""
    sizes: CopyBytes = NOT_PLANNED


class MigratingAgent(Protocol):
    """The part of ``edge.agent.agent.Agent`` that a move needs."""

    models: Any
    options: AgentOptions
    access: RunAccess

    def current(self) -> ActiveRun | None:
        """Return the prepared or active run, if any."""

    def job_of(self, run_id: str, job_toml: str) -> Job:
        """Read a job, with the model's folder on this machine."""

    def of(self, run_id: str, placement_number: int | None) -> tuple[ActiveRun, AgentRun]:
        """Return a run and its loop."""

    def backend(self) -> TorchBackend:
        """Return the torch backend."""

    def adopt(
        self, run_id: str, placement_number: int, plan: Plan, start: StartPoint | None, sizes: CopyBytes
    ) -> ActiveRun:
        """Make this the agent's current run."""

    def begin(
        self, active: ActiveRun, job_toml: str, addresses: Mapping[str, str], deadline_s: float, *, taken: MigratedState
    ) -> int:
        """Prepare a run from migrated state; returns the bytes of materialised weights."""

    def end(self, active: ActiveRun, reason: str) -> None:
        """Stop a run and free its resources."""


class AgentMigration:
    """Moves and recoveries of an agent's run."""

    def __init__(self, agent: MigratingAgent, node: str) -> None:
        self.shelf, self.kept = SnapshotShelf(node), TurnSnapshots(node)
        self._agent, self._node = agent, node
        self._lock = threading.Lock()
        self._num_calls = 0
        self._left = ("", "")
        self._place = ("", "")

    def rest(self, run_id: str, placement_number: int, *, timeout_s: float) -> str:
        """Pause the run and offer a snapshot of its slice; a lost link does not end the run from here on.

        Returns:
            The totals of the placement, as JSON.

        Raises:
            FrameError: another run or placement is prepared here.
        """
        active, run = self._agent.of(run_id, placement_number)
        active.is_resting = True
        metadata = _snapshot_metadata(run_id, placement_number)

        def keep() -> Any:
            return self._agent.backend().snapshot(active, metadata)

        self.shelf.put(run_id, placement_number, run.call(keep, timeout_s=timeout_s, what="its snapshot"))
        if (reporter := active.reporter) is not None:
            reporter.flush(min(_FLUSH_S, timeout_s))
        return json.dumps(active.figures())

    def keeper(
        self, active: ActiveRun, job: Job, addresses: Mapping[str, str]
    ) -> TurnSnapshotter | CheckpointCopier | None:
        """Make what copies the ends of turns, or checkpoints, of a run; None if its placement has no copies."""
        if not active.plan.placement.copies:
            return None
        saver = active.saver
        sender = CopySender(
            active.run_id,
            self._node,
            active.plan.placement.placement_number,
            addresses=addresses,
            patience_s=job.runtime.lease_s,
            on_lost=active.on_link_lost,
            on_failed=active.fail,
        )
        if not active.plan.goes_back:
            self.kept.begin(active.run_id)
            if saver is None:
                return None
            piece = active.plan.slice_of(self._node)

            def blocks(step: int) -> Pieces:
                return saver.saved_blocks(step, active.run_id, piece.start, piece.stop)

            return CheckpointCopier(active.plan, self._node, blocks, sender)
        self._place = saver.place if saver is not None else ("", "")
        has_checkpoints = saver is not None and active.plan.course.checkpoint_every > 0
        return TurnSnapshotter(
            active.run_id,
            self._node,
            active.plan,
            active.executor,
            self.kept,
            make_file=self._agent.backend().kept_file,
            sender=sender,
            save=self._saving(active.run_id, saver) if saver is not None and has_checkpoints else None,
        )

    def _saving(self, run_id: str, saver: Saver) -> Callable[[SnapshotFile], None]:
        """Make the function that writes another node's copy to this disk; a full disk loses the copy, not the run."""

        def save(file: SnapshotFile) -> None:
            try:
                saver.open().write_part(file.step, run_id, file.content, is_head=file.is_head)
            except StorageError as error:
                _LOG.warning("node %s keeps no copy on its disk: %s", self._node, error)

        return save

    def save_copy(self, run_id: str, step: int, content: Pieces) -> None:
        """Write another node's blocks of a checkpoint to this disk; raises ``FrameError`` or ``StorageError``."""
        active = self._agent.current()
        saver = active.saver if active is not None and active.run_id == run_id else None
        if saver is None:
            raise FrameError(f"node {self._node} keeps no checkpoint of run {run_id} any more")
        saver.open().write_part(step, run_id, content, is_head=False)

    def save(self) -> None:
        """Write all snapshots of ends of turns to the disk; on the compute thread, after the run's end."""
        attempt, files = self.kept.everything()
        shards_run, rows = self._place
        state = self._agent.options.state
        if files and shards_run and state is not None:
            save_turns(state, self._node, shards_run, attempt, files, rows=rows)

    def saved(self, run_id: str) -> RunShards | None:
        """Return the copies and heads of a run on this node's disk; None where it has no folder."""
        return saved_parts(self._agent.options.state, self._node, run_id)

    def from_disks(
        self,
        resume: ResumeShard | None,
        head_unit: int,
        job_toml: str,
        addresses: Mapping[str, str],
        deadline_s: float,
        sizes: CopyBytes,
    ) -> MigratedState | None:
        """Return the blocks of a resumed run on the nodes' disks; None for a new run, or one that resumes from shards.

        Those of other nodes are fetched to files without a name, and all are compared with what was trained. A node
        without an answer is retried for the lease's seconds. No file is larger than ``sizes`` plan. ``head_unit`` is
        the number of the head in ``saved.digests``. Raises ``UsageError``, ``IntegrityError`` or ``RingTuneError``.
        """
        if resume is None or (saved := resume.saved) is None:
            return None
        node, folder, run_id = self._node, self._agent.options.state, resume.run_id
        step, attempt, lease_s = resume.shard.step, saved.attempt, _lease_s(job_toml, run_id)
        parts, files, head = saved_parts(folder, node, run_id), list[Pieces](), None
        fetcher = SnapshotFetcher(
            node, run_id, 0, addresses, deadline_s, self._check, lease_s, attempt, folder=folder, sizes=sizes
        )
        for source in saved.sources:
            if source.node != node:
                files.append(fetcher.blocks(source, step))
            else:
                copies = _own_copies(parts, node)
                files.append(copies.part(step, attempt, source.start, source.stop, sha256=source.sha256))
            _check_blocks(files[-1], source, saved.digests, step)
        if saved.head_from not in ("", node):
            head = fetcher.head(saved.head_from, step, saved.head_sha256)
        elif saved.head_from or resume.holder == node:
            head = _own_copies(parts, node).head(step, attempt, sha256=saved.head_sha256)
        if (sha256 := saved.digests.get(head_unit)) and head is not None and head.sha256() != sha256:
            raise _differs(saved.head_from or node, "the head", step)
        return MigratedState(tuple(files), metadata(attempt, step), head, run_id, is_resumed=parts is not None)

    def halt(self, run_id: str, *, timeout_s: float) -> None:
        """Stop a run's work because another node is lost; links stay open until the move. Raises ``DeadlineError``."""
        self._next_call()
        active = self._agent.current()
        if active is None or active.run_id != run_id:
            return
        active.is_resting = True
        run, reporter = active.run, active.reporter
        if run is None or reporter is None:
            self._agent.end(active, "another node is lost")
            return
        run.stop("another node is lost")
        if not run.wait(ANSWER_SHARE * timeout_s):
            raise DeadlineError(
                f"node {self._node}: waited {format_seconds(ANSWER_SHARE * timeout_s)} for its last action to end"
            )
        reporter.flush(min(_FLUSH_S, timeout_s))

    def fetch_ahead(self, run_id: str, plan_json: str, job_toml: str, *, timeout_s: float) -> int:
        """Fetch the base weights of this node's slice in another placement, and read them ahead from the disk.

        ``plan_json`` is the part of the plan for that placement.

        Returns:
            Bytes fetched from other nodes.

        Raises:
            FrameError: another run is active here.
            RingTuneError: no node has the tensors, or they can't be fetched.
        """
        agent, node = self._agent, self._node
        active = agent.current()
        if active is not None and active.run_id != run_id:
            raise FrameError(f"node {node} has run {active.run_id}, not run {run_id}; prepare it first")
        plan, job = Plan.from_json(read_object(plan_json, "the received plan")), agent.job_of(run_id, job_toml)
        received_bytes = 0
        if agent.models is not None:
            before = agent.models.fetched_bytes
            job = agent.models.for_run(run_id, job, plan, timeout_s=timeout_s)
            received_bytes = agent.models.fetched_bytes - before
        piece = plan.slice_of(node)
        ahead_bytes = read_ahead(Path(job.model.path), range(piece.start, piece.stop))
        _LOG.info(
            "run %s: next blocks %s, %s fetched, %s read ahead",
            run_id,
            piece.text,
            *map(format_bytes, (received_bytes, ahead_bytes)),
        )
        return received_bytes

    def move(self, to: NextPlacement, *, timeout_s: float) -> tuple[int, int]:
        """Build the slice of another placement with the trained state; a node without a part in it only stops.

        Returns:
            Bytes of materialised weights, and bytes of other nodes' snapshots.

        Raises:
            RingTuneError: as for ``Agent.prepare``, or the trained state can't be fetched.
        """
        deadline_s = time.monotonic() + ANSWER_SHARE * timeout_s
        number = self._next_call()
        plan = Plan.from_json(read_object(to.plan_json, "the received plan"))
        self._agent.access.move(to.run_id, plan, to.start, to.from_placement_number, to.from_step)
        if self._node not in plan.nodes:
            self._end_before(number, to.run_id)
            self._left = (to.run_id, to.shards_run)
            return 0, 0
        if to.from_step is None:
            taken, fetched_bytes = self._snapshot(to, deadline_s)
        else:
            taken, fetched_bytes = self._kept(to, to.from_step, plan.course.head, deadline_s)
        with self._lock:
            self._end_before(number, to.run_id)
            self._left = ("", "")
            active = self._agent.adopt(to.run_id, to.placement_number, plan, to.start, to.sizes)
        active.is_resting = True
        hosted_bytes = self._agent.begin(active, to.job_toml, to.addresses, deadline_s, taken=taken)
        _LOG.info(
            "run %s moved, blocks %s; %d bytes were fetched", to.run_id, plan.slice_of(self._node).text, fetched_bytes
        )
        return hosted_bytes, fetched_bytes

    def _snapshot(self, to: NextPlacement, deadline_s: float) -> tuple[MigratedState, int]:
        """Return the state after a move, and the bytes fetched: this node's snapshot, and parts of other nodes'."""
        fetcher = self._fetcher(to, deadline_s)
        files = tuple(fetcher.blocks(source) for source in to.sources if source.node != self._node)
        fetched_bytes = sum(file.size_bytes for file in files)
        head, from_here = None, [source for source in to.sources if source.node == self._node]
        if from_here or to.start.holder == self._node:
            snapshot = self.shelf.get(to.run_id, to.from_placement_number)
            files += tuple(snapshot.part(source.start, source.stop) for source in from_here)
            head = snapshot.head if to.start.holder == self._node else None
        of = _snapshot_metadata(to.run_id, to.from_placement_number)
        return MigratedState(files, of, head, to.shards_run), fetched_bytes

    def _fetcher(self, to: NextPlacement, deadline_s: float) -> SnapshotFetcher:
        terms = (self._node, to.run_id, to.from_placement_number, to.addresses, deadline_s, self._check)
        return SnapshotFetcher(*terms, _lease_s(to.job_toml, to.run_id), sizes=to.sizes)

    def _kept(self, to: NextPlacement, step: int, head_unit: int, deadline_s: float) -> tuple[MigratedState, int]:
        """Return the state of a recovery, from copies after ``step`` steps, and the bytes fetched; these are kept too.

        Raises:
            IntegrityError: no node has a block, or the head, as it was trained.
        """
        fetcher = self._fetcher(to, deadline_s)
        fetched = [file for source in to.sources for file in self._checked(to, step, source, fetcher)]
        self.kept.begin(to.run_id)
        self.kept.rewind(step, to.placement_number)
        fetched_bytes = 0
        for source, file in fetched:
            if source.node != self._node:
                fetched_bytes += file.size_bytes
                self.kept.keep(to.run_id, step, f"{source.node} {source.start}-{source.stop}", bytes(file))
        head = None
        if to.start.holder == self._node and step:
            head = self._checked_head(to, step, to.digests.get(head_unit), fetcher)
        if head is not None and to.head_from:
            fetched_bytes += head.size_bytes
        files = tuple(file for _, file in fetched)
        return MigratedState(files, metadata(to.run_id, step), head, to.shards_run), fetched_bytes

    def _checked(
        self, to: NextPlacement, step: int, source: Source, fetcher: SnapshotFetcher
    ) -> Iterator[tuple[Source, Pieces]]:
        """Yield the blocks of a source, or of other nodes where it gives none, or other ones than were trained."""
        try:
            yield source, self._checked_part(to, step, source, fetcher)
            return
        except _SAYS_NO as error:
            problem: RingTuneError = error
            is_refused = isinstance(error, TrustError)
            _LOG.warning("blocks [%d, %d) are not taken: %s", source.start, source.stop, error)
        for block in range(source.start, source.stop):
            others = [other for other in to.others if other.start <= block < other.stop]
            holders = {source.node, *(other.node for other in others)}
            if not is_refused:
                others.insert(0, Source(source.node, block, block + 1))  # its other blocks may be right
            for other in others:
                try:
                    yield other, self._checked_part(to, step, other, fetcher)
                    break
                except _SAYS_NO as error:
                    problem = error
                    _LOG.warning("block %d is not taken: %s", block, error)
            else:
                raise self._not_kept(problem, f"block {block}", step, holders)

    def _checked_part(self, to: NextPlacement, step: int, source: Source, fetcher: SnapshotFetcher) -> Pieces:
        """Return the blocks that a node, perhaps this one, keeps; raises ``IntegrityError``."""
        if source.node == self._node:
            file = self.kept.part(to.run_id, step, source.start, source.stop)
        else:
            file = fetcher.blocks(source, step)
        _check_blocks(file, source, to.digests, step)
        return file

    def _checked_head(self, to: NextPlacement, step: int, sha256: str | None, fetcher: SnapshotFetcher) -> Pieces:
        """Return the head that this node keeps, or fetch and keep it."""
        problem: RingTuneError = IntegrityError("nobody has it")
        holders = [node for node in (to.head_from or self._node, to.other_head) if node]
        for node in holders:
            is_own = node == self._node
            try:
                head = self.kept.head(to.run_id, step) if is_own else fetcher.head(node, step)
                if sha256 not in (None, head.sha256()):
                    raise _differs(node, "the head", step)
            except _SAYS_NO as error:
                problem = error
                _LOG.warning("the head is not taken: %s", error)
                continue
            if not is_own:
                self.kept.keep_head(to.run_id, step, bytes(head))
            return head
        raise self._not_kept(problem, "the head", step, {*holders})

    def _not_kept(self, problem: RingTuneError, what: str, step: int, holders: Set[str]) -> IntegrityError:
        """Make the error of what none of ``holders`` has; it names as peer a single one that is not this node."""
        error = IntegrityError(
            f"no node has {what} after step {step} as it was trained: {problem}; resume the run from its newest "
            "checkpoint with --resume"
        )
        if len(holders) == 1:
            error.peer = next((node for node in holders if node != self._node), "")
        return error

    def granted(self, active: ActiveRun, turns: Sequence[Turn]) -> None:
        """Drop the snapshot of a move at the first grant after it."""
        if active.is_resting and turns:
            active.is_resting = False
            self.shelf.drop(active.run_id)

    def release(self, run_id: str, *, is_finished: bool = False) -> None:
        """Drop all snapshots of a run; an empty id is any run.

        With ``is_finished`` the retention rule may remove its shards, also if this node has left the run.
        """
        self._next_call()
        self.shelf.drop(run_id)
        self.kept.drop(run_id)
        left, shards_run = self._left
        if is_finished and left == run_id:
            finish_run(self._agent.options.state, self._node, shards_run)

    def _next_call(self) -> int:
        """Number the calls that end any current move."""
        with self._lock:
            self._num_calls += 1
            return self._num_calls

    def _end_before(self, number: int, run_id: str) -> None:
        """End this node's current placement, unless there was a call after number ``number``."""
        if number != self._num_calls:
            raise InterruptedRunError(
                f"run {run_id} was moved or released meanwhile, so node {self._node} does not move"
            )
        before = self._agent.current()
        if before is not None:
            self._agent.end(before, "the run moves")

    def _check(self, node: str, address: str) -> None:
        if not address:
            raise ConnectionFailedError(f"node {self._node} got no address of node {node}; let it join again")
        check_private(self._agent.options, node, address)


def _check_blocks(file: Pieces, source: Source, wanted: Mapping[int, str], step: int) -> None:
    """Refuse blocks of a source that differ from those that were trained; raises ``IntegrityError``."""
    digests = block_digests(file) if wanted else {}
    for block in range(source.start, source.stop):
        if digests.get(block) != wanted.get(block, digests.get(block)):
            raise _differs(source.node, f"block {block}", step)


def _differs(node: str, what: str, step: int) -> IntegrityError:
    return IntegrityError(
        f"node {node} keeps another state of {what} after step {step} than was trained (its digest differs)"
    )


def _lease_s(job_toml: str, run_id: str) -> float:
    return parse_job(job_toml, source=f"the job of run {run_id}").runtime.lease_s


def _snapshot_metadata(run_id: str, placement_number: int) -> dict[str, str]:
    return {"run": run_id, "epoch": str(placement_number)}  # nodes compare it, so the key keeps its old name


def read_ahead(folder: Path, blocks: range) -> int:
    """Ask the kernel to read the tensors of some blocks from the disk into free memory.

    Returns:
        Bytes asked for; 0 on a system without ``posix_fadvise``.

    Raises:
        ModelError: the folder is no model's, or not readable.
        IntegrityError: a file of it is damaged.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    family, ahead_bytes = family_named(read_config(folder)["model_type"]), 0
    prefixes = tuple(f"{family.block_prefix}{block}." for block in blocks)
    for name, stored in read_headers(folder).items():
        if prefixes and base_name(name, family).startswith(prefixes):
            with stored.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), stored.info.offset, stored.info.nbytes, os.POSIX_FADV_WILLNEED)
            ahead_bytes += stored.info.nbytes
    return ahead_bytes


def _own_copies(parts: RunShards | None, node: str) -> RunShards:
    if parts is None:
        raise UsageError(f"node {node} has no folder for checkpoints; start it with --state DIR")
    return parts
