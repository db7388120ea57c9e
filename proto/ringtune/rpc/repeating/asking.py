"""Make a call until it is answered: again where no answer came, for a lease at most; see ``patience``."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from ringtune.errors import FrameError, PeerLostError
from ringtune.rpc.repeating.held import Held, is_at_work, is_silence
from ringtune.rpc.repeating.patience import RETRY_S, Patience

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_LONGEST_S = 24 * 3600.0


class Asking:
    """One call with one answer, in as many attempts as it takes.

    Args:
        method: of a stub.
        request: of the call.
        peer: who is asked, in words.
        lease_s: who is silent for so long is lost.
        timeout_s: for the whole call; None = as long as there are signs of life.
        is_held: whether the other one carries it out once, see ``once``; else it may hear it twice, and answers soon.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        method: Any,
        request: Any,
        *,
        peer: str,
        lease_s: float,
        timeout_s: float | None = None,
        is_held: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._method, self._request, self._peer = method, request, peer
        self._lease_s, self._timeout_s = lease_s, timeout_s or _LONGEST_S
        self._key, self._now_s = secrets.token_hex(16) if is_held else "", now_s
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._attempt: Any = None
        self._is_known = False

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            grpc.RpcError: no answer came, or it is an error.
            grpc.FutureCancelledError: the call was given up.
            PeerLostError: who was asked has been started again meanwhile.
        """
        patience = Patience(
            self._now_s(),
            lease_s=self._lease_s,
            timeout_s=self._timeout_s,
            request_bytes=self._request.ByteSize(),
        )
        was_silent = False
        while True:
            try:
                return self._once(patience)
            except grpc.RpcError as error:
                self._require_wanted(error)
                if is_at_work(error):
                    patience.hear(self._now_s())
                    self._is_known = True
                elif is_silence(error) and patience.miss(self._now_s()):
                    was_silent = True
                    _LOG.info("%s does not answer (%s), it is asked again", self._peer, _code(error))
                else:
                    self._require_same(error, was_silent=was_silent)
                    raise
            self._cancelled.wait(RETRY_S)

    def cancel(self) -> None:
        """Give the call up; who waits for the result is told so."""
        with self._lock:
            self._cancelled.set()
            if self._attempt is not None:
                self._attempt.cancel()

    def _once(self, patience: Patience) -> Any:
        now_s = self._now_s()
        hold_s, timeout_s = patience.attempt(now_s)
        terms: dict[str, Any] = {}
        if self._key:
            terms["metadata"] = Held(self._key, hold_s, patience.left_s(now_s), self._is_known).metadata()
        request = type(self._request)() if self._is_known else self._request
        with self._lock:
            if self._cancelled.is_set():
                raise grpc.FutureCancelledError
            self._attempt = attempt = self._method.future(request, timeout=timeout_s, **terms)
        return attempt.result()

    def _require_wanted(self, error: grpc.RpcError) -> None:
        if self._cancelled.is_set():
            raise grpc.FutureCancelledError from error

    def _require_same(self, error: grpc.RpcError, *, was_silent: bool) -> None:
        """Refuse an answer of who knew of the run before it was silent, and now does not."""
        if was_silent and isinstance(error, grpc.Call) and (error.details() or "").startswith(f"ringtune.{_UNKNOWN}:"):
            raise PeerLostError(
                f"{self._peer} did not answer for a while and knows nothing of the run now, as if it was started "
                "again; repeat or --resume the run"
            ) from error


_UNKNOWN = FrameError.__name__


def repeated(
    call: Callable[[Callable[[], None]], T],
    *,
    peer: str,
    lease_s: float,
    timeout_s: float,
    given_up: threading.Event | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> T:
    """Do what a node may do twice, such as to fetch a file, until there is an answer.

    Args:
        call: makes one attempt; it ends by itself if nothing comes, and calls what it gets with each sign of life.
        peer: who is called, in words.
        lease_s: who is silent for so long is lost.
        timeout_s: for all attempts.
        given_up: set when nobody waits any more.
        now_s: a monotonic clock.

    Raises:
        grpc.RpcError: no answer came, or it is an error.
    """
    patience, given_up = Patience(now_s(), lease_s=lease_s, timeout_s=timeout_s), given_up or threading.Event()
    while True:
        try:
            return call(lambda: patience.hear(now_s()))
        except grpc.RpcError as error:
            if given_up.is_set() or not is_silence(error) or not patience.miss(now_s()):
                raise
            _LOG.info("%s does not answer (%s), it is asked again", peer, _code(error))
        given_up.wait(RETRY_S)


def _code(error: grpc.RpcError) -> str:
    return error.code().name if isinstance(error, grpc.Call) else "no status"
