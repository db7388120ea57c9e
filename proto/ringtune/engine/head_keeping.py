"""Keeps track of a node's head: for which turns it may be used, and to whom it goes next.

Where every owner has a copy of the head (``schedule.replicas``) it goes nowhere, and only its updates count.

A head that came for turn 5 of this node serves turn 5 and the turns of this node that follow without a gap. Equal
versions are not enough to tell whether a head may be used: after an evaluation an owner still has a head of the right
version that it has passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from ringtune.engine import events as ev
from ringtune.engine.flows import ItemState
from ringtune.schedule.turns.turns import Turn


class HeadKeeping:
    """Keeps track of one node's head.

    Args:
        node: whose.
        is_holder: whether it has the head where the run begins.
        is_copy: whether every owner has one.
        first_turn: index of the first turn, before which it is held.
    """

    def __init__(self, node: str, *, is_holder: bool, is_copy: bool = False, first_turn: int = 0) -> None:
        self._node = node
        self._is_copy = is_copy
        self._version = 0
        is_holder = is_holder and not is_copy
        before = first_turn - 1
        self._held_since: int | None = before if is_holder else None
        self._holds_since: dict[int, int] = {before: before} if is_holder else {}
        self._arrived: dict[int, str] = {}
        self._handovers: deque[tuple[Turn, int, int]] = deque()
        self._first_versions: dict[int, int] = {}

    def begin(self, version: int) -> None:
        """Note how many updates the head has had where the run begins or goes on."""
        self._version = version

    def granted(self, turn: Turn, version: int) -> None:
        """Note a granted turn, whose first item needs a head that has had ``version`` updates.

        This node's own turn needs the head. Another owner's turn right after an own one gets the head from here.
        """
        if self._is_copy:
            return
        self._first_versions[turn.index] = version
        if turn.owner == self._node:
            self._holds_since[turn.index] = self._holds_since.get(turn.index - 1, turn.index)
        elif turn.index - 1 in self._holds_since:
            self._handovers.append((turn, self._holds_since[turn.index - 1], version))

    def arrived(self, turn: int, source: str) -> None:
        """Note that the head for ``turn`` is in the inbox, sent by ``source``."""
        self._arrived[turn] = source

    def updated(self) -> None:
        """Count one more update of the head."""
        self._version += 1

    def counts_for(self, state: ItemState) -> bool:
        """Whether the head that is here is the one that the item needs, with the right number of updates."""
        return self._version == state.head_version and self._held_since == self._holds_since.get(state.item.turn)

    def take(
        self, turns: Mapping[int, Turn], is_used_before: Callable[[int], bool], commands: list[ev.Command]
    ) -> bool:
        """Take each arrived head whose turn is known, once no item before that turn uses the old head.

        Args:
            turns: that are known here, by index.
            is_used_before: whether items of turns before that index still use the head that is here.
            commands: to be added to.

        Returns:
            Whether a head was taken.
        """
        taken = False
        for index in sorted(self._arrived):
            turn = turns.get(index)
            if turn is not None and not is_used_before(index):
                commands.append(ev.AcceptHead(index, self._arrived.pop(index)))
                self._version, self._held_since, taken = self._first_versions[index], index, True
        return taken

    def pass_on(self, commands: list[ev.Command]) -> None:
        """Send the head as soon as its version is what the next owner's turn needs."""
        while self._handovers:
            turn, held_since, version = self._handovers[0]
            if self._held_since != held_since or self._version != version:
                break
            self._handovers.popleft()
            commands.append(ev.SendHead(turn.index, turn.owner))

    def forget(self, turn: int) -> None:
        """Drop what is kept of a turn that is long over."""
        self._holds_since.pop(turn, None)
        self._first_versions.pop(turn, None)
