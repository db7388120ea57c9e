"""Let the system hold connections on which nobody has said anything yet, so that they cost this process nothing.

gRPC makes ready for a handshake as soon as a connection is there: with encryption that is 45 KiB each, measured with
grpcio 1.85, of which half stays in the heap afterwards. Who calls speaks first, also in plain text, so a connection is
worth nothing before its first byte. Linux can wait for that (``TCP_DEFER_ACCEPT``); gRPC has no option for it, so the
listening socket is looked up among those of this process.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LOG = logging.getLogger(__name__)
DEFER_S: Final = 60
"""So long a silent connection stays with the system; after that it has as long as a handshake may take."""
_OWN: Final = Path("/proc/self/fd")


def defer_accept(port: int) -> int:
    """Let the listening sockets of this process on a port take only connections that have brought bytes.

    Returns:
        How many sockets that are; 0 on a system that has no such thing.
    """
    if not hasattr(socket, "TCP_DEFER_ACCEPT"):
        return 0
    count = 0
    for number in _numbers():
        try:
            copy = socket.socket(fileno=os.dup(number))
        except OSError:  # no socket, or closed meanwhile
            continue
        with copy:
            count += _defer(copy, port)
    if not count:
        _LOG.debug("port %d: silent connections are taken at once", port)
    return count


def _numbers() -> Iterator[int]:
    """List the file descriptors of this process that are sockets."""
    try:
        entries = sorted(_OWN.iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            if str(entry.readlink()).startswith("socket:"):
                yield int(entry.name)
        except OSError:  # it was the folder itself, or was closed meanwhile
            continue


def _defer(found: socket.socket, port: int) -> bool:
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
            return False
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_S)
    except OSError as error:
        _LOG.debug("port %d: silent connections are taken at once: %s", port, error)
        return False
    return True
