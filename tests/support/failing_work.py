"""A run's executor and links that fail where a failpoint says.

The places are ``forward``, ``backward`` and the other names of operations, each ``after`` one too, ``send h``,
``receive h`` and those of the other payloads. Below them stands what a hostile process does instead of its work.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from ringtune.errors import TrustError
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from tests.support import failpoints
from tests.support.failpoints import Failure


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
        failpoints.reached(action.op.name)
        values: tuple[tuple[str, float], ...] = self._inner.run(action)
        order = failpoints.reached(f"after {action.op.name}")
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
        failpoints.reached(f"receive {key.payload}")
        self._inner.put_tensor(key, tensor, mask)

    def put_parcel(self, key: TensorKey, data: Any) -> None:
        """Take a parcel."""
        failpoints.reached(f"receive {key.payload}")
        self._inner.put_parcel(key, data)

    def load_head_blob(self, data: Any) -> None:
        """Take the head over."""
        failpoints.reached(f"receive {Payload.HEAD}")
        self._inner.load_head_blob(data)


class FailingLink(_Around):
    """Around a ``Link``: fails before something is sent."""

    def send_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> int:
        """Send a tensor."""
        failpoints.reached(f"send {key.payload}")
        sent: int = self._inner.send_tensor(key, tensor, mask)
        return sent

    def send_head(self, turn: int, data: Any) -> int:
        """Send a head."""
        failpoints.reached(f"send {Payload.HEAD}")
        sent: int = self._inner.send_head(turn, data)
        return sent

    def send_parcel(self, key: TensorKey, data: Any) -> int:
        """Send a parcel."""
        failpoints.reached(f"send {key.payload}")
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
    order = failpoints.hostile()
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
        on_ack(active, target, ack if failpoints.hostile() is None else ack._replace(refusal="", error=""))

    return taken


def refusing(accept: Callable[..., None]) -> Callable[..., None]:
    """Return what accepts a link, which a hostile process may refuse."""

    def accepted(link: Any) -> None:
        order = failpoints.hostile()
        if order is not None and order.failure is Failure.REFUSE:
            from edge.transport.server import refusal

            link._acks.put(refusal(TrustError("not today")))
        else:
            accept(link)

    return accepted
