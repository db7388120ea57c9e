"""Access list of a run: which node may make which call to which other node, with which part of the run.

A certificate says who a caller is; this list says with which part of the run it may call. It follows from what each
node gets with ``Inspect``, ``Prepare`` and ``Move``, so no message carries it. A call without a row is refused. The
rows of node b in placement 3, with the slices a [0, 3), b [3, 6), the owners a and b, turns of 5 steps, 40 steps::

    Ring.Link         a   as in the schedule
    Snapshots.Keep    a   ends of turns, placement 3, blocks 0 to 2, steps 5 to 40
    Snapshots.Keep    a   ends of turns, placement 3, the head, steps 5 to 40

and once the run moves to placement 4, with a host c of the blocks [4, 6)::

    Snapshots.Fetch   c   the pause, placement 3, blocks 4 and 5

Of the steps of copies only those count that may have been granted: at most ``AHEAD`` turns beyond the newest turn that
this node was granted. The copy of a checkpoint may arrive any number of turns later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from ringtune.errors import TrustError
from ringtune.schedule.lowering import links
from ringtune.schedule.migration import TURNS_KEPT, copied_from, head_holders
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import ITEMS_AHEAD, StartPoint
from ringtune.texts import shown


class NodeCall(StrEnum):
    """A call between nodes with rows in the list."""

    LINK = "Ring.Link"
    PROBE = "Probe.Link"
    KEEP = "Snapshots.Keep"
    FETCH = "Snapshots.Fetch"


class State(StrEnum):
    """The kind of trained state that is sent or fetched.

    ``TURN`` is the end of a train turn, in memory; ``PAUSE`` is of a run that rests, in memory; ``DISK`` is of a
    checkpoint or the end of a turn; ``AUDIT`` is what is kept of a turn until it is checked.
    """

    NONE = ""
    TURN = "ends of turns"
    PAUSE = "the pause"
    DISK = "files on its disk"
    AUDIT = "what is kept for the audit"


class CopyBytes(NamedTuple):
    """Planned bytes of trained state with optimizer state: of one block, and of the head; 0 = not planned.

    With adapters of several users those of a block have the room for the names of all but one of them, too.
    """

    block: int = 0
    head: int = 0


NOT_PLANNED: Final = CopyBytes()
MAX_COPY_BYTES: Final = 1 << 30
"""Most bytes of state that is received into memory where nothing is planned; adapters have some megabytes."""
_MAX_DISK_BYTES: Final = 1 << 38
HEADER_BYTES: Final = 1 << 16
"""Room for names, shapes and step counts of one block, of one user, or of the head in a file."""
AHEAD: Final = TURNS_KEPT + ITEMS_AHEAD
"""Train turns of the newest grant of one node beyond that of another, at most: grants arrive at one before another."""


class RequestedCall(NamedTuple):
    """One call, as its caller describes it.

    Attributes:
        placement_number: in which the state was trained.
        blocks: of the state; none with ``is_head``.
    """

    call: NodeCall
    node: str
    run_id: str = ""
    state: State = State.NONE
    placement_number: int = 0
    blocks: tuple[int, ...] = ()
    is_head: bool = False
    step: int = 0

    @property
    def text(self) -> str:
        """The part of the run in words."""
        if self.state is State.NONE:
            return f"run {shown(self.run_id)}"
        what = "the head" if self.is_head else f"blocks {[*self.blocks]}"
        return f"{what} after step {self.step} in placement {self.placement_number} of run {shown(self.run_id)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessRight:
    """A row of the list.

    Attributes:
        placement_number: in which the state was trained; None = any.
        blocks: that the state may have; None = any.
        is_head: whether the state may be the head; with ``blocks`` None it may be both.
        steps: ends of turns, the last one is ``steps.stop - 1``; None = any.
        within: most steps of such an end beyond the newest granted one; 0 = no limit.
    """

    call: NodeCall
    node: str
    run_id: str
    state: State = State.NONE
    placement_number: int | None = None
    blocks: tuple[int, ...] | None = None
    is_head: bool = False
    steps: range | None = None
    within: int = 0
    max_bytes: int = 0

    def problem(self, asked: RequestedCall, granted_step: int = 0) -> str:
        """Say what of a call of this node is not in the row; empty if all is."""
        if asked.run_id != self.run_id:
            return f"its part is in run {self.run_id}"
        if asked.state is not self.state:
            return f"its part is {self.state or 'without state'}"
        if self.placement_number not in (None, asked.placement_number):
            return f"its part is in placement {self.placement_number}"
        if self.blocks is not None and (self.is_head != asked.is_head or not {*asked.blocks} <= {*self.blocks}):
            return f"its part is {'the head' if self.is_head else f'blocks {[*self.blocks]}'}"
        if self.steps is not None and asked.step not in self.steps:
            after, last = self.steps.start - self.steps.step, self.steps.stop - 1
            if not after < asked.step == last:  # the last turn may be short
                return f"its part is at ends of turns after step {after}, up to step {last}"
        if self.within and asked.step - granted_step > self.within:
            return f"the newest turn that was granted here ends with step {granted_step}"
        return ""


def require_right(
    rights: Iterable[AccessRight], asked: RequestedCall, *, node: str, granted_step: int = 0
) -> AccessRight:
    """Return the row that permits a call to ``node``; ``granted_step`` is the end of the newest turn granted to it."""
    problem = "the run gives it no part in this call"
    of_caller = [right for right in rights if (right.call, right.node) == (asked.call, asked.node)]
    for right in sorted(of_caller, key=lambda right: right.is_head is asked.is_head):
        problem = right.problem(asked, granted_step)
        if not problem:
            return right
    raise TrustError(
        f"node {node} refuses {asked.call} of node {shown(asked.node)}, {asked.text}: {problem}; use one version on "
        "all machines, and remove a node that does this unasked ('ringtune nodes remove NAME')"
    )


# ---- the rows --------------------------------------------------------------------------------------


def inspected_rights(run_id: str, nodes: Collection[str], *, shards_run: str = "") -> tuple[AccessRight, ...]:
    """Return the rows of nodes that the coordinator names before there is a plan.

    They may measure their links, and with ``shards_run`` fetch what was saved of that run.
    """
    rights = [AccessRight(call=NodeCall.PROBE, node=node, run_id=run_id) for node in nodes]
    if shards_run:
        rights += [
            AccessRight(
                call=NodeCall.FETCH,
                node=node,
                run_id=shards_run,
                state=State.DISK,
                is_head=True,
                max_bytes=_MAX_DISK_BYTES,
            )
            for node in nodes
        ]
    return tuple(rights)


def link_rights(run_id: str, plan: Plan, node: str, start: StartPoint | None) -> tuple[AccessRight, ...]:
    """Return the rows of the nodes that open links to a node; ``start`` is the point where the run continues."""
    sources = sorted(source for source, target in links(plan, start) if target == node)
    return tuple(AccessRight(call=NodeCall.LINK, node=source, run_id=run_id) for source in sources)


def copy_rights(
    run_id: str, plan: Plan, node: str, start: StartPoint | None, sizes: CopyBytes = NOT_PLANNED
) -> tuple[AccessRight, ...]:
    """Return the rows of the nodes that send a node copies of their trained state in this placement."""
    if not plan.placement.copies:
        return ()
    course, number = plan.course, plan.placement.placement_number
    done, length = start.step if start else 0, course.local_iterations
    steps = range((done // length + 1) * length, course.num_steps + 1, length)
    state = State.TURN if plan.goes_back else State.DISK
    kept: list[tuple[str, tuple[int, ...], bool]] = [
        (source, blocks, False) for source, blocks in copied_from(plan.placement, node).items()
    ]
    if plan.goes_back:
        owners = (owner.node for owner in course.owners)
        kept += [(owner, (), True) for owner in owners if node in head_holders(course, plan.placement, owner)]
    return tuple(
        AccessRight(
            call=NodeCall.KEEP,
            node=source,
            run_id=run_id,
            state=state,
            placement_number=number,
            blocks=blocks,
            is_head=is_head,
            steps=steps,
            within=AHEAD * length,
            max_bytes=copy_limit(sizes, len(blocks), has_head=is_head, on_disk=state is State.DISK),
        )
        for source, blocks, is_head in kept
    )


def fetch_rights(
    run_id: str, plan: Plan, start: StartPoint, from_placement_number: int, from_step: int | None
) -> tuple[AccessRight, ...]:
    """Return the rows of the nodes of a placement to which a run moves, or in which it recovers.

    Each may fetch the state of its own blocks, and the owner that will have the head the head, as it was trained in
    the placement ``from_placement_number``. With ``from_step`` the run recovers from the copies after so many steps.
    """
    state, step = (State.PAUSE, 0) if from_step is None else (State.TURN, from_step)
    states = [(node, plan.placement.held_at(node), False) for node in plan.nodes]
    if from_step is not None:
        states.append((start.holder, (), True))
    return tuple(
        AccessRight(
            call=NodeCall.FETCH,
            node=node,
            run_id=run_id,
            state=state,
            placement_number=from_placement_number,
            blocks=blocks,
            is_head=is_head,
            steps=range(step, step + 1),
            max_bytes=MAX_COPY_BYTES,
        )
        for node, blocks, is_head in states
    )


def audit_rights(run_id: str, plan: Plan, node: str) -> tuple[AccessRight, ...]:
    """Return the rows of the hosts that repeat work of others, and fetch what goes into it."""
    return tuple(
        AccessRight(
            call=NodeCall.FETCH,
            node=piece.node,
            run_id=run_id,
            state=State.AUDIT,
            placement_number=plan.placement.placement_number,
            max_bytes=MAX_COPY_BYTES,
        )
        for piece in plan.placement.hosts
        if piece.node != node
    )


def copy_limit(sizes: CopyBytes, num_blocks: int, *, has_head: bool = False, on_disk: bool = False) -> int:
    """Return the most bytes of a file with the state of some blocks, or the head."""
    if planned := sizes.head if has_head else num_blocks * sizes.block:
        return min(_MAX_DISK_BYTES, planned + (num_blocks + 1) * HEADER_BYTES)
    return _MAX_DISK_BYTES if on_disk else MAX_COPY_BYTES
