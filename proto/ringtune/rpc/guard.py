"""The guard of a server: looks at the certificate of every caller before the call reaches a servicer."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from ringtune.errors import TrustError
from ringtune.rpc.statuses import abort
from ringtune.texts import Repeats, times
from ringtune.trust.permissions import permission_of, require_permission, require_sender

if TYPE_CHECKING:
    from ringtune.trust.certificates import CertificateFacts

_LOG = logging.getLogger(__name__)
_CERTIFICATE = "x509_pem_cert"
Refusal = Callable[["CertificateFacts"], str]


def caller_of(context: grpc.ServicerContext) -> CertificateFacts | None:
    """Return what the certificate of a caller says; None on a connection in plain text."""
    found = context.auth_context().get(_CERTIFICATE)
    return _facts(bytes(found[0])) if found else None


@functools.lru_cache(maxsize=1024)
def _facts(pem: bytes) -> CertificateFacts:
    from ringtune.trust.certificates import facts_of

    return facts_of(pem)


class Guard(grpc.ServerInterceptor):
    """Admits a call if the caller's certificate still holds, may make it, and is of whom the request names.

    A connection outlives the certificate that it was opened with, so dates and removals are looked at in every call.

    Args:
        refusal: says why somebody with a valid certificate is refused; empty = it is not.
    """

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self._repeats = Repeats()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Put the check before the handler of a call."""
        handler = continuation(details)
        if handler is None:
            return None
        ways = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if is_stream else "unary" for is_stream in ways)
        behaviour = getattr(handler, kind)

        def checked(request: Any, context: grpc.ServicerContext) -> Any:
            self._require(details.method, request, context)
            return behaviour(request, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(checked, handler.request_deserializer, handler.response_serializer)

    def _require(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        try:
            caller = caller_of(context)
            if caller is None:
                raise TrustError("there is no certificate; join with a token first")
            problem = caller.problem_at(time.time()) or self._refusal(caller)
            if problem:
                raise TrustError(f"the certificate of {caller.party} is refused: {problem}")
            require_permission(caller.party, method)
            sender = permission_of(method).sender
            if sender:
                require_sender(caller.party, getattr(request, sender))
        except TrustError as error:
            count = self._repeats.told((method, str(error)))
            if count:
                _LOG.warning("a call from %s is refused: %s%s", context.peer(), error, times(count))
            abort(context, error)
