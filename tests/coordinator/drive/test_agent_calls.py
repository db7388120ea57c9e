"""What a failed call to a node means, and putting its files together."""

from __future__ import annotations

import pytest

from coordinator.drive.agent_calls import node_error, read_files
from ringtune.errors import DataError, DeadlineError, IntegrityError, PeerLostError
from ringtune.rpc.codec import status_of_error
from ringtune.v1 import control_pb2

CHUNK = control_pb2.CollectChunk
EMPTY_SHA = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("status", ["UNAVAILABLE", "DEADLINE_EXCEEDED"])
def test_node_error_of_silence_is_a_lost_node(status: str) -> None:
    """If the node itself said nothing, it is lost; the name and address are in the message."""
    error = node_error(status, "socket closed", node="pi", address="10.0.0.2:1")
    assert type(error) is PeerLostError
    assert "node pi at 10.0.0.2:1" in str(error)


def test_node_error_keeps_what_the_node_said() -> None:
    """The node's own error keeps its class, and its name is added if it is missing."""
    said = status_of_error(DataError("train.csv has no rows"))
    error = node_error(said.name, said.details, node="pi", address="x:1")
    assert type(error) is DataError
    assert str(error) == "node pi: train.csv has no rows"
    waited = status_of_error(DeadlineError("node pi waited for b"))
    assert type(node_error(waited.name, waited.details, node="pi", address="x:1")) is DeadlineError


def test_read_files_puts_chunks_together() -> None:
    """Files follow one another; the name comes with the first chunk, the digest with the last."""
    chunks = [
        CHUNK(name="a", chunk=b"12"),
        CHUNK(chunk=b"3", last=True, sha256="a665a45920422f9d417e4867efdc4fb8a04a1f3fff1fa07e998e86f7f7a27ae3"),
        CHUNK(name="b", last=True, sha256=EMPTY_SHA),
    ]
    assert read_files(iter(chunks), node="pi") == {"a": b"123", "b": b""}


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([CHUNK(name="a", chunk=b"1", last=True, sha256=EMPTY_SHA)], "a of node pi arrived damaged"),
        ([CHUNK(name="a", chunk=b"1")], "a of node pi is not complete"),
        ([CHUNK(chunk=b"1")], "belongs to no file"),
        ([CHUNK(name="a"), CHUNK(name="b")], "began b before a was complete"),
        ([CHUNK(name="a", last=True, sha256=EMPTY_SHA)] * 2, "belongs to no file"),
    ],
)
def test_read_files_refuses_a_broken_stream(chunks: list[control_pb2.CollectChunk], message: str) -> None:
    """Whatever is wrong with the stream, the node is named."""
    with pytest.raises(IntegrityError, match=message):
        read_files(iter(chunks), node="pi")
