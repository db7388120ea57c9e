"""What one visitor's connections may take of a page: each makes a request in time, and no address has most of them.

Without this, connections that say nothing hold all places, and everybody else gets 503. The server closes one that is
idle after an answer (``timeout_keep_alive``), and none before its first request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS: Final = 256
MOST_OF_AN_ADDRESS: Final = 128
"""Half of all: behind an address may be a tunnel with several browsers, each with some connections."""
REQUEST_S: Final = 10.0
"""How long the line and the headers of a request may take, from the connection or from their first byte."""


def connections_of_a_page() -> type[H11Protocol]:
    """Make the class of one page's connections, which are counted together."""

    class Counted(_Connection):
        of_address: ClassVar[Counter[str]] = Counter()

    return Counted


class _Connection(H11Protocol):
    of_address: ClassVar[Counter[str]]
    _deadline: asyncio.TimerHandle | None = None
    _address = ""

    def connection_made(self, transport: Any) -> None:
        """Take a connection, unless its address has as many as it may have."""
        super().connection_made(transport)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        self.of_address[self._address] += 1
        if self.of_address[self._address] > MOST_OF_AN_ADDRESS:
            transport.close()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give its place back."""
        self._answer_begins()
        self.of_address[self._address] -= 1
        if not self.of_address[self._address]:
            del self.of_address[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a request have to be whole in time."""
        super().data_received(data)
        if self._is_answering():
            self._answer_begins()
        else:
            self._await_request()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._too_late)

    def _answer_begins(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()
