"""``host:port`` as users type it, and whether it leaves this machine."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator

from ringtune.errors import ConnectionFailedError, UsageError
from ringtune.trust.speaking import is_encrypted

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - what a user may ask for
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
# Addresses of private networks and of documentation: nothing is sent to them, only the way there is looked up.
_FAR_AWAY = ("192.0.2.1", "10.255.255.254", "192.168.255.254", "172.31.255.254")


def split_address(address: str, *, option: str) -> tuple[str, int]:
    """Split ``host:port`` into host and port; an IPv6 host stands in brackets.

    Raises:
        UsageError: ``address`` is not of the form ``host:port``.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or set(host) & set("/ "):
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


def is_wildcard(address: str) -> bool:
    """Whether ``host:port`` stands for every address of a machine, so that nobody can call it."""
    return address.rpartition(":")[0].strip("[]") in _WILDCARDS


def address_towards(host: str, port: int) -> str:
    """Find this machine's address on the way to ``host``, without sending anything.

    Raises:
        ConnectionFailedError: there is no way.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConnectionFailedError(
                f"no way to {host}: {error.strerror or error}; check name and network"
            ) from error
        return str(probe.getsockname()[0])


def own_host() -> str:
    """Find this machine's address on its network; empty if it is on none.

    A network without a router has no way to anywhere else: there the first interface with an address counts.
    """
    for host in _FAR_AWAY:
        try:
            found = address_towards(host, 9)
        except ConnectionFailedError:
            continue
        if not is_loopback(join_address(found, 9)):
            return found
    return next((one for one in _interface_addresses() if not is_loopback(join_address(one, 9))), "")


def _interface_addresses() -> Iterator[str]:
    """IPv4 addresses of this machine's interfaces; one without an address is left out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield socket.inet_ntoa(found[20:24])


def is_allowed(address: str, *, insecure: bool) -> bool:
    """Whether this process may connect to an address: encrypted anywhere, in plain text on this machine.

    Args:
        address: ``host:port``.
        insecure: whether the user said that the network is trusted.
    """
    return insecure or is_encrypted() or is_loopback(address)


def require_private(address: str, *, option: str, insecure: bool) -> None:
    """Refuse an address beyond this machine in plain text, unless the user said that the network is trusted.

    Raises:
        UsageError: the address is not on this machine.
    """
    split_address(address, option=option)
    if not is_allowed(address, insecure=insecure):
        raise UsageError(
            f"{option} {address} reaches beyond this machine, and there is no certificate to encrypt with; begin with "
            "'ringtune coordinator init' and join with a token, or add --insecure if the network is trusted"
        )
