"""A node's part in a move of its run: rest, then build another slice and go on with what was trained.

::

    fetch   the base weights of the next slice come, while the run trains (``ahead``)
    rest    the loop stands still, and what the slice has trained is kept and offered to others
    move    blocks of others come in, the old slice is let go, the new one is built, links are opened
    grant   the first turn after it: what was kept is let go

The old slice goes before the new one is built, so that a move never needs the memory of both. What was trained stays in
memory all the time; going back to the old placement is a move to it, from the node's own snapshot.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from edge.agent.active_run import ActiveRun
from edge.agent.moving.fetch import fetch, fetch_head
from edge.agent.moving.from_disks import take_from_disks
from edge.agent.moving.keeping import TurnKeeper
from edge.agent.moving.kept import KeptFile, KeptTurns
from edge.agent.moving.leaving import save_turns
from edge.agent.moving.shelf import SnapshotShelf
from edge.agent.open_links import check_private
from edge.agent.snapshots import TakenOver
from edge.agent.torch_side import Workshop
from edge.agent_options import AgentOptions
from edge.run.loop import AgentRun
from edge.shards.block_files import metadata
from edge.shards.parts import SavedParts
from edge.shards.saver import GoesOn, Saver, finish_run, saved_parts
from ringtune.errors import ConnectionFailedError, DeadlineError, InterruptedRunError, StorageError
from ringtune.files.pieces import Pieces
from ringtune.files.strict import read_object
from ringtune.jobs.job import Job, parse_job
from ringtune.schedule.changing_hands.placements import Source
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint, Turn

_LOG = logging.getLogger(__name__)
_FLUSH_S = 5.0
# The rest is for the way of the answer: a node that waits for another one in vain says for whom.
_SHARE = 0.9


class NextPlacement(NamedTuple):
    """The placement to which a node moves.

    Attributes:
        run_id: of the run.
        placement_number: of the placement.
        plan_json: the part of the plan.
        job_toml: of the run.
        addresses: ``host:port`` of the nodes of both placements.
        shards_run: under which run shards of checkpoints are kept.
        start: where the run goes on.
        from_placement_number: of the placement in which the sources hosted the blocks.
        sources: the trained blocks that the node takes over.
        from_step: the run recovers, and they are taken as they were kept after so many steps; None = it moves.
        head_from: the node from which the head comes as it was kept then; empty = from nobody.
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


class Host(Protocol):
    """The part of ``edge.agent.agent.Agent`` that a move needs."""

    options: AgentOptions

    def current(self) -> ActiveRun | None:
        """Return the run that is prepared or under way; None if there is none."""

    def of(self, run_id: str, placement_number: int | None) -> tuple[ActiveRun, AgentRun]:
        """Return a run and its loop."""

    def workshop(self) -> Workshop:
        """Return the part that needs torch."""

    def adopt(self, run_id: str, placement_number: int, plan: Plan, start: StartPoint | None) -> ActiveRun:
        """Make this the agent's run."""

    def begin(
        self, active: ActiveRun, job_toml: str, addresses: Mapping[str, str], deadline_s: float, *, taken: TakenOver
    ) -> None:
        """Prepare a run with what was taken over."""

    def end(self, active: ActiveRun, reason: str) -> None:
        """Stop a run and drop what it holds."""


class AgentMoves:
    """The moves of the run of an agent.

    Args:
        agent: whose run it is.
        node: its name.
    """

    def __init__(self, agent: Host, node: str) -> None:
        self.shelf, self.kept = SnapshotShelf(node), KeptTurns(node)
        self._agent, self._node = agent, node
        self._lock = threading.Lock()
        self._num_calls = 0
        self._left = ("", "")
        self._place = ("", "")

    def rest(self, run_id: str, placement_number: int, *, timeout_s: float) -> str:
        """Keep what the slice has trained, and offer it; a lost link does not end the run from here on.

        Returns:
            The totals of the placement, as JSON.

        Raises:
            FrameError: this run or placement is not the one that is prepared here.
        """
        active, run = self._agent.of(run_id, placement_number)
        active.is_resting = True
        metadata = _snapshot_metadata(run_id, placement_number)

        def keep() -> Any:
            return self._agent.workshop().snapshot(active, metadata)

        self.shelf.put(run_id, placement_number, run.call(keep, timeout_s=timeout_s, what="its snapshot"))
        if active.reporter is not None:
            active.reporter.flush(min(_FLUSH_S, timeout_s))
        return json.dumps(active.figures())

    def keeper(self, active: ActiveRun, job: Job, addresses: Mapping[str, str]) -> TurnKeeper | None:
        """Make what keeps the ends of the turns of a run; None where its placement has no copies."""
        if not active.plan.placement.copies:
            return None
        saver = active.saver
        self._place = saver.place if saver is not None else ("", "")
        has_checkpoints = saver is not None and active.plan.course.checkpoint_every > 0
        return TurnKeeper(
            active.run_id,
            self._node,
            active.plan,
            active.executor,
            self.kept,
            make_file=self._agent.workshop().kept_file,
            addresses=addresses,
            patience_s=job.runtime.lease_s,
            on_lost=active.on_link_lost,
            save=self._saving(active.run_id, saver) if saver is not None and has_checkpoints else None,
        )

    def _saving(self, run_id: str, saver: Saver) -> Callable[[KeptFile], None]:
        """Make what puts a copy of another node on this node's disk; a full disk costs the copy, not the run."""

        def save(file: KeptFile) -> None:
            try:
                saver.parts().write(file.step, run_id, file.content, is_head=file.is_head)
            except StorageError as error:
                _LOG.warning("node %s keeps no copy on its disk: %s", self._node, error)

        return save

    def save(self) -> None:
        """Put all that is kept of the ends of turns on the disk; on the compute thread, after the run has ended."""
        attempt, files = self.kept.everything()
        shards_run, rows = self._place
        state = self._agent.options.state
        if files and shards_run and state is not None:
            save_turns(state, self._node, shards_run, attempt, files, rows=rows)

    def saved(self, run_id: str) -> SavedParts | None:
        """Return the files on this node's disk of a run; None where it has no folder."""
        return saved_parts(self._agent.options.state, self._node, run_id)

    def from_disks(
        self, goes_on: GoesOn | None, job_toml: str, addresses: Mapping[str, str], deadline_s: float
    ) -> TakenOver | None:
        """Take what a run goes on from off the disks of its nodes; None where it begins, or this node's shard has it.

        Raises:
            RingTuneError: as for ``take_from_disks``.
        """
        if goes_on is None or goes_on.saved is None:
            return None
        return take_from_disks(
            self._agent.options,
            goes_on,
            goes_on.saved,
            addresses,
            deadline_s,
            self._check,
            lease_s=_lease_s(job_toml, goes_on.run_id),
        )

    def halt(self, run_id: str, *, timeout_s: float) -> None:
        """Stop whatever this node does in a run, because another node is lost; its links stay open until it moves.

        Raises:
            DeadlineError: the action under way takes too long.
        """
        self._next_call()
        active = self._agent.current()
        if active is None or active.run_id != run_id:
            return
        active.is_resting = True
        if active.run is None:
            self._agent.end(active, "another node is lost")
            return
        active.run.stop("another node is lost")
        if not active.run.wait(_SHARE * timeout_s):
            raise DeadlineError(f"node {self._node}: waited {_SHARE * timeout_s:g} s for its last action to end")
        if active.reporter is not None:
            active.reporter.flush(min(_FLUSH_S, timeout_s))

    def move(self, to: NextPlacement, *, timeout_s: float) -> tuple[int, int]:
        """Build the slice of another placement, and go on with what was trained; who has no place in it only stops.

        Returns:
            Bytes of weights that were materialised, and bytes that came from other nodes' snapshots.

        Raises:
            RingTuneError: as for ``Agent.prepare``, or what was trained can't be taken over.
        """
        deadline_s = time.monotonic() + _SHARE * timeout_s
        number = self._next_call()
        plan = Plan.from_json(read_object(to.plan_json, "the plan that came"))
        if self._node not in plan.nodes:
            self._end_before(number, to.run_id)
            self._left = (to.run_id, to.shards_run)
            return 0, 0
        others = [source for source in to.sources if source.node != self._node]
        own = [source for source in to.sources if source.node == self._node]
        files = fetch(
            to.run_id,
            to.from_placement_number,
            others,
            to.addresses,
            deadline_s,
            self._check,
            step=to.from_step,
            lease_s=_lease_s(to.job_toml, to.run_id),
        )
        fetched_bytes = sum(file.size_bytes for file in files)
        if to.from_step is not None:
            self._begin_again(to, to.from_step)
            if to.head_from:
                fetched_bytes += self._fetch_head(to, to.from_step, deadline_s)
            taken = self._kept(to, to.from_step, files, others, own)
        else:
            taken = self._snapshot(to, files, own)
        with self._lock:
            self._end_before(number, to.run_id)
            self._left = ("", "")
            active = self._agent.adopt(to.run_id, to.placement_number, plan, to.start)
        active.is_resting = True
        self._agent.begin(active, to.job_toml, to.addresses, deadline_s, taken=taken)
        _LOG.info("run %s moved, blocks %s; %d bytes came", to.run_id, plan.slice_of(self._node).text, fetched_bytes)
        return int(active.executor.hosted_bytes), fetched_bytes

    def _snapshot(self, to: NextPlacement, files: tuple[Pieces, ...], own: Sequence[Source]) -> TakenOver:
        """What the node goes on with after a move: what it has now, and what others gave it."""
        head = None
        if own or to.start.holder == self._node:
            snapshot = self.shelf.get(to.run_id, to.from_placement_number)
            files += tuple(snapshot.part(source.start, source.stop) for source in own)
            head = snapshot.head if to.start.holder == self._node else None
        return TakenOver(files, _snapshot_metadata(to.run_id, to.from_placement_number), head, to.shards_run)

    def _kept(
        self, to: NextPlacement, step: int, files: tuple[Pieces, ...], others: Sequence[Source], own: Sequence[Source]
    ) -> TakenOver:
        """What the node goes on with in a recovery: all as it was kept after a step; it keeps what came, too."""
        for source, file in zip(others, files, strict=True):
            self.kept.keep(to.run_id, step, f"{source.node} {source.start}-{source.stop}", bytes(file))
        files += tuple(self.kept.part(to.run_id, step, source.start, source.stop) for source in own)
        head = self.kept.head(to.run_id, step) if step and to.start.holder == self._node else None
        return TakenOver(files, metadata(to.run_id, step), head, to.shards_run)

    def _begin_again(self, to: NextPlacement, step: int) -> None:
        """Keep what comes of this run, and forget what was done after a step."""
        self.kept.begin(to.run_id)
        self.kept.go_back(step, to.placement_number)

    def _fetch_head(self, to: NextPlacement, step: int, deadline_s: float) -> int:
        """Keep the head that another node has kept; return its bytes."""
        address = to.addresses.get(to.head_from, "")
        lease_s = _lease_s(to.job_toml, to.run_id)
        head = bytes(fetch_head(to.run_id, step, to.head_from, address, deadline_s, self._check, lease_s=lease_s))
        self.kept.keep_head(to.run_id, step, head)
        return len(head)

    def granted(self, active: ActiveRun, turns: Sequence[Turn]) -> None:
        """Let go of what was kept for a move once there are turns: the run trains again."""
        if active.is_resting and turns:
            active.is_resting = False
            self.shelf.drop(active.run_id)

    def release(self, run_id: str, *, is_finished: bool = False) -> None:
        """Let go of what is kept of a run, and of a move that is under way; empty = of any run.

        Shards of a run that ended well need not be kept for ever, also where this node has left it.
        """
        self._next_call()
        self.shelf.drop(run_id)
        self.kept.drop(run_id)
        left, shards_run = self._left
        if is_finished and left == run_id:
            finish_run(self._agent.options.state, self._node, shards_run)

    def _next_call(self) -> int:
        """Count the calls that end whatever move is under way."""
        with self._lock:
            self._num_calls += 1
            return self._num_calls

    def _end_before(self, number: int, run_id: str) -> None:
        """End the placement that this node has, unless another call came after that of this number.

        Raises:
            InterruptedRunError: another call came.
        """
        if number != self._num_calls:
            raise InterruptedRunError(f"run {run_id} goes on otherwise, so node {self._node} does not move")
        before = self._agent.current()
        if before is not None:
            self._agent.end(before, "the run moves")

    def _check(self, node: str, address: str) -> None:
        if not address:
            raise ConnectionFailedError(f"node {self._node} got no address of node {node}; let it join again")
        check_private(self._agent.options, node, address)


def _lease_s(job_toml: str, run_id: str) -> float:
    return parse_job(job_toml, source=f"the job of run {run_id}").runtime.lease_s


def _snapshot_metadata(run_id: str, placement_number: int) -> dict[str, str]:
    return {"run": run_id, "epoch": str(placement_number)}  # nodes compare it: the key stays
