"""Discovery of coordinators on the local network (DNS-SD), and the choice of one for a node without an address.

An announcement has a name, addresses, a port and TXT words: its format, the version of RingTune, and the first digits
of the hash of the coordinator's authority. It is public and unauthenticated, as anybody may announce anything, so it is
only an address to try. A node joins without an address only if its token or certificate names the authority; the whole
hash is compared before the token's secret is sent (``ringtune.transport.enrollment``).

Source: RFC 6763, DNS-based service discovery.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ringtune.errors import ConnectionFailedError, TrustError, UsageError
from ringtune.texts import shown
from ringtune.transport.endpoints import join_address

SERVICE: Final = "_ringtune._tcp.local."
LOOK_S: Final = 3.0
"""Seconds of a node's search for coordinators."""
MAX_FOUND: Final = 32
"""Most announcements that are read, against flooding."""
_MAX_ADDRESSES: Final = 8
_LONGEST_NAME: Final = 63
_FORM: Final = b"1"
_PREFIX_DIGITS: Final = 16
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,32}")
_AUTHORITY = re.compile(rf"[0-9a-f]{{{_PREFIX_DIGITS}}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """Announcement of a coordinator; ``authority``: first hex digits of its certificate's SHA-256, or empty."""

    name: str
    address: str
    version: str
    authority: str

    def __str__(self) -> str:
        """Write one line: ``'desk' at 192.168.1.10:7070 (version 0.2.0, authority 0123456789abcdef)``."""
        authority = f"authority {self.authority}" if self.authority else "plain text"
        return f"{shown(self.name)} at {self.address} (version {self.version}, {authority})"


def words_of(version: str, authority_sha256: str) -> dict[str, bytes]:
    """Return the TXT words of an announcement; an empty ``authority_sha256`` (hex) means plain text."""
    words = {"form": _FORM, "version": version.encode()}
    return words | ({"authority": authority_sha256[:_PREFIX_DIGITS].encode()} if authority_sha256 else {})


def read_announcement(
    name: str, addresses: Sequence[str], port: object, words: Mapping[bytes, bytes | None]
) -> Announcement | None:
    """Parse an announcement; None if it is not one of a coordinator in this format.

    ``name`` is without the service's; of ``addresses`` the first usable one is taken.
    """
    version, authority = _text(words.get(b"version")), _text(words.get(b"authority"))
    host = next((address for address in addresses[:_MAX_ADDRESSES] if _can_be_called(address)), "")
    known = words.get(b"form") == _FORM and _VERSION.fullmatch(version) is not None
    if not known or not host or not isinstance(port, int) or not 0 < port < 65536:
        return None
    if authority and _AUTHORITY.fullmatch(authority) is None:
        return None
    address = join_address(host, port)
    return Announcement(name=name[:_LONGEST_NAME], address=address, version=version, authority=authority)


def _text(value: bytes | None) -> str:
    return (value or b"")[:256].decode("ascii", errors="replace")


def _can_be_called(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not (address.is_multicast or address.is_unspecified or address.is_reserved)


def choose(
    announcements: Iterable[Announcement], *, authorities: Sequence[str], what: str, looked_s: float = LOOK_S
) -> str:
    """Return the address of the coordinator that a node joins without one.

    ``authorities`` are the SHA-256, hex, of those that the node's token or certificate (``what``, for messages) trusts;
    none = it has neither.
    """
    listed = sorted(set(announcements), key=lambda announcement: (announcement.address, announcement.name))
    if not listed:
        raise ConnectionFailedError(
            f"no coordinator was found on this network within {looked_s:g} s; give --coordinator HOST:PORT. One is "
            "announced unless it listens at 127.0.0.1 only, or was started with --no-announce"
        )
    lines = "; ".join(map(str, listed))
    if not authorities:
        raise UsageError(
            f"found {lines}; a node without a token joins none by itself: give --token-file FILE, or --coordinator "
            "HOST:PORT with --insecure where the network is trusted"
        )
    prefixes = [sha256[:_PREFIX_DIGITS] for sha256 in authorities]
    trusted = {announcement.address for announcement in listed if announcement.authority in prefixes}
    if not trusted:
        raise TrustError(
            f"found {lines}; none has the authority {' or '.join(prefixes)} of {what}, which was shown to none of "
            "them; give --coordinator HOST:PORT, or ask for a new token"
        )
    if len(trusted) > 1:
        raise UsageError(f"found {lines}; several have the authority of {what}: give --coordinator with one of them")
    return trusted.pop()


def is_announced(*, is_loopback: bool, asked: bool | None) -> bool:
    """Whether a coordinator announces itself: as ``asked`` by option, else unless it is on loopback."""
    return not is_loopback if asked is None else asked
