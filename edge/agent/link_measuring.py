"""Measure the links of a node to others, as the coordinator asks."""

from __future__ import annotations

from edge.agent.open_links import check_private
from edge.agent_options import AgentOptions
from edge.wire.load import computing_lost_s_per_byte
from edge.wire.probe import LinkRate, measure_link


class LinkMeasuring:
    """Measures the links of one node.

    Args:
        options: of its agent.
    """

    def __init__(self, options: AgentOptions) -> None:
        self._options = options

    def measure(
        self, target: str, address: str, message_bytes: int, *, timeout_s: float, brief: bool = False
    ) -> LinkRate:
        """Measure the link to another node; see ``edge.wire.probe``.

        Raises:
            ConnectionFailedError: it can't be measured, or leaves this machine unencrypted; names both ends.
            DeadlineError: it took too long.
        """
        check_private(self._options, target, address)
        me = self._options.name
        return measure_link(me, target, address, message_bytes=message_bytes, timeout_s=timeout_s, brief=brief)

    def computing_lost_s_per_byte(
        self, target: str, address: str, message_bytes: int, computing_s: float, *, timeout_s: float
    ) -> float:
        """Measure what messages to another node take from this node's computing; see ``edge.wire.load``.

        Raises:
            ConnectionFailedError: it can't be measured, or leaves this machine unencrypted; names both ends.
        """
        check_private(self._options, target, address)
        me = self._options.name
        return computing_lost_s_per_byte(me, target, address, message_bytes, computing_s, timeout_s=timeout_s)
