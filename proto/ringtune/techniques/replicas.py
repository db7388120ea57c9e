"""Replicas (several hosts of the same blocks): parcels, copies, and comparison of copies by digests.

Blocks of replicas (``schedule.lowering``) are compared after their last update of a turn, copies once a sweep. Where
all parameters train, every owner does the same update of its own copy (``schedule.stages``). After the last update of a
unit in a sweep, each owner takes the digest of its copy, and reports it with the end of the turn. With 3 groups, turns
of 4 steps and the embedding first in a sweep::

    step                  0  1  2  3 | 4  5  6  7 | 8  9 10 11
    trains the embedding  x        x |       x    |    x
    turn compares it               x |       x    |    x        the later update, where a turn has two

Source: HiFT trains on one machine and has no copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from ringtune.errors import IntegrityError
from ringtune.schedule.actions import Payload
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import WAITING, is_replicated, item_updates
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import overlap
from ringtune.schedule.stages import other_owners, replicas, replicated_units
from ringtune.schedule.turns import StepKind, Turn, items
from ringtune.schedule.units import EMBEDDING, unit_name
from ringtune.schedule.versions import ever_trained, trained
from ringtune.techniques.base import Copies, Parcel, Technique, Term


class CopyDigest(NamedTuple):
    """The SHA-256, hex, of an owner's copy of a unit, or of a replica's blocks from ``unit`` on."""

    unit: int
    sha256: str


def compared_at(plan: Plan, turn: Turn, node: str) -> dict[int, int]:
    """The units that ``node`` compares with others at the end of a turn, each with ``seq`` of its last update.

    A replica's blocks have the number of the first block of the updated range.
    """
    if plan.course.owner(node) is not None and (copies := compared_copies(plan.course, turn)):
        return copies
    if turn.kind is not StepKind.TRAIN or not replicas(plan.placement, node):
        return {}
    now = turn.settled(plan)
    for item in reversed(items(now.course, turn)):
        updates = [each for each in item_updates(now, item, node) if is_replicated(now, node, each)]
        if updates:
            return {update.start: item.seq for update in updates}
    return {}


def compared_copies(course: Course, turn: Turn) -> dict[int, int]:
    """The copied units that are compared at the end of a turn, each with ``seq`` of its last update.

    Empty where one owner has the only copy.
    """
    seqs: dict[int, int] = {}
    if turn.kind is not StepKind.TRAIN or not other_owners(course, turn.owner):
        return seqs
    for item in items(course, turn):
        seqs |= {unit: item.seq for unit in replicated_units(course, item) if _is_last(course, unit, item.step)}
    return seqs


def _is_last(course: Course, unit: int, step: int) -> bool:
    """Whether a unit that trains at ``step`` does not train again in the sweep of that step."""
    sweep, _ = course.method.rate_at(course, step)
    for later in range(step + 1, course.num_steps):
        if course.method.rate_at(course, later)[0] != sweep:
            break
        if unit in trained(course, StepKind.TRAIN, later):
            return False
    return True


class CopyComparison:
    """Digests of copies that nodes report at the end of turns."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found: dict[int, dict[str, tuple[CopyDigest, ...]]] = {}

    def check(self, node: str, turn: Turn, digests: Sequence[CopyDigest]) -> None:
        """Refuse digests of other units than those of which a node has copies; raises ``IntegrityError``."""
        if digests:
            _check(node, turn, sorted(digests), owed=tuple(sorted(compared_at(self._plan, turn, node))))

    def note(self, node: str, turn: Turn, digests: Sequence[CopyDigest]) -> None:
        """Take a node's report at the end of a turn; compare the digests once all nodes with copies have reported.

        A simulator has no copies and reports none; then nothing is compared.
        """
        owed = {name: expected for name in self._plan.nodes if (expected := compared_at(self._plan, turn, name))}
        if node not in owed:
            return
        reported = self._found.setdefault(turn.index, {})
        reported[node] = tuple(sorted(digests))
        if len(reported) < len(owed):
            return
        del self._found[turn.index]
        if not any(reported.values()):
            return
        seqs: dict[int, int] = {}
        for name, expected in owed.items():
            _check(name, turn, reported[name], owed=tuple(sorted(expected)))
            seqs |= expected
        for unit, seq in seqs.items():
            self._compare(unit, turn.first_step + seq - turn.first_seq + 1, reported)

    def _compare(self, unit: int, step: int, reported: dict[str, tuple[CopyDigest, ...]]) -> None:
        nodes_of: dict[str, list[str]] = {}
        for node in sorted(reported):
            if (digest := dict(reported[node]).get(unit)) is not None:
                nodes_of.setdefault(digest, []).append(node)
        if len(nodes_of) > 1:
            head = self._plan.course.head
            is_end = unit in (EMBEDDING, head)
            name = unit_name(unit, head) if is_end else f"blocks from {unit} on"
            who, all_of_them = ("an owner", "owners") if is_end else ("a host", "hosts of them")
            said = "; ".join(f"{', '.join(nodes)}: {digest[:12]}" for digest, nodes in nodes_of.items())
            raise IntegrityError(
                f"the copies of the {name} differ after step {step} ({said}): {who} computes updates differently; "
                f"use one version of torch and one kind of processor for all {all_of_them}, and begin the run anew"
            )


def _check(node: str, turn: Turn, digests: Sequence[CopyDigest], *, owed: tuple[int, ...]) -> None:
    units = tuple(digest.unit for digest in digests)
    if units != owed:
        raise IntegrityError(
            f"node {node} reports digests of units {list(units)} at the end of turn {turn.index}, expected are those "
            f"of {list(owed)}; use one version on all machines"
        )


def parcels(plan: Plan, sizes: Any) -> Iterator[Parcel]:
    """Yield the gradients of each stage with several hosts."""
    for stage in _shared_stages(plan.placement):
        nodes = tuple(piece.node for piece in stage)
        ranges = ever_trained(plan.course).ranges_within(stage[0].start, stage[0].stop)
        num_blocks = max((stop - start for start, stop in ranges), default=0)
        yield Parcel(
            f"the gradient of blocks {stage[0].text}, which nodes {', '.join(nodes)} send each other, has",
            nodes,
            num_blocks * sizes.adapter_bytes,
            "give each other blocks, or take smaller adapters",
        )


def copies(plan: Plan) -> Iterator[Copies]:
    """Yield the blocks of each stage with several hosts, in every placement."""
    for placement in plan.placements:
        for stage in _shared_stages(placement):
            nodes = tuple(piece.node for piece in stage)
            yield Copies(f"blocks {stage[0].text}", nodes, "plan anew with placement.replicas = 'never'")


def _shared_stages(placement: Placement) -> Iterator[tuple[Slice, ...]]:
    return (stage for stage in placement.stages if len(stage) > 1)


def memory_terms(course: Course, share: Any, sizes: Any) -> Iterator[Term]:
    """Yield the gradients of other hosts of the same blocks, which wait or are being added up."""
    if share.around is not None:
        trained = overlap(ever_trained(course).ranges, [(share.start, share.stop)])
        grads = trained * (WAITING[Payload.REPLICA_GRAD] * share.around.replicas + bool(share.around.replicas))
        yield Term("buffers", "gradient of an adapter, from another host of the blocks", grads, sizes.adapter_bytes)


TECHNIQUE: Final = Technique(name="replicas", parcels=parcels, copies=copies, memory_terms=memory_terms)
