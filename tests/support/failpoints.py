"""Failpoints: named places where a test lets a process fail: end at once, stand still, be late, or lose a message.

``arm`` puts failpoints around files, calls and the work of runs of this process, and ``disarm`` takes them away; the
product knows nothing of them but ``ringtune.storage.durable.failpoint``. Processes of tests (``quick_template``,
``failing_command``) arm themselves where ``RINGTUNE_FAILPOINTS`` in their environment names a folder. There the file
with the name of the process, as ``node-1``, orders one failure::

    backward 3 kill               the process ends at once, as after SIGKILL, before its third backward
    send h* 1 delay 0.5           it waits half a second before it sends its first hidden state
    call Report 2 drop-reply      the second report reaches the coordinator, but its answer does not come back
    after backward 3 spoil        a gradient is infinite after the third backward
    after backward 3 scale        the gradients are multiplied by 1.001 after the third backward
    send h 9 withhold             from the ninth hidden state on it sends nothing to its neighbours (``HOSTILE``)

Places are ``forward``, ``backward`` and the other names of operations, each ``after`` one too; ``send h``,
``receive h`` and those of the other payloads; ``call NAME`` at who calls, and ``answer NAME`` before and
``answered NAME`` after at who is called; and what ``durable.failpoint`` names. A failure happens once: its file gets
the suffix ``.done`` in the moment before. A hostile one lasts until the process ends. The file may come, go and change
while the process runs. Places are counted from when the file is there.
Precedent: the failpoints of etcd (gofail).
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import grpc

from ringtune.errors import TrustError, UsageError
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.storage import durable
from ringtune.transport import tls

VARIABLE: Final = "RINGTUNE_FAILPOINTS"
"""Variable of the environment of a test's process: the folder of the orders."""
DONE_SUFFIX: Final = ".done"


class Failure(StrEnum):
    """What happens at a failpoint."""

    KILL = "kill"
    STOP = "stop"
    DELAY = "delay"
    ERROR = "error"
    DROP_REQUEST = "drop-request"
    DROP_REPLY = "drop-reply"
    SPOIL = "spoil"
    SCALE = "scale"
    WITHHOLD = "withhold"
    CUT = "cut"
    GARBAGE = "garbage"
    FLOOD = "flood"
    REFUSE = "refuse"


HOSTILE: Final = frozenset({Failure.WITHHOLD, Failure.CUT, Failure.GARBAGE, Failure.FLOOD, Failure.REFUSE})
"""What a node of the plan does from then on whose code was changed: it sends nothing; each message cut in half; random
messages before each one, or without end; it takes no links. It is deaf to refusals."""


@dataclass(frozen=True, slots=True)
class Order:
    """One failure: at the ``count``-th time of a place whose name matches ``place``, from 1."""

    place: str
    count: int
    failure: Failure
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read ``PLACE COUNT FAILURE [SECONDS]``; the place may have spaces and the wildcards of file names."""
        words = text.split()
        delay_s = float(words.pop()) if len(words) > 3 and words[-2] == Failure.DELAY else 0.0
        try:
            *place, count, failure = words
            order = cls(" ".join(place), int(count), Failure(failure), delay_s)
        except ValueError:
            raise UsageError(f"{text!r} is no failpoint; write PLACE COUNT FAILURE [SECONDS]") from None
        if not order.place or order.count < 1 or (order.failure is Failure.DELAY) != (delay_s > 0):
            raise UsageError(f"{text!r} is no failpoint: a place, a count from 1, and seconds of a delay are asked")
        return order

    def __str__(self) -> str:
        """As it stands in a file."""
        tail = f" {self.delay_s:g}" if self.delay_s else ""
        return f"{self.place} {self.count} {self.failure}{tail}"


def order_failure(folder: Path, name: str, text: str) -> Path:
    """Order one failure of a process; return the file that is there once it has happened, or begun."""
    done = folder / f"{name}{DONE_SUFFIX}"
    done.unlink(missing_ok=True)
    partial = folder / f".{name}"
    partial.write_text(str(Order.parse(text)))
    partial.replace(folder / name)
    return done


class Failpoints:
    """The failures of one process, as a folder orders them. Safe for threads.

    ``hostile`` is the hostile order that has begun; None = none has.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self.hostile: Order | None = None
        self._lock = threading.Lock()
        self._order: Order | None = None
        self._stamp = (0, 0)
        self._left = 0

    def due(self, place: str) -> Order | None:
        """Count a place; return the order if its failure is due, which then is done."""
        with self._lock:
            order = self._read()
            if order is None or not fnmatch.fnmatchcase(place, order.place):
                return None
            self._left -= 1
            if self._left:
                return None
            try:
                self._path.rename(self._path.with_name(self._path.name + DONE_SUFFIX))
            except FileNotFoundError:  # it was taken back just now
                return None
            self._stamp = (0, 0)  # the next file may have the same number on the disk, and come in the same moment
            if order.failure in HOSTILE:
                self.hostile = order
                return None
            return order

    def _read(self) -> Order | None:
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_mtime_ns)
            if stamp != self._stamp:
                self._order, self._stamp = Order.parse(self._path.read_text()), stamp
                self._left = self._order.count
        except FileNotFoundError:  # there is none, or it was taken back just now
            self._order, self._stamp = None, (0, 0)
        return self._order


_own: Failpoints | None = None
_REPLACED: Final[list[tuple[Any, str, Any]]] = []


def arm(name: str, folder: Path) -> None:
    """Let this process follow the orders of a folder."""
    global _own
    disarm()
    _own = Failpoints(folder, name)

    def channel(make: Any) -> Any:
        return lambda *given, **more: grpc.intercept_channel(make(*given, **more), FailingCalls())

    def server(make: Any) -> Any:
        return lambda *given, interceptors=(), **more: make(
            *given, interceptors=[*interceptors, FailingAnswers()], **more
        )

    _replace(durable, "failpoint", lambda _: reached)
    _replace(grpc, "insecure_channel", channel)
    _replace(tls, "secure_channel", channel)
    _replace(grpc, "server", server)
    if (preparing := sys.modules.get("edge.agent.agent")) is not None:
        from edge.agent.active_run import ActiveRun
        from edge.transport.link import OutLink
        from edge.transport.server import InLink

        _replace(preparing, "AgentRun", failing_run)
        _replace(OutLink, "_put", altering)
        _replace(ActiveRun, "on_ack", deaf)
        _replace(InLink, "_accept_link", refusing)


def disarm() -> None:
    """Let nothing fail any more."""
    global _own
    _own = None
    while _REPLACED:
        setattr(*_REPLACED.pop())


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    found = getattr(module, name)
    _REPLACED.append((module, name, found))
    setattr(module, name, make(found))


def hostile() -> Order | None:
    """Return the hostile order that has begun in this process; None = none has."""
    return _own.hostile if _own is not None else None


def reached(place: str) -> Order | None:
    """Fail here if that is ordered; return the order if the caller has to carry it out: to drop a message, or to spoil.

    Raises:
        OSError: the order is an error, as of a disk.
    """
    order = _own.due(place) if _own is not None else None
    if order is None:
        return None
    match order.failure:
        case Failure.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60.0)  # the signal may reach another thread first
        case Failure.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Failure.DELAY:
            time.sleep(order.delay_s)
        case Failure.ERROR:
            raise OSError(5, f"the failpoint {order}")
        case _:
            return order
    return None


class DroppedCallError(grpc.RpcError, grpc.Call):
    """A call whose request or reply was lost: what gRPC says when a connection breaks."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._what = what

    def code(self) -> grpc.StatusCode:
        """Return the status of a connection that broke."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Return what was lost."""
        return self._what

    def initial_metadata(self) -> tuple[Any, ...]:
        """Return nothing, as none came."""
        return ()

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Return nothing, as none came."""
        return ()

    def is_active(self) -> bool:
        """Return that it is over."""
        return False

    def time_remaining(self) -> float:
        """Return that it is over."""
        return 0.0

    def cancel(self) -> bool:
        """Return that it is too late."""
        return False

    def add_callback(self, callback: Any) -> bool:
        """Return that it is too late."""
        return False


class _BrokenStream:
    """The messages of a call that breaks before its last one."""

    def __init__(self, call: Any, what: str) -> None:
        self._call = call
        self._what = what

    def __iter__(self) -> Iterator[Any]:
        """Pass all messages on but the last one, then fail."""
        before: list[Any] = []
        for message in self._call:
            yield from before
            before = [message]
        raise DroppedCallError(self._what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class FailingCalls(
    grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor
):
    """Stands between a channel and those who call through it."""

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Make a call, or lose it."""
        return self._call(continuation, details, request)

    def intercept_stream_unary(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        """Make a call, or lose it."""
        return self._call(continuation, details, requests)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Make a call, or lose it, or break it before its last message."""
        order = reached(f"call {_name(details)}")
        if order is not None and order.failure is Failure.DROP_REQUEST:
            raise DroppedCallError(f"the failpoint {order}")
        outcome = continuation(details, request)
        return outcome if order is None else _BrokenStream(outcome, f"the failpoint {order}")

    def _call(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        order = reached(f"call {_name(details)}")
        if order is not None and order.failure is Failure.DROP_REQUEST:
            raise DroppedCallError(f"the failpoint {order}")
        outcome = continuation(details, request)
        if order is not None:
            with contextlib.suppress(grpc.RpcError):  # an error is a reply too
                outcome.result()
            raise DroppedCallError(f"the failpoint {order}")
        return outcome


class FailingAnswers(grpc.ServerInterceptor):
    """Stands between a server and its servicers: around every call but a link."""

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Put failpoints around the handler of a call."""
        handler = continuation(details)
        if handler is None or (handler.request_streaming and handler.response_streaming):
            return handler
        ways = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if is_stream else "unary" for is_stream in ways)
        behaviour = getattr(handler, kind)
        name = _name(details)

        def failing(request: Any, context: grpc.ServicerContext) -> Any:
            reached(f"answer {name}")
            reply = behaviour(request, context)
            reached(f"answered {name}")
            return reply

        def failing_stream(request: Any, context: grpc.ServicerContext) -> Any:
            reached(f"answer {name}")
            yield from behaviour(request, context)
            reached(f"answered {name}")

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        chosen = failing_stream if handler.response_streaming else failing
        return make(chosen, handler.request_deserializer, handler.response_serializer)


def _name(details: Any) -> str:
    """Return the name of a method without its service."""
    method = details.method
    return str(method.decode() if isinstance(method, bytes) else method).rpartition("/")[2]


class _Around:
    """Passes on to ``inner`` what is not said otherwise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FailingExecutor(_Around):
    """Around an ``Executor``: fails before and after each action, and when something arrived is taken."""

    def run(self, action: Action) -> tuple[tuple[str, float], ...]:
        """Do an action."""
        reached(action.op.name)
        values: tuple[tuple[str, float], ...] = self._inner.run(action)
        order = reached(f"after {action.op.name}")
        if order is not None and order.failure is Failure.SPOIL:
            self._spoil()
        if order is not None and order.failure is Failure.SCALE:
            part = self._inner.part  # a helper's own blocks may be anywhere in their step while it fits those of others
            for value in (part._hosted.parts.fitted() if action.op is Op.FIT else part.trained).values():
                if value.grad is not None:
                    value.grad *= 1.001
        return values

    def _spoil(self) -> None:
        """Make a gradient infinite, as a fault of the memory does."""
        grads = [value.grad for value in self._inner.part.trained.values() if value.grad is not None]
        for grad in grads[:1]:
            grad.view(-1)[0] = math.inf

    def put_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> None:
        """Take a tensor."""
        reached(f"receive {key.payload}")
        self._inner.put_tensor(key, tensor, mask)

    def put_parcel(self, key: TensorKey, data: Any) -> None:
        """Take a parcel."""
        reached(f"receive {key.payload}")
        self._inner.put_parcel(key, data)

    def load_head_blob(self, data: Any) -> None:
        """Take the head over."""
        reached(f"receive {Payload.HEAD}")
        self._inner.load_head_blob(data)


class FailingLink(_Around):
    """Around a ``Link``: fails before something is sent."""

    def send_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> int:
        """Send a tensor."""
        reached(f"send {key.payload}")
        sent: int = self._inner.send_tensor(key, tensor, mask)
        return sent

    def send_head(self, turn: int, data: Any) -> int:
        """Send a head."""
        reached(f"send {Payload.HEAD}")
        sent: int = self._inner.send_head(turn, data)
        return sent

    def send_parcel(self, key: TensorKey, data: Any) -> int:
        """Send a parcel."""
        reached(f"send {key.payload}")
        sent: int = self._inner.send_parcel(key, data)
        return sent


def failing_run(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes an ``AgentRun`` whose executor and links have failpoints around them."""

    def made(*, executor: Any, links: Any, **more: Any) -> Any:
        around = {name: FailingLink(link) for name, link in links.items()}
        return make(executor=FailingExecutor(executor), links=around, **more)

    return made


_GARBAGE: Final = 5
"""Random messages before each good one: in a run of the matrix fewer than a node reads of what it has to refuse."""


def _altered(messages: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the messages of one payload, as a process sends them that may be hostile."""
    order = hostile()
    match order.failure if order is not None else None:
        case Failure.WITHHOLD:
            return
        case Failure.CUT:
            yield from (message[: len(message) // 2] for message in messages)
        case Failure.GARBAGE:
            yield from (os.urandom(1000) for _ in range(_GARBAGE))
            yield from messages
        case Failure.FLOOD:
            while True:
                yield os.urandom(1000)
        case _:
            yield from messages


def altering(put: Callable[..., None]) -> Callable[..., None]:
    """Return what queues a payload of a link whose messages a hostile process alters."""
    return lambda link, entry: put(link, entry._replace(encode=lambda: _altered(entry.encode())))


def deaf(on_ack: Callable[..., None]) -> Callable[..., None]:
    """Return what takes an acknowledgement, of which a hostile process does not mind a refusal."""

    def taken(active: Any, target: str, ack: Any) -> None:
        on_ack(active, target, ack if hostile() is None else ack._replace(refusal="", error=""))

    return taken


def refusing(accept: Callable[..., None]) -> Callable[..., None]:
    """Return what accepts a link, which a hostile process may refuse."""

    def accepted(link: Any) -> None:
        order = hostile()
        if order is not None and order.failure is Failure.REFUSE:
            from edge.transport.server import refusal

            link._acks.put(refusal(TrustError("not today")))
        else:
            accept(link)

    return accepted
