"""Credits: so many hidden states may be on their way or wait, for each target and boundary."""

from __future__ import annotations


class Channel:
    """Hidden states that go to one node for one boundary.

    Args:
        target: the node.
        boundary: the unit that the hidden states enter there.
        most: how many hidden states may wait at the target or be on their way.

    Attributes:
        left: how many more hidden states may be sent now.
    """

    __slots__ = ("boundary", "left", "most", "target")

    def __init__(self, target: str, boundary: int, most: int) -> None:
        self.target, self.boundary = target, boundary
        self.most = self.left = most

    def came_back(self) -> None:
        """Take one credit back, because the target took a hidden state out; ``left`` never passes ``most``."""
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

    def known(self, target: str, boundary: int) -> Channel | None:
        """The channel to a node for a boundary, if something was to be sent there."""
        return self._channels.get((target, boundary))

    def channel(self, target: str, boundary: int, most: int = 0) -> Channel:
        """The channel to a node for a boundary; always the same object.

        Args:
            target: the node.
            boundary: of what is sent.
            most: of this channel; 0 = as of each.
        """
        found = self._channels.get((target, boundary))
        if found is None:
            found = self._channels[target, boundary] = Channel(target, boundary, most or self._most)
        return found
