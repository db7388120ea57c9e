"""Announce a coordinator on the local network, so that nodes find it that were told of none."""

from __future__ import annotations

import ipaddress
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ringtune
from ringtune.errors import UsageError
from ringtune.hints import hint_to_install
from ringtune.rpc.addresses import is_loopback, is_wildcard, own_host, split_address
from ringtune.trust.announcing import SERVICE, is_announced, words_of

_LONGEST_HOST = 40


@contextmanager
def announcing(
    address: str,
    *,
    asked: bool | None,
    authority_sha256: str,
    say: Callable[[str], object],
    interfaces: Sequence[str] = (),
) -> Iterator[bool]:
    """Announce the coordinator while the context is open; yields whether it is.

    Args:
        address: ``host:port`` where it listens.
        asked: ``--announce`` or ``--no-announce``; None = announce where others can reach it.
        authority_sha256: of its authority, hex; empty = plain text.
        say: is told why it is not announced though it could be reached.
        interfaces: addresses of the interfaces to announce on; empty = all, for this machine only the loopback.

    Raises:
        UsageError: it was asked for, and can't be done.
    """
    if not is_announced(is_loopback=is_loopback(address), asked=asked):
        yield False
        return
    network, problem = _announce(address, authority_sha256, interfaces)
    if problem and asked:
        raise UsageError(f"--announce: {problem}")
    if problem:
        say(f"not announced on the network: {problem}")
    try:
        yield network is not None
    finally:
        if network is not None:
            network.unregister_all_services()
            network.close()


def _announce(address: str, authority_sha256: str, interfaces: Sequence[str]) -> tuple[Any, str]:
    """Register the service; return the library's object, or None and why not."""
    host, port = split_address(address, option="--bind")
    host = own_host() if is_wildcard(address) else host
    try:
        from zeroconf import Error, InterfaceChoice, ServiceInfo, Zeroconf
    except ImportError:
        return None, f"the library for it is missing: {hint_to_install('discovery')}"
    try:
        packed = ipaddress.ip_address(host).packed
    except ValueError:
        return None, f"{host or 'this machine'} is no address on a network; give an address to --bind"
    label = "".join(letter for letter in platform.node() if letter.isalnum() or letter in "-_")[:_LONGEST_HOST]
    chosen = list(interfaces) or (["127.0.0.1"] if is_loopback(address) else InterfaceChoice.All)
    try:
        network = Zeroconf(interfaces=chosen)
    except OSError as error:
        return None, f"the network can't be used for it ({error})"
    info = ServiceInfo(
        SERVICE,
        f"{label or 'coordinator'} {port}.{SERVICE}",
        addresses=[packed],
        port=port,
        properties=words_of(ringtune.__version__, authority_sha256),
    )
    try:
        network.register_service(info, allow_name_change=True)
    except (Error, OSError) as error:
        network.close()
        return None, f"the network refused it ({type(error).__name__})"
    return network, ""
