"""Addresses (``host:port``) in options, gRPC options as plain tuples, and compatible versions; does not import grpc.

Reasons for the options, all measured on grpcio 1.85:

* A ping and its answer wait behind data in the queues of sockets and routers: over 5 s behind a link of 2 Mbit/s with
  two seconds of queue. So pings only remove dead connections, after a minute; the loss of a node is decided by its
  lease, which is renewed in small messages of its own.
* Two servers can bind one port without an error unless ``so_reuseport`` is 0; calls are then split between them.
* Built-in retries stop working above 256 KiB, so they are off: ``transport.retry`` repeats calls.
* After an outage the default back-off keeps a restored link unused for half a minute.
* One connection may open thousands of streams, each of which takes a worker, and holds a window of bytes that nobody
  has read: 128 connections of a member with 200 half-sent messages each took 3.2 GB of a coordinator in 25 s. So
  streams are few, connections of one party are counted (``channels.Guard``), and a coordinator has a small window.
* A connection that has begun a handshake costs 45 KiB, and may take two minutes for it. So their number is bounded, and
  their time is 20 s, which is more than a slow link takes. One without a byte costs nothing
  (``channels.defer_accept``).
* A message above the limit is refused before it is read; payloads are sent in chunks far below it.
* ``http_proxy``, ``https_proxy`` and ``grpc_proxy`` send even calls to this machine's own address to a proxy, and
  ``GRPC_ADDRESS_HTTP_PROXY`` does so with any ``enable_http_proxy``; nodes must be called at the addresses they listen
  on.

Versions of RingTune are compatible if their first two numbers are equal, such as 0.2.0 and 0.2.7.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Final

from ringtune import __version__
from ringtune.errors import ConnectionFailedError, UsageError
from ringtune.transport.credentials import is_encrypted

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - what a user may ask for
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
# Addresses of private networks and of documentation: nothing is sent to them, only the route is looked up.
_FAR_AWAY = ("192.0.2.1", "10.255.255.254", "192.168.255.254", "172.31.255.254")


def split_address(address: str, *, option: str, example: str = "127.0.0.1:7070") -> tuple[str, int]:
    """Split ``host:port``, with an IPv6 host in brackets; raises ``UsageError`` with ``example`` for another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or set(host) & set("/ ,"):
        raise UsageError(f"{option} {address!r} is not HOST:PORT, e.g. {example}")
    return host.strip("[]"), int(port)


def split_addresses(addresses: str, *, option: str) -> list[str]:
    """Split ``host:port,host:port``, the places of one party of which one answers; most parties have one place."""
    parts = addresses.split(",")
    for address in parts:
        split_address(address, option=option)
    return parts


def target_of(addresses: str) -> str:
    """Return gRPC's target for ``host:port`` or a list of them, of which the first that answers is called.

    gRPC takes lists of numeric addresses only, so the names in a list are looked up here, once.
    """
    if "," not in addresses:
        return addresses
    targets, families = list[str](), set[str]()
    for address in split_addresses(addresses, option="--coordinator"):
        host, port = split_address(address, option="--coordinator")
        with contextlib.suppress(OSError):  # a name that is unknown now does not hide the others
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            families.add("ipv6" if family == socket.AF_INET6 else "ipv4")
            targets.append(join_address(str(place[0]), port))
    if not targets:
        raise ConnectionFailedError(f"no host of {addresses} is known here; check the names and the network")
    if len(families) > 1:
        raise UsageError(f"--coordinator {addresses} mixes IPv4 and IPv6; give addresses of one kind")
    return f"{families.pop()}:{','.join(targets)}"


def join_address(host: str, port: int) -> str:
    """Join host and port to ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether the host of ``host:port`` is ``localhost`` or a loopback address; of a list each of them."""
    if "," in address:
        return all(map(is_loopback, address.split(",")))
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(address: str) -> bool:
    """Whether the host of ``host:port`` means every address of a machine, so that it can't be called."""
    return address.rpartition(":")[0].strip("[]") in _WILDCARDS


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to ``host``, or raise ``ConnectionFailedError``; sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConnectionFailedError(
                f"no way to {host}: {error.strerror or error}; check name and network"
            ) from error
        return str(probe.getsockname()[0])


def machine_address() -> str:
    """Return this machine's address on its network; empty without a network.

    Without a router there is no route to other networks; then the first interface with an address is used.
    """
    for host in _FAR_AWAY:
        try:
            address = address_towards(host, 9)
        except ConnectionFailedError:
            continue
        if not is_loopback(join_address(address, 9)):
            return address
    return next((address for address in _interface_addresses() if not is_loopback(join_address(address, 9))), "")


def _interface_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield socket.inet_ntoa(reply[20:24])


def is_allowed(address: str, *, insecure: bool) -> bool:
    """Whether this process may connect to ``host:port``: encrypted, on this machine, or ``insecure`` by option."""
    return insecure or is_encrypted() or is_loopback(address)


def require_private(address: str, *, option: str, insecure: bool) -> None:
    """Refuse an address beyond this machine, or a list with one, in plain text, unless ``insecure``."""
    split_addresses(address, option=option)
    if not is_allowed(address, insecure=insecure):
        raise UsageError(
            f"{option} {address} reaches beyond this machine, and there is no certificate to encrypt with; begin with "
            "'ringtune coordinator init' and join with a token, or add --insecure if the network is trusted"
        )


Options = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""Longest single message; tensors and files are sent in chunks of about 1 MiB."""

MAX_CONNECTIONS: Final = 1024
"""Most connections to a server, equal to its concurrent calls; further ones are closed."""

MAX_STREAMS: Final = 64
"""Most calls of one connection; more wait at the caller. Two nodes need a handful."""

MAX_PENDING: Final = 8192
"""Calls of one method that wait for a look at their caller; gRPC cancels those beyond it, whoever made them."""

_MESSAGES: Final[Options] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
WINDOW_BYTES: Final = 4 << 20
"""Receive window of a stream: 200 MB/s at a round trip of 20 ms."""

_WINDOW: Final[Options] = (
    ("grpc.http2.bdp_probe", 0),  # else the window grows with the measured rate, to 79 MB
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)
FEW_BYTES: Final[Options] = (
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.max_concurrent_streams", MAX_STREAMS // 2),
)
"""Of a coordinator's server, to which nobody sends tensors; the part of a message that is being read comes on top."""

_PATIENCE_MS: Final = 60_000
"""Longest time without an answer to a ping, or an acknowledgement of sent bytes."""

_KEEPALIVE: Final[Options] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", _PATIENCE_MS),
    ("grpc.http2.ping_timeout_ms", _PATIENCE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS: Final[Options] = (
    *_MESSAGES,
    *_WINDOW,
    *_KEEPALIVE,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.address_http_proxy_enabled_addresses", ""),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # how long an attempt may take, with the handshakes of a slow link
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
"""For ``grpc.insecure_channel(address, options=CLIENT_OPTIONS)``."""

PROXY_VARIABLES: Final = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "GRPC_ADDRESS_HTTP_PROXY")
"""Variables that name a proxy; ``CLIENT_OPTIONS`` make calls ignore them, fetching from a hub follows them."""

SERVER_OPTIONS: Final[Options] = (
    *_MESSAGES,
    *_WINDOW,
    *_KEEPALIVE,
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
"""For ``grpc.server(pool, options=SERVER_OPTIONS)``; a busy port then raises at bind."""


WIRE: Final = 11
"""Number of the messages between nodes and coordinator: one more with each field that other builds would misread.

A node with another number can't join, so that each message has one reader.
"""


def is_compatible(version: str) -> bool:
    """Whether a process of ``version`` is compatible with this one: major and minor number are equal."""
    return version.split(".")[:2] == __version__.split(".")[:2]


def require_compatible(who: str, version: str) -> None:
    """Refuse a process of an incompatible version; raises ``UsageError``. ``who`` names it, such as ``node pi``."""
    if not is_compatible(version):
        raise UsageError(
            f"{who} runs ringtune {version or 'of an unknown version'}, this is {__version__}; install the same "
            "version on both"
        )
