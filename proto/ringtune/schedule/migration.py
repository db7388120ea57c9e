"""Changes of a run in progress: the next placement, copies of ends of turns, and the loss of an owner.

A run with turns of 5 steps and a second placement from turn 3 on, with nodes a and b::

    placement 0   a [0,3)  b [3,6)    steps 0 to 14
    placement 1   a [0,1)  b [1,6)    steps 15 on: a sends its trained blocks among 1 and 2 to b

Weights, moments, step counts and projection vectors of trained blocks are sent. The head stays at its owner, and base
weights are in the node's own folder, or fetched by digest from any node that has them.

``CopyHolders``: each host keeps a copy for the host before it in the ring, so that a run can return to the end of the
last committed turn; with ``Placement.num_copies`` so many nodes do, on other racks.
A run on a [0,3), b [3,6) after a turn in which the blocks 2 to 5 have trained::

    blocks 2        kept by a, a copy by b
    blocks 3 to 5   kept by b, a copy by a, the next host in the ring
    head            kept by the owner of the turn, a copy by the next owner

With a [0,3), b [3,5), c [5,6) b keeps a copy for a, c for b, and a for c. Hosts of one stage are copies of one another
already. A host that fetched blocks in a recovery keeps them too.
A helper's copies are at the hosts of the blocks: with z as the helper of b, b keeps what z has trained.

``without_owner``: the turns of a lost owner are left out. Owners a, b and c, turns of 10 steps, 90 steps; owner b is
lost when 40 steps are committed::

    before    a b c a | b c a b c       the run ends with step 90
    after     a b c a | c a c           the run ends with step 70

The other owners keep their turns and batches, in the same order; steps are numbered without gaps. Values that depend on
the number of steps, such as a linear learning rate, use the new number.

``with_owner``: a lost owner's turns count again. Those that were due while it was away are missed. The same run, of
which b is back when 60 steps are committed::

    before    a b c a | c a | c         the run ends with step 70
    after     a b c a | c a | b c       the run ends with step 80: b has missed one of its three turns
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Placement
from ringtune.schedule.run_shape import DroppedOwner, latest_turn, next_owner, turn_counts, turns_up_to, weights
from ringtune.schedule.turns import StepKind, Turn, turns_had
from ringtune.schedule.versions import adds_up, may_be_stale, was_trained

TURNS_KEPT: Final = 3
"""Train turns with kept ends at a node: the committed one, and two that may be granted since."""


def copy_holders(placement: Placement, node: str) -> tuple[str, ...]:
    """Return the nodes that keep copies of a host's trained blocks, in the order in which they get them.

    The next host in the ring, or ``Placement.num_copies`` nodes: first those on racks that have no copy yet, in ring
    order, then any. Replicas of a stage count as copies of one another, and the first of them sends further ones.

    Example: on a [0,3), b [3,6) b keeps a copy for a, and a for b. For a host of all blocks a helper does, if any. With
    two copies on a, b, c, d, of which a and b share a rack, c and d keep copies for a, and c and a for b.
    """
    hosted = placement.slice_of(node)
    stage = tuple(piece.node for piece in placement.hosts if (piece.start, piece.stop) == (hosted.start, hosted.stop))
    if not hosted.num_blocks or stage[0] != node:
        return ()
    return _spread(placement, stage, placement.hosts_after(node), max(1, placement.num_copies) - len(stage) + 1)


def _spread(placement: Placement, having: tuple[str, ...], candidates: Iterable[str], number: int) -> tuple[str, ...]:
    """Choose ``number`` candidates, then other members, as far as there are any; first those on racks without a copy.

    ``having`` are the nodes that have the state without a copy. A node without a named rack is on one of its own.
    """
    racks, spread = dict(placement.racks), list[str]()
    used = {racks.get(node, f"/{node}") for node in having}
    left = [node for node in dict.fromkeys((*candidates, *placement.members)) if node not in having]
    while left and len(spread) < number:
        chosen = next((node for node in left if racks.get(node, f"/{node}") not in used), left[0])
        left.remove(chosen)
        spread.append(chosen)
        used.add(racks.get(chosen, f"/{chosen}"))
    return tuple(spread)


def copies_of(placement: Placement, node: str) -> dict[str, tuple[int, ...]]:
    """Return the nodes that keep copies of what a node trains, with the blocks of each copy, ascending.

    Blocks that it trains for their host are copied to this host and further nodes, own ones to ``copy_holders``.
    """
    piece, by_holder = placement.slice_of(node), dict[str, list[int]]()
    own_holders = copy_holders(placement, node)
    for block in placement.trained_at(node):
        host = placement.host_of(block)
        is_own = piece.start <= block < piece.stop
        others = (
            () if is_own else _spread(placement, (node, host), placement.hosts_after(host), placement.num_copies - 1)
        )
        for holder in own_holders if is_own else (host, *others):
            by_holder.setdefault(holder, []).append(block)
    return {holder: tuple(blocks) for holder, blocks in by_holder.items()}


def copied_from(placement: Placement, node: str) -> dict[str, tuple[int, ...]]:
    """Return the nodes of which a node keeps copies, with the blocks; see ``copies_of``."""
    blocks_of = {name: copies_of(placement, name).get(node, ()) for name in placement.members}
    return {name: blocks for name, blocks in blocks_of.items() if blocks}


def wait_reason(course: Course, owner: str) -> str:
    """Say why a run can't continue without an owner's rows; empty if it can."""
    if len(course.owners) == 1:
        return f"no other node than {owner} owns rows"
    if course.may_skip:
        return "its table of operations is for the batches of all owners"
    return ""


def without_owner(course: Course, node: str, num_turns: int) -> Course:
    """Return the course without an owner's turns after the first ``num_turns`` train turns; raises ``PlanError``."""
    at = next((index for index, owner in enumerate(course.owners) if owner.node == node), -1)
    problem = f"{node} owns no rows" if at < 0 else wait_reason(course, node)
    if problem:
        raise PlanError(f"the turns of node {node} can't be left out: {problem}")
    shares, length = weights(course.owners, course.turns), course.local_iterations
    total = course.turns_of_owners(course.turns_of(course.num_steps))
    had = turn_counts(shares, min(course.turns_of_owners(num_turns), total))[at]
    left = turn_counts(shares, total)[at] - had
    steps = left * length
    if left and next_owner(shares, turn_counts(shares, total - 1)) == at:
        steps -= -course.num_steps % length  # the last turn may be short
    lost = DroppedOwner(owner=course.owners[at], at=at, turns=had, keeps_users=bool(course.user_sets))
    return dataclasses.replace(
        course,
        owners=tuple(owner for owner in course.owners if owner.node != node),
        left_out=(*course.left_out, lost),
        num_steps=course.num_steps - steps,
    )


def rows_reason(course: Course, owner: str, step: int, decided: tuple[int, ...] = ()) -> str:
    """Say why a run can't leave out an owner's rows after ``step`` steps; empty if it can.

    ``decided`` are the unfreezing decisions of the run until then.
    """
    if why := wait_reason(course, owner):
        return why
    ends = without_owner(course, owner, course.turns_of(step)).num_steps == step
    if ends and adds_up(course.decided(decided), step):
        return "all turns that are left are its own, and gradients are added up for an update that ends them"
    return ""


def with_owner(course: Course, node: str, num_turns: int, num_steps: int) -> Course:
    """Return the course with an owner's turns again, after the first ``num_turns`` train turns; raises ``PlanError``.

    Its turns that come before one that was done are missed. ``num_steps`` is that of a run with all owners.
    """
    if node not in (dropped.owner.node for dropped in course.absent):
        raise PlanError(f"the turns of node {node} can't count again: they are not left out")
    every = course.all_owners
    shares, at = weights(every, course.turns), [owner.node for owner in every].index(node)
    turns = turns_up_to(latest_turn(shares, turns_had(course, num_turns)), shares, at)
    place = sum(owner in course.owners for owner in every[:at])
    changed = dataclasses.replace(
        course,
        owners=(*course.owners[:place], every[at], *course.owners[place:]),
        left_out=(*course.left_out, DroppedOwner(owner=every[at], at=place, turns=turns, back=num_turns)),
    )
    return dataclasses.replace(changed, num_steps=reduced_num_steps(changed, num_steps))


def return_reason(course: Course, node: str, step: int, num_steps: int) -> str:
    """Say why a lost owner's turns do not count again after ``step`` steps; empty if they can.

    ``num_steps`` is that of a run with all owners.
    """
    again = with_owner(course, node, course.turns_of(step), num_steps)
    if again.user_sets != course.user_sets:
        return "the adapters of its users were lost with it, as it was left out by an earlier version"
    return "" if again.num_steps > course.num_steps else "none of its turns is left"


def reduced_num_steps(course: Course, num_steps: int) -> int:
    """Number of steps of a run with left-out owners that would have ``num_steps`` with all of them."""
    length, owners = course.local_iterations, course.all_owners
    out = {dropped.owner.node: dropped.turns for dropped in course.absent}
    shares, total = weights(owners, course.turns), course.turns_of(num_steps)
    counts = turn_counts(shares, total)
    turns = [out.get(owner.node, count) for owner, count in zip(owners, counts, strict=True)]
    last = next_owner(shares, turn_counts(shares, total - 1)) if total else 0  # its last turn may be short
    num_turns = sum(turns) - sum(course.missed.values())
    return max(0, num_turns * length - (-num_steps % length if turns[last] == counts[last] else 0))


def course_before(course: Course, num_steps: int) -> Course:
    """Return the course before its last owner was lost or came back. ``num_steps`` is that of a run with all owners."""
    last, owners = course.left_out[-1], [*course.owners]
    if last.back is None:
        owners.insert(last.at, last.owner)
    else:
        owners.pop(last.at)
    before = dataclasses.replace(course, owners=tuple(owners), left_out=course.left_out[:-1])
    return dataclasses.replace(before, num_steps=reduced_num_steps(before, num_steps))


def head_holders(course: Course, placement: Placement, owner: str) -> tuple[str, ...]:
    """Return the nodes that copy the head at the end of an owner's turn: the next owner; none if there is no other.

    With ``Placement.num_copies`` so many nodes: owners in the order of their turns, then hosts; racks without a copy
    first.
    """
    names = [each.node for each in course.owners]
    if owner not in names:
        return ()
    at = names.index(owner)
    others = (*names[at + 1 :], *names[:at])
    if not placement.num_copies:
        return others[:1]
    return _spread(placement, (owner,), others, placement.num_copies)


def shared_racks(course: Course, placement: Placement) -> tuple[str, ...]:
    """Return the nodes, in order, that have fewer copies than planned, or some that share a rack.

    These are hosts with their blocks, and owners with the head.
    """
    sharing, racks = list[str](), dict(placement.racks)
    for node in dict.fromkeys((*(piece.node for piece in placement.hosts), *(owner.node for owner in course.owners))):
        hosted = placement.slice_of(node)
        stage = [piece.node for piece in placement.hosts if (piece.start, piece.stop) == (hosted.start, hosted.stop)]
        groups = [(stage[0], *stage[1:], *copy_holders(placement, stage[0]))] if hosted.num_blocks else []
        if course.owner(node) is not None and not course.method.full_parameters:
            groups.append((node, *head_holders(course, placement, node)))
        places = [{racks.get(name, f"/{name}") for name in group} for group in groups]
        if any(len(each) <= placement.num_copies for each in places):
            sharing.append(node)
    return tuple(sharing)


_ONE = "give the plan one placement"


class Source(NamedTuple):
    """Blocks ``[start, stop)`` that a node takes over from another one, perhaps itself.

    ``sha256`` is the digest of the shard on that node's disk; empty = in memory, or in files beside shards.
    """

    node: str
    start: int
    stop: int
    sha256: str = ""


def check_placements(course: Course, placements: Sequence[Placement]) -> None:
    """Refuse placements that a run of the course can't have one after another; raises ``PlanError``."""
    if not placements:
        raise PlanError("a plan has at least one placement, this one has none; make it anew with 'ringtune plan'")
    first = placements[0]
    if first.first_turn and not first.placement_number:
        raise PlanError(
            f"placement {first.placement_number} holds from turn {first.first_turn} on; placement 0 has to hold "
            "from turn 0"
        )
    for before, after in itertools.pairwise(placements):
        if after.placement_number <= before.placement_number or after.first_turn <= before.first_turn:
            raise PlanError(
                f"placement {after.placement_number} from turn {after.first_turn} on comes after placement "
                f"{before.placement_number} from turn {before.first_turn} on; numbers count up, and "
                "each begins at a later turn"
            )
        if after.private_blocks != before.private_blocks:
            raise PlanError(
                f"placement {after.placement_number} has {after.private_blocks} private blocks, the one before "
                f"{before.private_blocks}; give all placements the same number"
            )
        if (after.recompute, after.state_on_disk) != (before.recompute, before.state_on_disk):
            raise PlanError(
                f"placement {after.placement_number} runs other blocks again than the one before; give both the "
                "same ranges"
            )
    if len(placements) > 1 and (problem := stay_reason(course, from_disks=True)):
        raise PlanError(f"a run can't move to another placement: {problem}; {_ONE}")


def stay_reason(course: Course, *, from_disks: bool = False) -> str:
    """Say why a course can't move to another placement; empty if it may.

    With ``from_disks`` it moves between two runs: nodes take over from files, with nothing in memory yet.
    """
    if course.method.full_parameters and not from_disks:
        return f"{course.method.name} trains all parameters, which do not fit beside those of the next slice"
    if may_be_stale(course):
        return f"the result of {course.method.name} depends on the ring"
    return ""


def first_step(course: Course, placement: Placement) -> int:
    """First step of a placement."""
    return placement.first_turn * course.local_iterations


def due(course: Course, placements: Sequence[Placement], turn: Turn) -> int:
    """Return the number of the placement for a turn.

    A checkpoint, and evaluations, after the last train turn of a placement are still in it; scores are in that of the
    following train turn.
    """
    comes_before = turn.kind in (StepKind.TRAIN, StepKind.SCORE)
    holding = [
        each.placement_number
        for each in placements
        if not each.first_turn
        or (step := first_step(course, each)) < turn.first_step
        or (step == turn.first_step and comes_before)
    ]
    return max(holding, default=placements[0].placement_number)


def sources(course: Course, before: Placement, after: Placement, node: str, step: int) -> tuple[Source, ...]:
    """Return the blocks that a node takes over when a run moves after ``step`` steps, with their sources, ascending.

    Blocks that were not trained yet are equal on all nodes, and are not sent.
    """
    had = before.trained_at(node)
    return joined(
        Source(node if block in had else before.trainer_of(block), block, block + 1)
        for block in after.held_at(node)
        if was_trained(course, block, step)
    )


def joined(parts: Iterable[Source]) -> tuple[Source, ...]:
    """Join adjacent ranges of blocks that are equal otherwise, such as those of one node."""
    sources: list[Source] = []
    for part in parts:
        if (
            sources
            and sources[-1]._replace(start=part.start, stop=part.stop) == part
            and sources[-1].stop == part.start
        ):
            sources[-1] = sources[-1]._replace(stop=part.stop)
        else:
            sources.append(part)
    return tuple(sources)


def trained_blocks(course: Course, placement: Placement, node: str, turn: Turn) -> tuple[int, ...]:
    """Return the blocks that a node has trained until the end of a turn, ascending."""
    settled = turn.settled(course)
    return tuple(block for block in placement.trained_at(node) if was_trained(settled, block, turn.end_step))


class CopyHolders:
    """Nodes with the state of every trained block at the end of one turn.

    Attributes:
        step: optimizer steps done then; None = there is no turn to return to.
        holder: this owner, or if it is lost a node with a copy of the head.
        decided: unfreezing decisions of the run until then.
        digests: of trained blocks, and of the head as unit ``Course.head``, then; as the nodes said that trained them.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.owner = ""
        self._heads: tuple[str, ...] = ()
        self.decided: tuple[int, ...] = ()
        self.digests: dict[int, str] = {}
        self._nodes: dict[int, tuple[str, ...]] = {}
        self._said: dict[int, dict[tuple[str, int], str]] = {}  # turn -> node and unit -> digest

    def begin(self, holder: str) -> None:
        """Start at step 0: nothing was trained yet, so the run can begin again."""
        self.step, self.owner, self._heads = 0, holder, (holder,)

    @property
    def holder(self) -> str:  # noqa: D102 - an attribute of the class
        return self._heads[0] if self._heads else ""

    def head_owner(self, owners: Sequence[str]) -> str:
        """Return the owner of ``owners`` that continues with the head: the one that had it, else one that keeps it."""
        return next((node for node in (self.owner, *self._heads, *owners) if node in owners), "")

    def note(self, node: str, turn: int, digests: Iterable[tuple[int, str]]) -> None:
        """Note the digests of units that a node has given others to keep at the end of a turn."""
        self._said.setdefault(turn, {}).update(((node, unit), sha256) for unit, sha256 in digests)

    def commit(self, course: Course, placement: Placement, turn: Turn) -> None:
        """Note the end of a train turn that every node has finished and kept."""
        said = self._said.get(turn.index, {})
        self._said = {index: digests for index, digests in self._said.items() if index > turn.index}
        self.digests = {
            unit: sha256
            for (node, unit), sha256 in said.items()
            if node == (turn.owner if unit == course.head else placement.trainer_of(unit))
        }
        self.step, self.decided = turn.end_step, turn.unfreeze_at
        self.owner = turn.owner
        self._heads = (turn.owner, *head_holders(course, placement, turn.owner))
        self._nodes = {}
        for node in placement.members:
            copies = copies_of(placement, node)
            for block in trained_blocks(course, placement, node, turn):
                holders = (holder for holder, blocks in copies.items() if block in blocks)
                self._nodes[block] = (*self._nodes.get(block, ()), node, *holders)

    def fetched(self, node: str, sources: Iterable[Source]) -> None:
        """Note that a node has fetched, and keeps, blocks of the committed turn."""
        for source in sources:
            for block in range(source.start, source.stop):
                self._nodes[block] = tuple(dict.fromkeys((*self._nodes[block], node)))

    def head_source(self, node: str) -> str:
        """Return the node from which to fetch the head; empty if ``node`` has it, or it was not trained yet."""
        return "" if not self.step or node in self._heads else self.holder

    def fetched_head(self, node: str) -> None:
        """Note that a node has fetched, and keeps, the head."""
        self._heads = (node, *(each for each in self._heads if each != node))

    def other_sources(self, sources: Iterable[Source]) -> tuple[Source, ...]:
        """Return further nodes that keep the blocks of ``sources``, a block each."""
        return tuple(
            Source(node, block, block + 1)
            for source in sources
            for block in range(source.start, source.stop)
            for node in self._nodes[block]
            if node != source.node
        )

    def other_head(self, node: str) -> str:
        """Return a node that keeps the head besides ``node`` and its ``head_source``; empty if there is none."""
        first = self.head_source(node) or node
        return next((each for each in self._heads if each not in (node, first)), "") if self.step else ""

    def lose(self, node: str) -> None:
        """Note that a node is lost."""
        self._nodes = {block: tuple(each for each in nodes if each != node) for block, nodes in self._nodes.items()}
        self._heads = tuple(each for each in self._heads if each != node)

    @property
    def missing(self) -> tuple[int, ...]:
        """Trained blocks that no living node keeps."""
        return tuple(sorted(block for block, nodes in self._nodes.items() if not nodes))

    def sources(self, placement: Placement, node: str) -> tuple[Source, ...]:
        """Return the sources of a node's trained blocks in a placement, own and helped: itself if it keeps them."""
        return joined(
            Source(node if node in self._nodes[block] else self._nodes[block][0], block, block + 1)
            for block in placement.held_at(node)
            if block in self._nodes
        )
