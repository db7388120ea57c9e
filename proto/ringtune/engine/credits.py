"""Room for hidden states where they go: so many may be on their way or waiting per target and boundary."""

from __future__ import annotations

Channel = tuple[str, int]
"""The node that a hidden state goes to, and the boundary that it is for."""


class Credits:
    """What one node may still send.

    Args:
        most: hidden states of one channel that may be with the target, or on their way.
    """

    __slots__ = ("_left", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._left: dict[Channel, int] = {}

    def has(self, channel: Channel | None) -> bool:
        """Whether there is room; a leg without a channel needs none."""
        return channel is None or self._left.get(channel, self._most) > 0

    def take(self, channel: Channel | None) -> None:
        """A stretch has begun that ends in sending there."""
        if channel is not None:
            self._left[channel] = self._left.get(channel, self._most) - 1

    def came_back(self, channel: Channel) -> None:
        """The target took one out of its inbox; a credit that comes twice adds nothing."""
        self._left[channel] = min(self._most, self._left.get(channel, self._most) + 1)
