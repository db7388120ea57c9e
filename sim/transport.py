"""When a message arrives on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ringtune.schedule.actions import TensorKey


class Strain(NamedTuple):
    """What a message costs the processors at its two ends, in seconds.

    Attributes:
        from_source_s: what sending takes from the source's computing.
        from_target_s: what receiving takes from the target's.
        late_at_source_s: how much later it leaves while its source computes.
        late_at_target_s: how much later it is noticed while its target computes.
    """

    from_source_s: float
    from_target_s: float
    late_at_source_s: float
    late_at_target_s: float


class Transport(Protocol):
    """Says when things arrive; messages of one link keep their order.

    A message is named by its key; that of a head has the turn in place of the item.
    """

    def arrival_s(self, key: TensorKey, source: str, target: str, now_s: float) -> float:
        """When a message that is sent at ``now_s`` is there."""

    def credit_s(self, source: str, target: str, now_s: float) -> float:
        """When a credit that is returned at ``now_s`` is there."""

    def control_s(self, source: str, target: str, now_s: float) -> float:
        """When a word between a node and the coordinator is there."""

    @property
    def has_strain(self) -> bool:
        """Whether any message so far costs the processors something; most rings have cores for messages."""

    def strain(self, key: TensorKey, source: str, target: str) -> Strain | None:
        """What a message costs the processors at its ends, after its ``arrival_s`` was asked; None: nothing."""


class Delays:
    """Delays from functions, for tests.

    Args:
        message_s: seconds from source to target; ``payload`` is ``credit`` for a credit.
        control_s: seconds of a call between coordinator and node.
    """

    def __init__(
        self,
        message_s: Callable[[str, str, str], float] = lambda source, target, payload: 0.0,
        control_s: Callable[[str], float] = lambda node: 0.0,
    ) -> None:
        self._message_s, self._control_s = message_s, control_s
        self._free_s: dict[tuple[str, str, str], float] = {}
        self.has_strain = False

    def arrival_s(self, key: TensorKey, source: str, target: str, now_s: float) -> float:
        """When a message is there: after ``message_s``, but not before an earlier message of its link."""
        return self._in_order(source, target, "data", now_s + self._message_s(source, target, key.payload))

    def credit_s(self, source: str, target: str, now_s: float) -> float:
        """When a credit is there: after ``message_s``, but not before an earlier credit of its link."""
        return self._in_order(source, target, "credit", now_s + self._message_s(source, target, "credit"))

    def control_s(self, source: str, target: str, now_s: float) -> float:
        """When a word is there: after ``control_s``, but not before an earlier word of the same pair.

        The coordinator is the empty name.
        """
        return self._in_order(source, target, "control", now_s + self._control_s(source or target))

    def strain(self, key: TensorKey, source: str, target: str) -> Strain | None:
        """None: messages cost the processors nothing here."""
        return None

    def _in_order(self, source: str, target: str, lane: str, at_s: float) -> float:
        key = (source, target, lane)
        at_s = max(at_s, self._free_s.get(key, 0.0))
        self._free_s[key] = at_s
        return at_s
