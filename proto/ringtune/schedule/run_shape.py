"""Shape of a run: its blocks, owners and steps (``Extent``, the input of methods), and the owner of each turn.

With ``turns = "equal"`` the owners have turns in order. With ``"rows"`` the next turn is of the owner that is furthest
behind its share of the rows: an owner with n turns so far has the key (2n + 1) / rows, and the smallest key is next.
Owners a, b and c with 40, 20 and 10 rows ::

    turn     0    1    2    3    4    5    6
    owner    a    b    a    c    a    b    a
    key     1/40 2/40 3/40 4/40 5/40 6/40 7/40

These are pure functions of owners and number of turns, so a resumed run needs no earlier turns.

Source: the method of Webster (Sainte-Laguë) for the division of seats.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from ringtune.errors import PlanError
from ringtune.ids import NODE_NAME
from ringtune.schedule.units import Units, head_of
from ringtune.storage.strict import LATER, Bounds

_MAX_TOLD = 8
USER_NAMES: Final = "use 1 to 63 small letters, digits, '.', '-' and '_', starting with a letter or digit, without '..'"


def check_user_name(name: str) -> str:
    """Return ``name`` if it is a valid user name, by the rules for node names; else raise ``PlanError``."""
    if not NODE_NAME.fullmatch(name) or ".." in name:
        raise PlanError(f"user name {name!r} is not allowed; {USER_NAMES}")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRows:
    """Numbers of an owner's rows of one user."""

    name: str
    train_rows: int
    eval_rows: int = 0


def users_text(users: Sequence[UserRows], *, but: Sequence[UserRows] = ()) -> str:
    """Write users with their training and evaluation rows, at most eight: ``anna (3 and 1), ben (5 and 2)``.

    Users who are equal in ``but`` are left out.
    """
    told = [f"{user.name} ({user.train_rows} and {user.eval_rows})" for user in users if user not in but]
    more = f", and {len(told) - _MAX_TOLD} more" if len(told) > _MAX_TOLD else ""
    return ", ".join(told[:_MAX_TOLD]) + more if told else "nobody else"


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A node with data. ``users``: of these rows, in the order of the rows; empty = one user with the node's name."""

    node: str
    train_rows: int
    eval_rows: int = 0
    users: Annotated[tuple[UserRows, ...], LATER] = ()

    def __post_init__(self) -> None:
        """Refuse users without rows, with equal names, or with another sum of rows; raises ``PlanError``."""
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
        """Users of the rows, in the order of the rows."""
        return self.users or (UserRows(name=self.node, train_rows=self.train_rows, eval_rows=self.eval_rows),)


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedOwner:
    """A lost owner, of which turns are left out since then; or its return, since which they count again.

    Attributes:
        at: its index among the owners that were there with it.
        turns: train turns of its own until then; at its return with those that it has missed.
        back: train turns of the run until its return; None = it was lost.
        keeps_users: whether the adapters of its users stay, as they were at its loss; earlier versions had none then.
    """

    owner: Owner
    at: int
    turns: int
    back: Annotated[int | None, LATER] = None
    keeps_users: Annotated[bool, LATER] = False


_MAX_BLOCKS: Final = 4096
MAX_COUNT: Final = 1 << 31
"""Largest count in a course, which may be read from another machine."""

Count = Annotated[int, Bounds(ge=0, le=MAX_COUNT)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The part of a course that determines which unit may train at which step.

    Attributes:
        num_blocks: transformer blocks of the model, N.
        owners: in initiator order.
        num_steps: optimizer steps of the whole run; 0 = only an evaluation.
        local_iterations: steps of one turn.
        frozen_blocks: number f of blocks ``[0, f)`` that never train.
        left_out: losses and returns of owners with turns left out, in their order.
        invertible: whether there is an invertible adapter at the embedding, which trains while block 0 does.
    """

    num_blocks: Annotated[int, Bounds(ge=1, le=_MAX_BLOCKS)]
    owners: tuple[Owner, ...]
    num_steps: Count
    local_iterations: Annotated[int, Bounds(ge=1, le=MAX_COUNT)]
    frozen_blocks: Count = 0
    left_out: Annotated[tuple[DroppedOwner, ...], LATER] = ()
    invertible: Annotated[bool, LATER] = False

    def turns_of(self, num_steps: int) -> int:
        """Number of train turns of the first ``num_steps`` steps; the last one may be short."""
        return -(-num_steps // self.local_iterations)

    def turns_of_owners(self, num_turns: int) -> int:
        """Position in the order of the present owners' turns after ``num_turns`` train turns, missed ones counted."""
        return max(0, num_turns - self.turns_apart)

    @property
    def all_owners(self) -> tuple[Owner, ...]:
        """The owners of the run in initiator order, including those left out."""
        return _all_owners(self.owners, self.left_out)

    @property
    def turns_apart(self) -> int:
        """Train turns of the run less the position in the order of the present owners' turns."""
        return sum(event.turns if event.back is None else -event.turns for event in self.left_out)

    @property
    def absent(self) -> tuple[DroppedOwner, ...]:
        """The last losses of the owners that have not returned."""
        there, last = {owner.node for owner in self.owners}, {event.owner.node: event for event in self.left_out}
        return tuple(event for node, event in last.items() if node not in there)

    @property
    def missed(self) -> dict[str, int]:
        """By owner, the train turns between its losses and its returns."""
        lost, turns = dict[str, int](), dict[str, int]()
        for event in self.left_out:
            if event.back is None:
                lost[event.owner.node] = event.turns
            else:
                turns[event.owner.node] = turns.get(event.owner.node, 0) + event.turns - lost[event.owner.node]
        return turns

    @property
    def head(self) -> int:
        """Unit of the head."""
        return head_of(self.num_blocks)

    @property
    def trainable(self) -> Units:
        """Units that may train: the blocks that are not frozen, the head, and with block 0 an invertible adapter.

        With ``Method.full_parameters`` a course adds the embedding.
        """
        return self.top(self.num_blocks - self.frozen_blocks)

    def top(self, depth: int) -> Units:
        """Return the head and the ``depth`` blocks below it; with block 0 also an invertible adapter's unit."""
        has_embedding = self.invertible and depth == self.num_blocks
        return Units.top(self.num_blocks, depth + has_embedding)


def _all_owners(owners: Sequence[Owner], left_out: Sequence[DroppedOwner]) -> tuple[Owner, ...]:
    every, lost = list(owners), dict[str, int]()
    for event in left_out:
        had = lost.pop(event.owner.node, None)
        if event.back is None:
            lost[event.owner.node] = event.turns
            fits = had is None and min(event.at, event.turns) >= 0
        else:
            fits = had is not None and event.turns >= had and min(event.at, event.back) >= 0
        if not fits:
            raise PlanError(_impossible(event))
    for event in reversed(left_out):  # ``at`` of a loss may exceed the number of owners that are left
        if event.back is None:
            every.insert(event.at, event.owner)
        elif every[event.at : event.at + 1] == [event.owner]:
            every.pop(event.at)
        else:
            raise PlanError(_impossible(event))
    return tuple(every)


def _impossible(event: DroppedOwner) -> str:
    what = "was left out from" if event.back is None else "came back to"
    return f"owner {event.owner.node} {what} place {event.at} after {event.turns} turns, which can't be; plan anew"


def check_owners(owners: tuple[Owner, ...], left_out: tuple[DroppedOwner, ...] = ()) -> None:
    """Refuse invalid owners; raises ``PlanError``."""
    every = _all_owners(owners, left_out)
    names = [owner.node for owner in every]
    if not owners or len(set(names)) != len(names) or not all(names):
        raise PlanError(f"owners have to be at least one, named and distinct, not {names}")
    for owner in every:
        if owner.train_rows < 1:
            raise PlanError(f"owner {owner.node} has no rows; give it data or leave it out")
        if owner.eval_rows < 0:
            raise PlanError(f"owner {owner.node} has {owner.eval_rows} evaluation rows, it has to be at least 0")


EQUAL: Final = "equal"
BY_ROWS: Final = "rows"
TURNS: Final = (EQUAL, BY_ROWS)

_MAX_APART: Final = 1000


def weights(owners: Sequence[Owner], turns: str) -> tuple[int, ...]:
    """Weight of each owner: its rows, or 1 with equal turns."""
    return tuple(owner.train_rows if turns == BY_ROWS else 1 for owner in owners)


def shares(owners: Sequence[Owner], turns: str) -> tuple[float, ...]:
    """Share of each owner in the steps of a long run."""
    owner_weights = weights(owners, turns)
    return tuple(weight / sum(owner_weights) for weight in owner_weights)


def next_owner(owner_weights: Sequence[int], counts: Sequence[int]) -> int:
    """Return the index of the owner of the next turn, the first in a tie, given weights and turns so far."""
    return min(
        range(len(owner_weights)), key=lambda index: (Fraction(2 * counts[index] + 1, owner_weights[index]), index)
    )


def turn_counts(owner_weights: Sequence[int], num_turns: int) -> list[int]:
    """Count the turns of each owner among the first ``num_turns``.

    Turns with a key below a bound are counted at once, the last few one by one.
    """
    early, total = max(0, num_turns - len(owner_weights)), sum(owner_weights)
    counts = [
        -(-2 * early * weight // total) // 2 for weight in owner_weights
    ]  # odd numbers below 2 * early * weight / total
    for _ in range(num_turns - sum(counts)):
        counts[next_owner(owner_weights, counts)] += 1
    return counts


def owner_indices(owner_weights: Sequence[int], num_turns: int) -> Iterator[int]:
    """Yield the index of the owner of each turn without end, from turn ``num_turns`` on."""
    counts = turn_counts(owner_weights, num_turns)
    numbered = enumerate(zip(counts, owner_weights, strict=True))
    keys = [(Fraction(2 * count + 1, weight), index) for index, (count, weight) in numbered]
    heapq.heapify(keys)
    while True:
        key, index = keys[0]
        yield index
        heapq.heapreplace(keys, (key + Fraction(2, owner_weights[index]), index))


def latest_owners(owner_weights: Sequence[int], num_turns: int) -> tuple[int, ...]:
    """Return the indices of the owners with one of the first ``num_turns`` turns, in the order of their latest ones.

    Example: with 40, 20 and 10 rows and five turns (a, b, a, c, a) they are b, c and a.
    """
    counts = zip(turn_counts(owner_weights, num_turns), owner_weights, strict=True)
    keys = [(Fraction(2 * count - 1, weight), index) for index, (count, weight) in enumerate(counts) if count]
    return tuple(index for _, index in sorted(keys))


def latest_turn(owner_weights: Sequence[int], counts: Sequence[int]) -> tuple[Fraction, int]:
    """Return key and owner's index of the latest turn, given weights and turns of each owner; (0, 0) without any."""
    pairs = enumerate(zip(counts, owner_weights, strict=True))
    return max(
        ((Fraction(2 * count - 1, weight), at) for at, (count, weight) in pairs if count), default=(Fraction(), 0)
    )


def turns_up_to(latest: tuple[Fraction, int], owner_weights: Sequence[int], at: int) -> int:
    """Count the turns of the owner with index ``at`` that do not come after a turn, given by key and owner's index."""
    key, index = latest
    limit = key * owner_weights[at]  # the odd numbers up to it; below it for an owner with a higher index
    return (math.floor(limit) + 1) // 2 if at <= index else math.ceil(limit) // 2


def turns_until_repeat(owner_weights: Sequence[int]) -> int:
    """Turns after which the order of the owners repeats: with 40, 20 and 10 rows, seven."""
    return sum(owner_weights) // math.gcd(*owner_weights)


def max_turns_apart(owners: Sequence[Owner], turns: str) -> int:
    """Turns within which every owner has one; at most 1,000, or the number of owners if that is larger.

    Example: with equal turns it is the number of owners.
    """
    owner_weights = weights(owners, turns)
    apart = len(owner_weights) if turns == EQUAL else sum(owner_weights) // min(owner_weights) + len(owner_weights)
    return min(apart, max(_MAX_APART, len(owner_weights)))
