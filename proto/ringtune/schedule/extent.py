"""The extent of a run: its blocks, owners and steps, which is all that a method may ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtune.errors import PlanError
from ringtune.ids import NODE_NAME
from ringtune.schedule.units import Range, Units, head_of

_MOST_TOLD = 8


def check_user_name(name: str) -> str:
    """Return ``name`` if a user may be called so: as a node, since folders and tensors have it too.

    Raises:
        PlanError: it has other characters, is empty or too long.
    """
    if not NODE_NAME.fullmatch(name) or ".." in name:
        raise PlanError(
            f"user name {name!r} is not allowed; use 1 to 63 small letters, digits, '.', '-' and '_', starting with a "
            "letter or digit, without '..'"
        )
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRows:
    """How many rows of an owner are of one user."""

    name: str
    train_rows: int
    eval_rows: int = 0


def users_text(users: Sequence[UserRows], *, but: Sequence[UserRows] = ()) -> str:
    """Name users with their training and evaluation rows, eight at most: ``anna (3 and 1), ben (5 and 2)``.

    Args:
        users: to be named.
        but: who is left out where name and rows are equal, to tell what differs.
    """
    told = [f"{user.name} ({user.train_rows} and {user.eval_rows})" for user in users if user not in but]
    more = f", and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return ", ".join(told[:_MOST_TOLD]) + more if told else "nobody else"


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A node with data: how many rows it trains on and evaluates on.

    Attributes:
        node: its name.
        train_rows: it trains on.
        eval_rows: it evaluates on.
        users: whose rows these are, in the order of the rows; empty = all are of one user with the node's name.
    """

    node: str
    train_rows: int
    eval_rows: int = 0
    users: tuple[UserRows, ...] = ()

    def __post_init__(self) -> None:
        """Refuse users who do not have all rows between them, have none, or have one name.

        Raises:
            PlanError: names the owner.
        """
        if not self.users:
            return
        names = [user.name for user in self.users]
        if len(set(names)) != len(names):
            raise PlanError(f"the users of {self.node} have to be distinct, not {names}")
        for name in names:
            check_user_name(name)
        if any(min(user.train_rows, user.eval_rows) < 0 or user.train_rows + user.eval_rows < 1 for user in self.users):
            raise PlanError(f"a user of {self.node} has no rows; leave the name out")
        counted = (sum(user.train_rows for user in self.users), sum(user.eval_rows for user in self.users))
        if counted != (self.train_rows, self.eval_rows):
            raise PlanError(
                f"the users of {self.node} have {counted[0]} training and {counted[1]} evaluation rows, the node has "
                f"{self.train_rows} and {self.eval_rows}; plan anew"
            )

    @property
    def user_rows(self) -> tuple[UserRows, ...]:
        """Whose rows these are, in the order of the rows."""
        return self.users or (UserRows(name=self.node, train_rows=self.train_rows, eval_rows=self.eval_rows),)

    def to_json(self) -> dict[str, Any]:
        """Write the record as a JSON-able table; ``users`` is left out where there are none."""
        value = dataclasses.asdict(self)
        if not self.users:
            del value["users"]
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """An owner that was lost with its rows, and whose turns are left out since then.

    Attributes:
        owner: as it was.
        at: its place among the owners before it was left out.
        turns: train turns that it had until then.
    """

    owner: Owner
    at: int
    turns: int

    def to_json(self) -> dict[str, Any]:
        """Write the record as a JSON-able table."""
        return {"owner": self.owner.to_json(), "at": self.at, "turns": self.turns}


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The part of a course that says which unit may train at which step.

    Attributes:
        num_blocks: transformer blocks of the model, N.
        owners: in initiator order.
        num_steps: optimizer steps of the whole run; 0 = only an evaluation.
        local_iterations: steps of one turn.
        frozen_blocks: blocks ``[0, frozen_blocks)`` never train.
        left_out: owners whose turns are left out, in the order in which they were lost.
    """

    num_blocks: int
    owners: tuple[Owner, ...]
    num_steps: int
    local_iterations: int
    frozen_blocks: int = 0
    left_out: tuple[LeftOut, ...] = ()

    def turns_of_owners(self, num_turns: int) -> int:
        """How many of the first so many train turns were of owners that are still there."""
        return max(0, num_turns - sum(one.turns for one in self.left_out))

    @property
    def head(self) -> int:
        """The unit of the head."""
        return head_of(self.num_blocks)

    @property
    def trainable(self) -> Units:
        """The units that may train: the blocks that are not frozen, and the head.

        Where all parameters train (``Method.full_parameters``) a course has the embedding among them.
        """
        return Units(self.num_blocks, (Range(self.frozen_blocks, self.head + 1),))


def check_owners(owners: tuple[Owner, ...], left_out: tuple[LeftOut, ...] = ()) -> None:
    """Refuse owners that are no owners of a run.

    Raises:
        PlanError: there are none, two have one name, one has no rows, or one that was left out had no place.
    """
    names = [owner.node for owner in owners]
    every = [*names, *(one.owner.node for one in left_out)]
    if not names or len(set(every)) != len(every) or not all(every):
        raise PlanError(f"owners have to be at least one, named and distinct, not {every}")
    for one in left_out:  # courses of some of the owners have the places of all
        if min(one.at, one.turns) < 0:
            raise PlanError(
                f"owner {one.owner.node} was left out from place {one.at} after {one.turns} turns, which can't be; "
                "plan anew"
            )
    for owner in (*owners, *(one.owner for one in left_out)):
        if owner.train_rows < 1:
            raise PlanError(f"owner {owner.node} has no rows; give it data or leave it out")
        if owner.eval_rows < 0:
            raise PlanError(f"owner {owner.node} has {owner.eval_rows} evaluation rows, it has to be at least 0")
