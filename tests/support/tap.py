"""A TCP tap between two processes: passes bytes on, keeps a copy, and may hold or cut them."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field

_PIECE_BYTES = 1 << 16
_HOLD_S = 60.0


@dataclass(slots=True)
class Connection:
    """One connection: what the opener sent and what it got, and whether it was cut."""

    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        """Both ways, as TCP carries them: the framing of gRPC and HTTP/2 counts."""
        return len(self.sent) + len(self.received)

    @property
    def is_ring(self) -> bool:
        """Whether it carried a link of the ring; control calls use other connections."""
        return b"/ringtune.v1.Ring/Link" in self.sent


class Tap:
    """Listens on ``port`` and connects through to ``target_port``.

    Attributes:
        cut_at_bytes: of an answer, after which its connection ends; 0 = never.
        hold_at_bytes: of an answer, after which it is held until ``passes`` is set; 0 = never.
        cut_every: bytes of all openers, after each of which all connections end; 0 = never.
        num_cuts: how often all connections were ended.
        passes: lets go what is held.
    """

    def __init__(self, target_port: int) -> None:
        self.flows: list[Connection] = []
        self.cut_at_bytes = self.hold_at_bytes = self.cut_every = self.num_cuts = 0
        self.passes = threading.Event()
        self.target_port = target_port
        self._uncut_bytes, self._lock = 0, threading.Lock()
        self._may_copy = threading.Event()
        self._may_copy.set()
        self._open: list[tuple[socket.socket, socket.socket, Connection]] = []
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def sent(self) -> bytes:
        """Everything that openers sent so far."""
        return b"".join(bytes(flow.sent) for flow in list(self.flows))

    def close(self) -> None:
        """End every connection, and take no other."""
        self._is_closed = True
        self._end(self._listener)
        self._listener.close()
        self.cut()
        self.passes.set()
        self._may_copy.set()

    def cut(self) -> None:
        """End every connection; others may come."""
        self.num_cuts += 1
        with contextlib.suppress(IndexError):  # none is left
            while True:
                near, far, flow = self._open.pop()
                flow.is_cut = True
                self._end(near)
                self._end(far)

    def freeze(self) -> None:
        """Copy nothing more, close nothing."""
        self._may_copy.clear()

    @staticmethod
    def _end(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow = Connection()
            self.flows.append(flow)
            self._open.append((near, far, flow))
            if self._is_closed:  # it was taken just before
                self.cut()
            threading.Thread(target=self._pass, args=(near, far, flow), daemon=True).start()

    def _pass(self, near: socket.socket, far: socket.socket, flow: Connection) -> None:
        """Pass bytes on both ways; a socket is closed once no thread uses it, as another one gets its number then."""
        back = threading.Thread(target=self._pump, args=(far, near, flow, flow.received), daemon=True)
        with near, far:
            back.start()
            self._pump(near, far, flow, flow.sent)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket, flow: Connection, copy: bytearray) -> None:
        is_answer = flow.received is copy
        try:
            while piece := source.recv(_PIECE_BYTES):
                self._may_copy.wait()
                if flow.is_cut:  # a socket that was shut down has the bytes still that came before
                    break
                is_last = False
                if (every := self.cut_every) and not is_answer:
                    piece, is_last = self._counted(piece, every)
                copy += piece
                if is_answer and 0 < self.hold_at_bytes <= len(copy):
                    self.passes.wait(_HOLD_S)
                target.sendall(piece)
                if is_last:
                    self.cut()
                if is_answer and 0 < self.cut_at_bytes <= len(copy):
                    break
        except OSError:
            pass
        self._end(source)
        self._end(target)

    def _counted(self, piece: bytes, every: int) -> tuple[bytes, bool]:
        """What of a piece goes through before the next cut, and whether that comes after it."""
        with self._lock:
            piece = piece[: every - self._uncut_bytes]
            self._uncut_bytes = (self._uncut_bytes + len(piece)) % every
            return piece, not self._uncut_bytes
