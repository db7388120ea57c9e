"""The receiving end of all links of a node: checks, decodes, hands to a sink.

Each link has a reader thread here, so that receiving and decoding overlap compute. A frame that the plan
does not foresee is refused (the sender and the sink are told) and dropped; the ring goes on.
"""

from __future__ import annotations

from typing import Protocol

import grpc
import torch

from edge.wire.checks import RunExpectation
from ringtune.errors import RingTuneError

__all__ = ["RingServicer", "RunExpectation", "Sink"]


class Sink(Protocol):
    """Where what arrives goes; called from reader threads, never after ``forget`` returned."""

    def on_tensor(
        self,
        kind: str,
        seq: int,
        micro: int,
        boundary: int,
        source: str,
        tensor: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        """A whole, checked hidden state or gradient (B, T, D); ``mask`` (B, T) int64 or None."""

    def on_blob(self, kind: str, seq: int, source: str, data: bytes) -> None:
        """A whole head for turn ``seq`` (kind ``Payload.HEAD``), or a probe."""

    def on_link_lost(self, source: str, reason: str) -> None:
        """The link from ``source`` broke; not called when ``source`` closed it in order."""

    def on_refused(self, source: str, error: RingTuneError) -> None:
        """A frame of ``source`` was refused and dropped; ``source`` is told as well."""


class RingServicer:
    """Serves ``ringtune.v1.Ring`` for one run at a time."""

    def add_to(self, server: grpc.Server) -> None:
        """Register the service; before the server starts."""
        raise NotImplementedError

    def expect(self, expectation: RunExpectation, sink: Sink) -> None:
        """Take links of this run from now on; a former run is forgotten."""
        raise NotImplementedError

    def forget(self) -> None:
        """End all links; no call to the sink comes after this returned."""
        raise NotImplementedError

    def ack(self, source: str, boundary: int, credits: int = 1) -> None:
        """Return credits for hidden states of ``source`` at ``boundary``."""
        raise NotImplementedError
