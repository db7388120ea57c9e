"""Failpoints: nothing without the switch, and with it one failure at the ordered place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ringtune.errors import UsageError
from ringtune.storage import durable
from ringtune.transport.channels import Server, open_channel
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support import failpoints
from tests.support.failpoints import DONE_SUFFIX, Failpoints, Failure, Order


@pytest.fixture(autouse=True)
def unnamed() -> Iterator[None]:
    """No test leaves this process with failpoints."""
    yield
    failpoints.disarm()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "backward kill",
        "backward 0 kill",
        "backward x kill",
        "a 1 burn",
        "a 1 delay",
        "a 1 scale-turns",
        "1 kill",
    ],
)
def test_what_is_no_order_is_refused(text: str) -> None:
    """A test with a typing mistake does not pass as one in which nothing fails."""
    with pytest.raises(UsageError, match="is no failpoint"):
        Order.parse(text)


def test_failure_is_due_once_at_its_place_and_count(tmp_path: Path) -> None:
    """Places of other names are not counted; a new order counts from its beginning."""
    points = Failpoints(tmp_path, "a")
    assert points.due("update") is None
    order = tmp_path / "a"
    order.write_text("update* 2 stop")
    assert [points.due(place) is not None for place in ("update", "forward", "after update", "update")] == [
        False,
        False,
        False,
        True,
    ]
    assert not order.exists() and (tmp_path / f"a{DONE_SUFFIX}").read_text() == "update* 2 stop"
    assert points.due("update") is None
    order.write_text("forward 1 kill")
    assert points.due("forward") == Order("forward", 1, Failure.KILL)


def test_nothing_fails_before_a_process_is_armed_and_after_it(tmp_path: Path) -> None:
    """A folder of orders alone does nothing, nor does the variable; all that was replaced is itself again."""
    before = (durable.failpoint, grpc.insecure_channel, grpc.server)
    (tmp_path / "a").write_text("update 1 error")
    assert failpoints.reached("update") is None
    failpoints.arm("a", tmp_path)
    assert before != (durable.failpoint, grpc.insecure_channel, grpc.server)
    failpoints.disarm()
    assert before == (durable.failpoint, grpc.insecure_channel, grpc.server)
    assert failpoints.reached("update") is None and (tmp_path / "a").exists()
    failpoints.arm("a", tmp_path)
    with pytest.raises(OSError, match="failpoint update 1 error"):
        failpoints.reached("update")


class _Counting(control_pb2_grpc.CoordinatorServicer):
    """Counts reports."""

    def __init__(self) -> None:
        self.count = 0

    def Report(self, request: Any, context: grpc.ServicerContext) -> control_pb2.Empty:  # noqa: N802
        """Count one."""
        self.count += 1
        return control_pb2.Empty()


@pytest.mark.parametrize(("failure", "counted"), [("drop-request", 1), ("drop-reply", 2)])
def test_dropped_call_fails_as_a_broken_connection(tmp_path: Path, failure: str, counted: int) -> None:
    """A lost request never arrives; of a lost reply the request did."""
    (tmp_path / "a").write_text(f"call Report 2 {failure}")
    failpoints.arm("a", tmp_path)
    servicer = _Counting()
    server = Server("127.0.0.1:0", lambda made: control_pb2_grpc.add_CoordinatorServicer_to_server(servicer, made))
    try:
        with open_channel(server.address) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)
            stub.Report(control_pb2.ReportRequest(), timeout=20)
            with pytest.raises(grpc.RpcError) as error:
                stub.Report(control_pb2.ReportRequest(), timeout=20)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert servicer.count == counted
            stub.Report(control_pb2.ReportRequest(), timeout=20)
            assert servicer.count == counted + 1
    finally:
        server.stop()
