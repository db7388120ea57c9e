"""Limits of a server for each caller: open calls, calls a second, and the time until a call's first message.

A caller is the party in its certificate, or without one its address. Each open call holds a thread, so a caller may
have so many; beyond that, and where the threads are nearly used up by all, the oldest call without a message is ended
in favour of the new one. ``OpenCalls.end_silent`` ends calls whose first message is late, and calls of removed callers.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, Protocol
from urllib.parse import unquote

from ringtune.errors import BusyError
from ringtune.texts import RepeatCounter, times

_LOG = logging.getLogger(__name__)
_NETWORK_BITS: Final = 64
"""Prefix of an IPv6 network, all addresses of which one machine may have."""


def address_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer; of IPv6 its network.

    Example: ``ipv4:10.0.0.7:41234`` gives ``10.0.0.7``, ``ipv6:%5B2001:db8::7%5D:41234`` gives ``2001:db8::/64``.
    """
    host = unquote(peer).rpartition(":")[0].partition(":")[2].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))


def place_of(peer: str) -> tuple[str, int]:
    """Return address and port in gRPC's name of a peer; of another kind than IP an empty address."""
    host, _, port = unquote(peer).rpartition(":")
    return numeric_host(host.partition(":")[2].strip("[]")), int(port) if port.isdigit() else 0


def numeric_host(host: str) -> str:
    """Return an IP address in one form, an IPv4 address that is mapped into IPv6 as IPv4; others are left."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    return str((address.version == 6 and address.ipv4_mapped) or address)


class Context(Protocol):
    """Of a call, as gRPC has it."""

    def cancel(self) -> object:
        """End the call."""


class OpenCall:
    """A call that holds a thread.

    ``caller`` is its party or address, ``first_s`` are the seconds until its first message must have arrived.
    """

    __slots__ = ("caller", "context", "due_s", "has_spoken", "is_refused")

    def __init__(self, caller: str, context: Context, first_s: float, is_refused: Callable[[], object]) -> None:
        self.caller, self.context, self.is_refused = caller, context, is_refused
        self.due_s = time.monotonic() + first_s
        self.has_spoken = False


class OpenCalls:
    """The open calls on one set of threads; safe for threads. ``most``: calls of all callers together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: dict[OpenCall, None] = {}
        self._of_caller: Counter[str] = Counter()
        self._repeats = RepeatCounter()

    def admit(self, call: OpenCall, most_of_caller: int) -> bool:
        """Add a call; end a silent one where there are too many, and return whether that was one of the same caller."""
        with self._lock:
            number = self._of_caller[call.caller]
            silent = None
            if number >= most_of_caller or len(self._calls) >= self._most:
                is_own = number >= most_of_caller
                others = (each for each in self._calls if not is_own or each.caller == call.caller)
                silent = next((each for each in others if not each.has_spoken), None)
                if silent is None:
                    raise BusyError(f"{call.caller} has {number} calls open here; end some, or try again later")
                self._drop(silent)
            self._calls[call] = None
            self._of_caller[call.caller] += 1
        if silent is not None:
            self._end(silent, "others came after it")
        return silent is not None and silent.caller == call.caller

    def noted(self, call: OpenCall, messages: Iterable[Any]) -> Iterator[Any]:
        """Pass the messages of a call on; raises ``BusyError``."""
        for message in messages:
            if not call.has_spoken:
                with self._lock:
                    if call not in self._calls:
                        raise BusyError("the call was ended before its first message; try again later")
                    call.has_spoken = True
            yield message

    def leave(self, call: OpenCall) -> None:
        """Remove a call that has ended; one that was ended here is no error."""
        with self._lock:
            self._drop(call)

    def _drop(self, call: OpenCall) -> None:
        if call in self._calls:
            del self._calls[call]
            self._of_caller[call.caller] -= 1
            if not self._of_caller[call.caller]:
                del self._of_caller[call.caller]

    def end_silent(self, now_s: float) -> None:
        """End the calls whose first message is overdue, and those of removed callers."""
        with self._lock:
            late = [call for call in self._calls if not call.has_spoken and now_s > call.due_s]
            gone = [call for call in self._calls if call.is_refused()]
            for call in (*late, *gone):
                self._drop(call)
        for call in late:
            self._end(call, "no message arrived in time")
        for call in gone:
            self._end(call, "the caller was removed")

    def _end(self, call: OpenCall, why: str) -> None:
        count = self._repeats.told((call.caller, why))
        if count:
            _LOG.warning("a call of %s is ended: %s%s", call.caller, why, times(count))
        call.context.cancel()


_MAX_KEYS: Final = 4096


class TokenBucket:
    """At most ``most`` events of a key at once, and ``per_s`` a second in the long run; safe for threads."""

    def __init__(self, most: int, per_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most, self._per_s, self._now_s = most, per_s, now_s
        self._lock = threading.Lock()
        self._levels: dict[Hashable, tuple[float, float]] = {}

    def allows(self, key: Hashable) -> bool:
        """Whether the key has a token left."""
        with self._lock:
            return self._level(key, self._now_s()) >= 1.0

    def take(self, key: Hashable) -> bool:
        """Count an event if the key has a token left; return whether it has."""
        with self._lock:
            now_s = self._now_s()
            level = self._level(key, now_s)
            if level < 1.0:
                return False
            if len(self._levels) >= _MAX_KEYS:
                self._levels = {
                    known: entry for known, entry in self._levels.items() if self._level(known, now_s) < self._most
                }
            self._levels[key] = level - 1.0, now_s
            return True

    def _level(self, key: Hashable, now_s: float) -> float:
        level, at_s = self._levels.get(key, (float(self._most), now_s))
        return min(float(self._most), level + abs(now_s - at_s) * self._per_s)  # a clock may be set back
