"""Rotation of the authority as a pure state machine: which authorities are trusted, which one signs, and how long.

A certificate of the new authority is of use only to who trusts it, and neither may sign for the other. So members get
both as trusted ones first::

    introducing   both are trusted, the old one signs    until all members have confirmed, or half of the time is over
    issuing       both are trusted, the new one signs    until all have a certificate of it, or the time is over
    over          the new one alone is trusted

To the end of *issuing* the coordinator itself shows a certificate of the old authority: so a node or user that was
away, and a token of before, reach it, and get the new authority with the answer. A member that never confirms
delays a phase to its end at most.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Self

from ringtune.transport.identity import authorities_version
from ringtune.transport.parties import GUEST

MAX_GONE: Final = 64
"""Guests that have left and are not forgotten yet, as each change is written to the disk."""
_NODE: Final = "node "


class Phase(StrEnum):
    """What members are about to do."""

    INTRODUCING = "introducing"
    ISSUING = "issuing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """A rotation that is under way.

    Attributes:
        old: certificate, PEM, of the authority that is replaced.
        new: of the one that replaces it.
        ends_unix_s: the old authority is trusted no longer from then on, whoever still needs it.
        moved: parties in words, as ``node pi``, whose last call was made with a certificate of the new authority.
    """

    old: bytes
    new: bytes
    began_unix_s: float
    ends_unix_s: float
    phase: Phase = Phase.INTRODUCING
    moved: frozenset[str] = frozenset()

    @property
    def issues_unix_s(self) -> float:
        """Time from which on the new authority signs, whoever has not confirmed."""
        return (self.began_unix_s + self.ends_unix_s) / 2

    @property
    def authorities(self) -> tuple[bytes, ...]:
        """The trusted ones, the one that signs first."""
        return (self.new, self.old) if self.phase is Phase.ISSUING else (self.old, self.new)

    def unconfirmed(self, versions: dict[str, str], members: Collection[str]) -> list[str]:
        """Return the members that may not trust the new authority yet.

        Args:
            versions: of the authorities that each node said last that it trusts.
            members: living and recently lost nodes.
        """
        trusting = {authorities_version((self.old, self.new)), authorities_version((self.new, self.old))}
        return sorted(node for node in members if versions.get(node) not in trusting)

    def heard(self, party: str, *, is_of_new: bool) -> Rotation:
        """Return the rotation after a call of a party with a certificate of the new authority, or of the old one."""
        moved = self.moved | {party} if is_of_new else self.moved - {party}
        return self if moved == self.moved else dataclasses.replace(self, moved=moved)

    def without_gone(self, members: Collection[str]) -> Rotation:
        """Return the rotation without guests that have left: a user may invite any number within days."""
        guests = {party for party in self.moved if GUEST.fullmatch(party.removeprefix(_NODE))}
        gone = guests - {f"{_NODE}{name}" for name in members}
        return dataclasses.replace(self, moved=self.moved - gone) if len(gone) > MAX_GONE else self

    def advanced(
        self, now_unix_s: float, *, unconfirmed: Collection[str], waiting: Collection[str], is_settled: bool = True
    ) -> Rotation | None:
        """Return the rotation at a time, which is this one while nothing changes; None = it is over.

        ``waiting`` are parties that have not moved, and open tokens: they need the old authority. ``is_settled`` is
        false while members join a coordinator that was started again, so that ``unconfirmed`` is not complete.
        """
        if self.phase is Phase.INTRODUCING and (now_unix_s >= self.issues_unix_s or (is_settled and not unconfirmed)):
            return dataclasses.replace(self, phase=Phase.ISSUING)
        is_over = now_unix_s >= self.ends_unix_s or (is_settled and not waiting)
        return None if self.phase is Phase.ISSUING and is_over else self

    def to_text(self) -> str:
        """Write it as JSON."""
        return json.dumps(
            {
                "old": self.old.decode(),
                "new": self.new.decode(),
                "began_unix_s": self.began_unix_s,
                "ends_unix_s": self.ends_unix_s,
                "phase": self.phase,
                "moved": sorted(self.moved),
            }
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``to_text`` has written."""
        values = json.loads(text)
        return cls(
            old=values["old"].encode(),
            new=values["new"].encode(),
            began_unix_s=values["began_unix_s"],
            ends_unix_s=values["ends_unix_s"],
            phase=Phase(values["phase"]),
            moved=frozenset(values["moved"]),
        )


class RotationState(NamedTuple):
    """How far a rotation is.

    Attributes:
        unconfirmed: nodes that have not confirmed that they trust the new authority, while that is awaited.
        waiting: who would be shut out if the old authority were trusted no longer from now on.
        problem: why it can't go on; empty = it can.
    """

    rotation: Rotation
    unconfirmed: list[str]
    waiting: list[str]
    folder: str
    problem: str
