"""Room for hidden states where they go: so many may be on their way or waiting per target and boundary."""

from __future__ import annotations


class Channel:
    """Hidden states that go to one node for one boundary.

    Args:
        target: the node.
        boundary: the unit that they enter there.
        most: how many may be with the target, or on their way.

    Attributes:
        left: how many more may be sent now.
    """

    __slots__ = ("boundary", "left", "most", "target")

    def __init__(self, target: str, boundary: int, most: int) -> None:
        self.target, self.boundary = target, boundary
        self.most = self.left = most

    def came_back(self) -> None:
        """The target took one out of its inbox; a credit that comes twice adds nothing."""
        if self.left < self.most:
            self.left += 1


class Credits:
    """The channels of one node.

    Args:
        most: of each channel.
    """

    __slots__ = ("_channels", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._channels: dict[tuple[str, int], Channel] = {}

    def channel(self, target: str, boundary: int) -> Channel:
        """The channel to a node for a boundary; always the same object."""
        found = self._channels.get((target, boundary))
        if found is None:
            found = self._channels[target, boundary] = Channel(target, boundary, self._most)
        return found
