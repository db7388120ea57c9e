"""Credits: so many hidden states may be on their way or wait, for each target and boundary."""

from __future__ import annotations

from ringtune.schedule.lowering import route
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages.dealing import width


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


def most_embeds(plan: Plan, node: str) -> int:
    """How many own micro-batches of an owner may be between their embedding and the end of their head; 0 elsewhere.

    They are as many as have credits on the hosts of their way, whichever of its stage a micro-batch passes.
    """
    if plan.owner(node) is None:
        return 0
    return plan.placement.credits * max(1, len(route(plan, node))) * width(plan.placement)
