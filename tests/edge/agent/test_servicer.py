"""Calls of an agent: one request, one call of the agent, one answer; every error keeps its kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import pytest

from edge.agent.process import AgentServicer
from ringtune.errors import PlanError, RingTuneError
from ringtune.storage.pieces import Pieces
from ringtune.transport.status import error_of_status
from ringtune.v1 import control_pb2


class Context:
    """A call that tells whether it was ended with a status, and raises what the caller would read."""

    def __init__(self) -> None:
        self.is_ended = False

    def time_remaining(self) -> float:
        """Some seconds."""
        return 5.0

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End it."""
        self.is_ended = True
        raise error_of_status(code.name, details, peer="node a")


class FakeAgent:
    """Answers a call."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def collect(self, run_id: str, **_: Any) -> dict[str, Pieces]:
        """A file whose second piece can't be read."""

        def make() -> Iterator[bytes]:
            yield b"begin"
            raise self.error

        return {"adapter.safetensors": Pieces(10, make)}


def _servicer(error: Exception) -> tuple[AgentServicer, FakeAgent, Any]:
    agent: Any = FakeAgent(error)
    return AgentServicer(agent), agent, Context()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PlanError("no such tensor"), PlanError, "no such tensor"),
        (OSError("gone"), RingTuneError, r"OSError at \S+: gone"),
    ],
)
def test_collect_keeps_the_form_of_an_error_while_it_streams(
    error: Exception, kind: type[RingTuneError], message: str
) -> None:
    """Files are read while they are sent: what fails then is told as any other error of this node."""
    servicer, _, context = _servicer(error)
    with pytest.raises(kind, match=message):
        list(servicer.Collect(control_pb2.CollectRequest(run_id="r"), context))
    assert context.is_ended
