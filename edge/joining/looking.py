"""Look for coordinators on the local network, for a node that was told of none.

A coordinator at this machine's default address is taken at once. Otherwise those are listed that are announced, and
``ringtune.trust.announcing`` says which of them the node may join.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edge.joining.choose_trust import require_name, token_for
from ringtune.errors import UsageError
from ringtune.hints import hint_to_install
from ringtune.options import DEFAULT_COORDINATOR
from ringtune.rpc.addresses import split_address
from ringtune.trust.announcing import LOOK_S, MOST_FOUND, SERVICE, Announcement, choose, read_announcement
from ringtune.trust.choosing import refuse_both
from ringtune.trust.parties import Party, node_party
from ringtune.trust.places import IDENTITY, node_trust
from ringtune.trust.tokens import Token

_LOG = logging.getLogger(__name__)
_CONNECT_S = 0.2
_ASK_MS = 1000


def find_coordinator(
    name: str,
    trust: Path | None,
    token_file: Path | None,
    *,
    state: Path,
    insecure: bool,
    token: Token | None = None,
) -> tuple[str, Token | None]:
    """Find the coordinator that this node joins.

    Args:
        name: of the node.
        trust: folder of its identity, as the user said; None = in its state folder.
        token_file: file with a join token; ``-`` = standard input.
        state: the node's state folder.
        insecure: whether the user wants plain text.
        token: that of ``token_file``, if it was read already; standard input can be read once.

    Returns:
        Its address, and the token if it was read.

    Raises:
        ConnectionFailedError: none was found.
        TrustError: none that was found has the authority of the token or certificate, or these can't be used.
        UsageError: several may be meant, or the node has neither; or the library that looks is missing.
    """
    refuse_both(trust or token_file, insecure=insecure)
    if _listens(DEFAULT_COORDINATOR):
        return DEFAULT_COORDINATOR, token
    folder, party = trust or node_trust(state), node_party(name)
    authority_sha256, what = "", ""
    if not insecure and ((folder / IDENTITY).is_file() or (trust is not None and token_file is None)):
        authority_sha256, what = _authority_of(folder, party), f"the certificate in {folder}"
    elif not insecure and token_file is not None:
        token = token or token_for(party, token_file)
        authority_sha256, what = token.authority_sha256, "the join token"
    found = announced(LOOK_S)
    for one in found:
        _LOG.info("found the coordinator %s", one)
    address = choose(found, authority_sha256=authority_sha256, what=what)
    _LOG.info("joining %s, which has the authority of %s", address, what)
    return address, token


def _listens(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(split_address(address, option=""), _CONNECT_S):
        return True
    return False


def _authority_of(folder: Path, party: Party) -> str:
    """Return the hash of the authority that gave this party its certificate."""
    from ringtune.trust.certificates import fingerprint
    from ringtune.trust.identity import read_identity

    identity = read_identity(folder, time.time())
    require_name(identity.party, party, folder)
    return fingerprint(identity.authority_pem)


def announced(
    look_s: float, *, interfaces: Sequence[str] = (), enough: Callable[[Announcement], bool] = lambda found: False
) -> list[Announcement]:
    """List the coordinators that are announced; at most so many are looked at.

    Args:
        look_s: for how long, seconds.
        interfaces: addresses of the interfaces to look on; empty = all.
        enough: whether one that was found ends the looking.

    Raises:
        UsageError: the library is not installed, or the network can't be looked on.
    """
    try:
        from zeroconf import InterfaceChoice, ServiceBrowser, ServiceListener, Zeroconf
    except ImportError as error:
        raise UsageError(
            f"no --coordinator was given, and none listens at {DEFAULT_COORDINATOR}; give --coordinator HOST:PORT, or "
            f"install what looks for one: {hint_to_install('discovery')}"
        ) from error
    names: queue.Queue[str] = queue.Queue(MOST_FOUND)

    class Listener(ServiceListener):
        """Writes names down, as many as are looked at."""

        def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            """Take a new name."""
            with contextlib.suppress(queue.Full):
                names.put_nowait(name)

        def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            """Leave a changed one: it is asked for when it is read."""

        def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            """Leave one that is gone: it does not answer."""

    try:
        network = Zeroconf(interfaces=list(interfaces) or InterfaceChoice.All)
    except OSError as error:
        raise UsageError(
            f"can't look for a coordinator on this network ({error}); give --coordinator HOST:PORT"
        ) from error
    with contextlib.closing(network):
        browser = ServiceBrowser(network, SERVICE, Listener())
        try:
            return _read(network, names, time.monotonic() + look_s, enough)
        finally:
            browser.cancel()


def _read(
    network: Any, names: queue.Queue[str], deadline_s: float, enough: Callable[[Announcement], bool]
) -> list[Announcement]:
    """Ask for what each name announces, until the time is over or enough were asked for."""
    found: list[Announcement] = []
    asked = 0
    while asked < MOST_FOUND and (left_s := deadline_s - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            name = names.get(timeout=left_s)
            asked += 1
            info = network.get_service_info(SERVICE, name, timeout=min(_ASK_MS, max(1, int(left_s * 1000))))
            one = info and read_announcement(
                name.removesuffix(f".{SERVICE}"), info.parsed_addresses(), info.port, info.properties
            )
            if one is not None:
                found.append(one)
                if enough(one):
                    break
    return found
