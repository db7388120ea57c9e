"""Enrollment of a node: its name, its certificate, and the coordinator that it joins.

A node has a token, an earlier certificate, or works without encryption. Without an address it joins the coordinator at
this machine's default address; else those announced on the local network are listed, and
``ringtune.transport.discovery`` chooses one.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edge.options import all_states, default_name
from ringtune.errors import BusyError, ConnectionFailedError, RingTuneError, TokenError, TrustError, UsageError
from ringtune.hints import hint_to_install
from ringtune.ids import check_node_name
from ringtune.options import DEFAULT_COORDINATOR
from ringtune.transport.credentials import Credentials, refuse_both, use_credentials, use_credentials_from
from ringtune.transport.discovery import LOOK_S, MAX_FOUND, SERVICE, Announcement, choose, read_announcement
from ringtune.transport.endpoints import split_address
from ringtune.transport.parties import IDENTITY, NODE_ROLE, Party, Token, node_party, node_trust, parse_token

_LOG = logging.getLogger(__name__)
_LONGEST_TOKEN = 1024
_RETRY_S = 1.0


def resolve_node_name(
    name: str, trust: Path | None, token_file: Path | None, *, state: Path | None, insecure: bool
) -> tuple[str, Token | None]:
    """Return the name of this node: the given one, that of its token or certificate, else that of its host.

    ``name``, ``trust`` and ``state`` are as the user gave them, else empty or None; without ``state`` all state
    folders of this user are looked at. A missing ``token_file`` is ignored here; ``-`` = standard input.

    Returns:
        The name, and the token if it was read.

    Raises:
        TokenError: the token is damaged, or for a user.
        TrustError: the certificate can't be read.
    """
    if name or insecure:
        return check_node_name(name or default_name()), None
    if token_file is not None and (str(token_file) == "-" or token_file.is_file()):
        token = read_token(token_file)
        if token.party.role != NODE_ROLE:
            raise TokenError(_another(token_file, token, "a node"))
        return token.party.name, token
    folders = [trust] if trust else [node_trust(state_folder) for state_folder in ([state] if state else all_states())]
    joined = [folder for folder in folders if (folder / IDENTITY).is_file()]
    if len(joined) != 1:
        return default_name(), None
    from ringtune.transport.identity import read_identity

    return read_identity(joined[0], time.time()).party.name, None


def choose_trust(
    name: str,
    trust: Path | None,
    token_file: Path | None,
    *,
    state: Path,
    coordinator: str,
    insecure: bool,
    is_local: bool = False,
    join_s: float = 0.0,
    token: Token | None = None,
) -> Path | None:
    """Use this node's identity for all channels; no encryption if it has neither identity nor token.

    A token is used only if there is no identity yet, so the first command line works again later; or if the identity is
    of no use: it has expired, the coordinator refuses it, as that of a removed node, or it does not trust the token's
    authority, which is a later one, as that of a node that was away while the authority was rotated.

    Args:
        name: of the node.
        trust: given folder of its identity; None = in its state folder.
        token_file: with a join token; ``-`` = standard input.
        state: the node's state folder.
        coordinator: ``host:port``.
        insecure: whether the user asked for no encryption.
        join_s: seconds to try to reach the coordinator with a token.
        is_local: whether the node is of a local run, which is unencrypted unless it has a token.
        token: of ``token_file``, if already read; standard input can be read only once.

    Returns:
        The folder of the identity; None = no encryption.

    Raises:
        TrustError: identity or token can't be used, or is another node's.
        ConnectionFailedError: nothing answers at the coordinator's host.
        UsageError: both certificates and no encryption are requested.
    """
    refuse_both(trust or token_file, insecure=insecure)
    folder = trust or node_trust(state)
    is_asked = trust is not None or token_file is not None
    if insecure or not (is_asked or ((folder / IDENTITY).is_file() and not is_local)):
        use_credentials(None)
        return None
    if token_file is not None and not (folder / IDENTITY).is_file():
        join_as(node_party(name), token_file, folder, coordinator, join_s, token=token)
    elif token_file is not None and str(token_file) != "-":  # later starts may have nothing on standard input
        _join_anew(node_party(name), token_file, folder, coordinator, token=token)
    require_name(use_credentials_from(folder).identity.party, node_party(name), folder)
    return folder


def _join_anew(party: Party, token_file: Path, folder: Path, coordinator: str, *, token: Token | None) -> None:
    """Exchange a token where the identity is of no use any more; one that is used or gone changes nothing."""
    from ringtune.transport.enrollment import join, refusal
    from ringtune.transport.identity import fingerprint, read_identity

    try:
        token = token or token_for(party, token_file)
        present, why = None, ""
        try:
            present = read_identity(folder, time.time())
        except TrustError as error:
            why = str(error)
        if present is not None:
            is_of_other = token.authority_sha256 not in map(fingerprint, present.authorities)
            why = "the token is of a later authority" if is_of_other else refusal(coordinator, Credentials(present))
        if why:
            join(coordinator, token, folder, instead_of=present)
            _LOG.warning("%s has a new certificate for the token in %s: %s", party, token_file, why)
    except RingTuneError as error:
        _LOG.info("%s has a certificate in %s, the token in %s is not used: %s", party, folder, token_file, error)


def join_as(
    party: Party, token_file: Path, folder: Path, coordinator: str, join_s: float, *, token: Token | None = None
) -> None:
    """Exchange a token of this party for a certificate; retry an unreachable or busy one for ``join_s`` seconds.

    Raises:
        BusyError: too many calls came from this address.
        TrustError: the token can't be used, or is for another party.
        ConnectionFailedError: nothing answers at the coordinator's host.
    """
    token = token or token_for(party, token_file)
    from ringtune.transport.enrollment import join

    deadline_s = time.monotonic() + join_s
    while True:
        try:
            join(coordinator, token, folder)
            return
        except (BusyError, ConnectionFailedError) as error:
            if time.monotonic() + _RETRY_S > deadline_s:
                raise
            _LOG.info("%s can't join yet: %s", party, error)
        time.sleep(_RETRY_S)


def token_for(party: Party, token_file: Path) -> Token:
    """Read a token from a file, and refuse one of another party; raises ``TokenError`` or ``UsageError``."""
    token = read_token(token_file)
    if token.party != party:
        if token.party.role == party.role:
            told = f"the join token in {token_file} is for {token.party}, not for {party}"
            raise TokenError(f"{told}; leave --name out, or give --name {token.party.name}")
        raise TokenError(_another(token_file, token, str(party)))
    return token


def _another(token_file: Path, token: Token, name: str) -> str:
    told = f"the join token in {token_file} is for {token.party}, not for {name}"
    return f"{told}; make one for the node with 'ringtune coordinator token NAME'"


def read_token(file: Path) -> Token:
    """Read a token from a file, or from standard input for ``-``; raises ``TokenError`` or ``UsageError``."""
    try:
        if str(file) == "-":
            return parse_token(sys.stdin.read(_LONGEST_TOKEN))
        with file.open(encoding="utf-8", errors="replace") as opened:
            return parse_token(opened.read(_LONGEST_TOKEN))
    except OSError as error:
        raise UsageError(f"can't read --token-file {file}: {error.strerror}; correct the path") from error


def require_name(certified: Party, party: Party, folder: Path) -> None:
    """Refuse a certificate with another name, and stop using its identity; raises ``TrustError``."""
    if certified != party:
        use_credentials(None)
        raise TrustError(f"the certificate in {folder} is of {certified}, not of {party}; correct --name or --trust")


_CONNECT_S = 0.2
_ASK_MS = 1000


def find_coordinator(
    name: str, trust: Path | None, token_file: Path | None, *, state: Path, insecure: bool, token: Token | None = None
) -> tuple[str, Token | None]:
    """Find the coordinator that this node joins, and the token if it was read; arguments as ``choose_trust``.

    Raises:
        ConnectionFailedError: none was found.
        TrustError: none of those found has the authority of token or certificate, or these can't be used.
        UsageError: several are possible, or the node has neither; or the discovery library is missing.
    """
    refuse_both(trust or token_file, insecure=insecure)
    if _listens(DEFAULT_COORDINATOR):
        return DEFAULT_COORDINATOR, token
    folder, party = trust or node_trust(state), node_party(name)
    authorities, what = list[str](), ""
    if not insecure and ((folder / IDENTITY).is_file() or (trust is not None and token_file is None)):
        authorities, what = _authorities_of(folder, party), f"the certificate in {folder}"
    elif not insecure and token_file is not None:
        token = token or token_for(party, token_file)
        authorities, what = [token.authority_sha256], "the join token"
    announcements = announced(LOOK_S)
    for announcement in announcements:
        _LOG.info("found the coordinator %s", announcement)
    address = choose(announcements, authorities=authorities, what=what)
    _LOG.info("joining %s, which has the authority of %s", address, what)
    return address, token


def _listens(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(split_address(address, option=""), _CONNECT_S):
        return True
    return False


def _authorities_of(folder: Path, party: Party) -> list[str]:
    from ringtune.transport.identity import fingerprint, read_identity

    identity = read_identity(folder, time.time())
    require_name(identity.party, party, folder)
    return [fingerprint(authority) for authority in identity.authorities]


def announced(
    look_s: float,
    *,
    interfaces: Sequence[str] = (),
    enough: Callable[[Announcement], bool] = lambda announcement: False,
) -> list[Announcement]:
    """Return the announced coordinators, at most ``MAX_FOUND``; raises ``UsageError``.

    Listens for ``look_s`` seconds on ``interfaces`` (empty = all), until ``enough`` accepts an announcement.
    """
    try:
        from zeroconf import InterfaceChoice, ServiceBrowser, ServiceStateChange, Zeroconf
    except ImportError as error:
        raise UsageError(
            f"no --coordinator was given, and none listens at {DEFAULT_COORDINATOR}; give --coordinator HOST:PORT, or "
            f"install what discovers one: {hint_to_install('discovery')}"
        ) from error
    names: queue.Queue[str] = queue.Queue(MAX_FOUND)

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Added:
            with contextlib.suppress(queue.Full):
                names.put_nowait(name)

    try:
        network = Zeroconf(interfaces=list(interfaces) or InterfaceChoice.All)
    except OSError as error:
        raise UsageError(
            f"can't search for a coordinator on this network ({error}); give --coordinator HOST:PORT"
        ) from error
    with contextlib.closing(network):
        browser = ServiceBrowser(network, SERVICE, handlers=[changed])
        try:
            return _read(network, names, time.monotonic() + look_s, enough)
        finally:
            browser.cancel()


def _read(
    network: Any, names: queue.Queue[str], deadline_s: float, enough: Callable[[Announcement], bool]
) -> list[Announcement]:
    """Request the announcement of each name, until the deadline or ``enough``; again of one that is slow to tell it."""
    announcements: list[Announcement] = []
    num_names = 0
    while num_names < MAX_FOUND and (left_s := deadline_s - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty, queue.Full):
            name = names.get(timeout=left_s)
            num_names += 1
            info = network.get_service_info(SERVICE, name, timeout=min(_ASK_MS, max(1, int(left_s * 1000))))
            if info is None:
                names.put_nowait(name)
                continue
            announcement = read_announcement(
                name.removesuffix(f".{SERVICE}"), info.parsed_addresses(), info.port, info.properties
            )
            if announcement is not None:
                announcements.append(announcement)
                if enough(announcement):
                    break
    return announcements
