"""Connections of strangers: they cost a server nothing until they say something."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ringtune.transport.channels import Server, defer_accept, open_channel
from ringtune.v1 import control_pb2, control_pb2_grpc

WAIT_S = 30.0
COUNT = 50
pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="the system has no such thing")


class Node(control_pb2_grpc.AgentServicer):
    """Takes every grant."""

    def Grant(self, request: control_pb2.GrantRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Take it."""
        return control_pb2.Empty()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that serves a node."""
    made = Server("127.0.0.1:0", lambda added: control_pb2_grpc.add_AgentServicer_to_server(Node(), added))
    yield made
    made.stop(0.0)


def taken(port: int) -> int:
    """How many connections this process has taken on a port."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as found:
            is_taken = found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port
            count += bool(is_taken and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return count


def call(server: Server) -> None:
    """Make a call on a connection of its own."""
    with open_channel(server.address) as channel:
        control_pb2_grpc.AgentStub(channel).Grant(control_pb2.GrantRequest(), timeout=WAIT_S)


def connections(server: Server, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Connect as often as a stranger who says nothing."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), WAIT_S)) for _ in range(COUNT)]


def test_silent_connections_are_not_taken_and_others_come_past_them(server: Server) -> None:
    """They came first, and a call that came after them is answered."""
    with contextlib.ExitStack() as stack:
        connections(server, stack)
        call(server)
        assert taken(server.port) <= 1  # that of the call, if it is not closed yet
        with open_channel(server.address) as channel:
            control_pb2_grpc.AgentStub(channel).Grant(control_pb2.GrantRequest(), timeout=WAIT_S)
            assert taken(server.port) >= 1  # so they would be counted


def test_connection_is_taken_with_its_first_byte(server: Server) -> None:
    """So that nobody who calls waits for anything: the server answers an HTTP/2 client who has said who it is."""
    with contextlib.ExitStack() as stack:
        (first, *_) = connections(server, stack)
        first.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
        assert first.recv(9)
        assert 1 <= taken(server.port) <= 2


def test_sockets_of_other_ports_are_left_alone(server: Server) -> None:
    """A process may serve on several."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert defer_accept(server.port) == 1
        assert not other.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
        assert defer_accept(1) == 0
