"""Whether the owners' copies of embedding and head are still equal: compared once a sweep, by digest.

Where all parameters train, every owner does the same update of its own copy (``schedule.replicas``). After the last
update that a unit has in a sweep, each owner takes the digest of its copy, and reports it with the end of the turn.
With 3 groups, turns of 4 steps and the embedding first in a sweep::

    step                  0  1  2  3 | 4  5  6  7 | 8  9 10 11
    trains the embedding  x        x |       x    |    x
    turn compares it               x |       x    |    x        the later update, where a turn has two

Source: HiFT trains on one machine and has no copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringtune.errors import IntegrityError
from ringtune.schedule.course import Course
from ringtune.schedule.replicas import other_owners, replicated_units
from ringtune.schedule.turns import StepKind, Turn, items
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.versions import trained


class CopyDigest(NamedTuple):
    """The SHA-256, hex, of an owner's copy of a unit."""

    unit: int
    sha256: str


def compared_copies(course: Course, turn: Turn) -> dict[int, int]:
    """The units whose copies are compared at the end of a turn, each with the item after whose update.

    Nothing where one owner has the only copy.
    """
    found: dict[int, int] = {}
    if turn.kind is not StepKind.TRAIN or not other_owners(course, turn.owner):
        return found
    for item in items(course, turn):
        found |= {unit: item.seq for unit in replicated_units(course, item) if _is_last(course, unit, item.step)}
    return found


def _is_last(course: Course, unit: int, step: int) -> bool:
    """Whether a unit that trains at ``step`` trains no more in the sweep of that step."""
    sweep = _sweep(course, step)
    step += 1
    while step < course.num_steps and _sweep(course, step) == sweep:
        if unit in trained(course, StepKind.TRAIN, step):
            return False
        step += 1
    return True


def _sweep(course: Course, step: int) -> int:
    """The sweep of a step: the learning rate stands still during one."""
    return course.method.rate_at(course, step)[0]


class CopyComparison:
    """Takes the digests that nodes report at the end of turns, and compares them.

    Args:
        course: of the run.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        self._found: dict[int, dict[str, tuple[CopyDigest, ...]]] = {}

    def note(self, node: str, turn: Turn, digests: Sequence[CopyDigest]) -> None:
        """Take what a node reports at the end of a turn, and compare it once every owner has reported.

        A simulator has no copies: it reports nothing for any node, so there is nothing to compare.

        Raises:
            IntegrityError: copies differ, or a node reports others than it owes.
        """
        wanted = compared_copies(self._course, turn)
        if self._course.owner(node) is None or not wanted:
            _check(node, turn, digests, owed=())
            return
        came = self._found.setdefault(turn.index, {})
        came[node] = tuple(sorted(digests))
        if len(came) == len(self._course.owners):
            del self._found[turn.index]
            if any(came.values()):
                for owner, copies in came.items():
                    _check(owner, turn, copies, owed=tuple(sorted(wanted)))
                for unit, seq in wanted.items():
                    self._compare(unit, turn.first_step + seq - turn.first_seq + 1, came)

    def _compare(self, unit: int, step: int, came: dict[str, tuple[CopyDigest, ...]]) -> None:
        nodes_of: dict[str, list[str]] = {}
        for node in sorted(came):
            nodes_of.setdefault(dict(came[node])[unit], []).append(node)
        if len(nodes_of) > 1:
            name = "embedding" if unit == EMBEDDING else "head"
            said = "; ".join(f"{', '.join(nodes)}: {digest[:12]}" for digest, nodes in nodes_of.items())
            raise IntegrityError(
                f"the copies of the {name} differ after step {step} ({said}): an owner computes updates differently; "
                "use one version of torch and one kind of processor for all owners, and begin the run anew"
            )


def _check(node: str, turn: Turn, digests: Sequence[CopyDigest], *, owed: tuple[int, ...]) -> None:
    units = tuple(digest.unit for digest in digests)
    if units != owed:
        raise IntegrityError(
            f"node {node} reports digests of units {list(units)} at the end of turn {turn.index}, expected are those "
            f"of {list(owed)}; use one version on all machines"
        )
