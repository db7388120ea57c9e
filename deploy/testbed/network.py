"""The network as command lines: namespaces, one bridge, a pair of interfaces a board, and the shaping.

Shaping works on what an interface sends, so each link is shaped at both of its ends: the board's own end holds
the up rate, the bridge's port the down rate.

Source: tc-tbf(8), tc-htb(8), tc-netem(8); with netem the delay comes first and the rate is its child, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.testbed.boards import Board, Layout

Command = tuple[str, ...]

NAMESPACES = Path("/run/netns")
BRIDGE = "br0"
UPLINK = "eth0"
MTU_BYTES = 1500
# How long a packet may wait for its turn before it is dropped, as in a common router.
_QUEUE_S = 0.05
# The bucket: what may leave at once. A few milliseconds, so that a timer that comes late costs no rate.
_BURST_S, _MIN_BURST_BYTES = 0.004, 16 << 10
# Of a full Ethernet frame (1514 bytes) 1448 are payload of TCP with time stamps.
PAYLOAD_SHARE = 1448 / 1514
# Boards have cubic, which is reno on links as short as these (RFC 9438, section 4.3); every kernel has reno. The
# machine's own may be bbr, which probes for a rate of its own: streams that come and go leave part of a link unused.
_CONGESTION_CONTROL: Command = ("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaper:
    """What shapes.

    Attributes:
        rate: ``tbf`` or ``htb``.
        has_delay: whether there is ``netem``.
    """

    rate: str
    has_delay: bool


HUB_ADDRESS = "10.117.0.1"
"""Where coordinator and command are."""


def address(layout: Layout, board: Board) -> str:
    """A board's address."""
    return f"10.117.0.{2 + layout.boards.index(board)}"


def build_commands(layout: Layout, shaper: Shaper) -> list[Command]:
    """Everything but the namespaces themselves, in order."""
    hub = layout.hub
    commands: list[Command] = [
        enter(hub, _CONGESTION_CONTROL),
        ("ip", "-n", hub, "link", "set", "lo", "up"),
        ("ip", "-n", hub, "link", "add", BRIDGE, "type", "bridge"),
        ("ip", "-n", hub, "addr", "add", f"{HUB_ADDRESS}/24", "dev", BRIDGE),
        ("ip", "-n", hub, "link", "set", BRIDGE, "up"),
    ]
    for index, board in enumerate(layout.boards):
        inside, port = layout.namespace(board), f"p{index}"
        commands += [
            ("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", UPLINK, "netns", inside),
            ("ip", "-n", hub, "link", "set", port, "master", BRIDGE, "up"),
            ("ip", "-n", inside, "link", "set", "lo", "up"),
            ("ip", "-n", inside, "addr", "add", f"{address(layout, board)}/24", "dev", UPLINK),
            ("ip", "-n", inside, "link", "set", UPLINK, "up"),
            enter(inside, _CONGESTION_CONTROL),
            *shaping_commands(inside, UPLINK, board.up_bytes_per_s, board.latency_s, shaper),
            *shaping_commands(hub, port, board.down_bytes_per_s, board.latency_s, shaper),
        ]
    return commands


def shaping_commands(
    namespace: str, device: str, rate_bytes_per_s: float, latency_s: float, shaper: Shaper
) -> list[Command]:
    """Limit what an interface sends."""
    add = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
    commands: list[Command] = []
    parent: Command = ("root",)
    if latency_s > 0:
        waiting = int(rate_bytes_per_s * (latency_s + _QUEUE_S) / MTU_BYTES) + 1000
        commands.append(
            (*add, "root", "handle", "1:", "netem", "delay", f"{latency_s * 1e6:.0f}us", "limit", f"{waiting}")
        )
        parent = ("parent", "1:1")
    burst_bytes = max(_MIN_BURST_BYTES, int(rate_bytes_per_s * _BURST_S))
    rate = ("rate", f"{rate_bytes_per_s * 8:.0f}bit", "burst", f"{burst_bytes}b")
    if shaper.rate == "tbf":
        commands.append((*add, *parent, "handle", "10:", "tbf", *rate, "latency", f"{_QUEUE_S * 1e3:.0f}ms"))
    else:
        queue = max(int(rate_bytes_per_s * _QUEUE_S), 2 * burst_bytes)
        in_class = ("tc", "-n", namespace, "class", "add", "dev", device, "parent", "10:", "classid", "10:1")
        commands += [
            (*add, *parent, "handle", "10:", "htb", "default", "1"),
            (*in_class, "htb", *rate, "cburst", f"{burst_bytes}b", "quantum", f"{MTU_BYTES}"),
            (*add, "parent", "10:1", "bfifo", "limit", f"{queue}"),
        ]
    return commands


def enter(namespace: str, command: Command) -> Command:
    """``command`` inside a namespace.

    Unlike ``ip netns exec`` this leaves ``/sys`` as it is, so that an agent finds its board's memory limit itself.
    """
    return ("nsenter", f"--net={NAMESPACES / namespace}", "--", *command)
