"""A TCP tap between two processes: passes bytes on, keeps a copy, and may slow them down or hold them."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from dataclasses import dataclass, field

_PIECE_BYTES = 1 << 16
_HOLD_S = 60.0


@dataclass(slots=True)
class Connection:
    """One connection: what the opener sent and what it got."""

    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    @property
    def num_bytes(self) -> int:
        """Both ways, as TCP carries them: the framing of gRPC and HTTP/2 counts."""
        return len(self.sent) + len(self.received)

    @property
    def is_ring(self) -> bool:
        """Whether it carried a link of the ring; control calls use other connections."""
        return b"/ringtune.v1.Ring/Link" in self.sent


class Tap:
    """Listens on ``port`` and connects through to ``target_port``."""

    def __init__(self, target_port: int, *, delay_s: float = 0.0) -> None:
        self.flows: list[Connection] = []
        self.cut_at_bytes = self.hold_at_bytes = 0
        self.passes = threading.Event()  # what is held
        self._target_port = target_port
        self._delay_s = delay_s
        self._random = random.Random(5)
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End every connection, and take no other."""
        self._is_closed = True
        self.passes.set()
        self._end(self._listener)
        self.cut()

    def cut(self) -> None:
        """End every connection; others may come."""
        with contextlib.suppress(IndexError):  # none is left
            while True:
                self._end(self._sockets.pop())

    @staticmethod
    def _end(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow = Connection()
            self.flows.append(flow)
            self._sockets += [near, far]
            if self._is_closed:  # it was taken just before
                self.cut()
            threading.Thread(target=self._pump, args=(near, far, flow, flow.sent), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, flow, flow.received), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, flow: Connection, copy: bytearray) -> None:
        try:
            while piece := source.recv(_PIECE_BYTES):
                copy += piece
                if self._delay_s:
                    time.sleep(self._random.uniform(0, self._delay_s))
                if flow.received is copy and 0 < self.hold_at_bytes <= len(copy):
                    self.passes.wait(_HOLD_S)
                target.sendall(piece)
                if flow.received is copy and 0 < self.cut_at_bytes <= len(copy):
                    break
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
