"""``host:port`` as users type it, and whether it leaves this machine."""

from __future__ import annotations

import ipaddress

from ringtune.errors import UsageError


def split_address(address: str, *, option: str) -> tuple[str, int]:
    """Split ``host:port`` into host and port; an IPv6 host stands in brackets.

    Raises:
        UsageError: ``address`` is not of the form ``host:port``.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{option} {address!r} is not HOST:PORT, e.g. 127.0.0.1:7070")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Join host and port to ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether the host of ``host:port`` is ``localhost`` or a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_private(address: str, *, option: str, insecure: bool) -> None:
    """Refuse an address beyond this machine unless the user said that the network is trusted.

    Raises:
        UsageError: the address is not on this machine.
    """
    split_address(address, option=option)
    if not insecure and not is_loopback(address):
        raise UsageError(
            f"{option} {address} reaches beyond this machine, and connections are not encrypted yet; add --insecure "
            "if the network is trusted"
        )
