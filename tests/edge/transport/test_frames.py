"""Frames: any payload in any chunks comes out whole, and no bytes can break the assembler."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.transport import frames, tensors
from edge.transport.frames import Assembler, FeedResult
from ringtune.errors import FrameError, IntegrityError
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.storage.pieces import Pieces
from ringtune.v1 import ring_pb2
from tests.support.wire_parts import hello, hidden


class Gate:
    """Admits everything but sources in ``refused``; remembers what was revoked."""

    def __init__(self, *refused: str) -> None:
        self._refused = refused
        self.revoked: list[int] = []

    def admit(self, header: ring_pb2.FrameHeader) -> None:
        """Let a header pass, or not."""
        if header.source in self._refused:
            raise FrameError("not this one")

    def revoke(self, header: ring_pb2.FrameHeader) -> None:
        """Remember it."""
        self.revoked.append(header.seq)

    def assembler(self) -> Assembler:
        """An assembler behind this gate."""
        return Assembler(self.admit, self.revoke)


def _blob(data: bytes, seq: int = 0, chunk_bytes: int = frames.CHUNK_BYTES) -> list[bytes]:
    header = frames.blob_header(hello(), Payload.HEAD, seq, Pieces.of(data))
    return list(frames.messages(header, (memoryview(data),), chunk_bytes))


def _data(fed: FeedResult) -> bytes | None:
    return None if fed.received is None else bytes(fed.received.blob)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 50), max_size=4), chunk_bytes=st.integers(1, 40))
def test_frames_put_any_payload_together(sizes: list[int], chunk_bytes: int) -> None:
    """Parts of any size in chunks of any size come out as their concatenation, at the last message only."""
    parts = [bytes(range(index, index + size)) for index, size in enumerate(sizes)]
    data = b"".join(parts)
    header = frames.blob_header(hello(), Payload.HEAD, 3, Pieces.of(data))
    messages = list(frames.messages(header, [memoryview(part) for part in parts], chunk_bytes))
    assembler = Gate().assembler()
    results = [assembler.feed(message) for message in messages]
    assert [fed.received for fed in results[:-1]] == [None] * (len(results) - 1)
    assert [fed.error for fed in results] == [None] * len(results)
    assert _data(results[-1]) == data
    assert len(messages) == max(1, -(-len(data) // chunk_bytes))


def test_frames_are_plain_messages_of_protobuf() -> None:
    """Written by hand they are read by it; a peer that writes the same fields in another order is understood."""
    messages = _blob(b"0123456789", seq=7, chunk_bytes=4)
    read = [ring_pb2.Frame.FromString(message) for message in messages]
    assert [frame.chunk for frame in read] == [b"0123", b"4567", b"89"]
    assert [frame.HasField("header") for frame in read] == [True, False, False]
    assert (read[0].header.seq, read[0].header.payload_bytes) == (7, 10)
    assert read[0].header.crc32 == zlib.crc32(b"0123456789")
    header = frames.blob_header(hello(), Payload.HEAD, 1, Pieces.of(b"abc"))
    whole = ring_pb2.Frame(header=header, chunk=b"abc").SerializeToString()
    swapped = ring_pb2.Frame(chunk=b"abc").SerializeToString() + ring_pb2.Frame(header=header).SerializeToString()
    for message in (whole, swapped):
        assert _data(Gate().assembler().feed(message)) == b"abc"
    for value in (0, 1, 127, 128, 300, 2**21, 2**31 + 5):
        text = frames._varint(value)
        assert frames._read_varint(text, 0) == (value, len(text))
        assert ring_pb2.Ack(credits=value % 2**32).SerializeToString()[1:] == (text if value else b"")


def test_frames_keep_a_single_message_in_place_and_aligned() -> None:
    """A payload in one message is not copied, and starts where torch's own tensors would."""
    tensor, mask = hidden(8, 64, 384)
    encoded = tensors.encode(tensor, mask, "float32")
    header = frames.tensor_header(hello(), TensorKey(Payload.HIDDEN, 0, 0, 2), encoded)
    (message,) = frames.messages(header, encoded.parts)
    offset = len(message) - encoded.payload_bytes
    assert offset % frames.ALIGNMENT_BYTES == 16
    fed = Gate().assembler().feed(message)
    assert fed.received is not None
    address = torch.frombuffer(fed.received.payload, dtype=torch.uint8).data_ptr()
    assert 0 < address - id(message) < len(message)
    assert address % 16 == 0


def test_frames_cut_short_are_dropped_and_the_next_is_taken() -> None:
    """A header in the midst of a payload ends that one with an error and begins anew."""
    gate = Gate()
    assembler = gate.assembler()
    first, *_ = _blob(b"x" * 100, seq=1, chunk_bytes=60)
    assert assembler.feed(first) == FeedResult()
    fed = assembler.feed(_blob(b"whole", seq=2)[0])
    assert "ended after 60 of 100 bytes" in str(fed.error)
    assert _data(fed) == b"whole"
    assert gate.revoked == [1]


def test_frames_with_too_many_bytes_are_dropped() -> None:
    """A chunk beyond the claimed size is refused, the rest of it is ignored, the next payload is taken."""
    gate = Gate()
    assembler = gate.assembler()
    first, _ = _blob(b"x" * 100, seq=1, chunk_bytes=60)
    more = frames.pack(None, (memoryview(b"x" * 41),))
    assert assembler.feed(first) == FeedResult()
    assert "more than its 100 bytes" in str(assembler.feed(more).error)
    assert assembler.feed(more) == FeedResult(is_dropped=True)
    assert gate.revoked == [1]
    assert _data(assembler.feed(_blob(b"good")[0])) == b"good"


@pytest.mark.parametrize("piece", [b"", b"x"])
def test_frames_in_chunks_without_end_are_dropped(piece: bytes) -> None:
    """Chunks with little or nothing in them take more memory than a payload may: there is a number that is enough."""
    gate = Gate()
    assembler = gate.assembler()
    header = frames.blob_header(hello(), Payload.HEAD, 1, Pieces.of(bytes(1 << 20)))
    assert assembler.feed(frames.pack(header, (memoryview(b"x"),))) == FeedResult()
    chunk = b"\x12\x00" if not piece else frames.pack(None, (memoryview(piece),))
    for _ in range(1024 + 16 - 1):
        assert assembler.feed(chunk) == FeedResult()
    assert "in 1041 chunks; it is dropped" in str(assembler.feed(chunk).error)
    assert gate.revoked == [1]


def test_frames_with_a_damaged_blob_are_dropped() -> None:
    """One flipped bit in a head is found by its checksum, in one chunk or in several."""
    for chunk_bytes in (1000, 30):
        gate = Gate()
        assembler = gate.assembler()
        messages = [bytearray(message) for message in _blob(b"x" * 100, seq=5, chunk_bytes=chunk_bytes)]
        messages[-1][-1] ^= 1
        results = [assembler.feed(bytes(message)) for message in messages]
        assert "damaged" in str(results[-1].error)
        assert type(results[-1].error) is IntegrityError
        assert gate.revoked == [5]


def test_frames_refused_by_the_gate_are_skipped_to_the_next_header() -> None:
    """What is not admitted is told once; its chunks are dropped in silence."""
    header = frames.blob_header(hello(source="z"), Payload.HEAD, 0, Pieces.of(b"x" * 100))
    assembler = Gate("z").assembler()
    refused = [assembler.feed(message) for message in frames.messages(header, (memoryview(b"x" * 100),), 30)]
    assert [str(fed.error) if fed.error else "" for fed in refused] == ["not this one", "", "", ""]
    assert _data(assembler.feed(_blob(b"good")[0])) == b"good"


def test_frames_without_a_header_or_with_a_long_one_are_refused() -> None:
    """A chunk that belongs to nothing; a header is small, and a megabyte of node name is not read."""
    fed = Gate().assembler().feed(frames.pack(None, (memoryview(b"lost"),)))
    assert "without a header" in str(fed.error)
    header = ring_pb2.FrameHeader(source="n" * 5000)
    assert "the limit is" in str(Gate().assembler().feed(frames.pack(header, ())).error)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_frames_assembler_survives_any_bytes(data: st.DataObject) -> None:
    """Random bytes, and frames with random damage, give errors of ours or nothing; then a good one passes."""
    assembler = Gate().assembler()
    for _ in range(data.draw(st.integers(1, 4))):
        message = bytearray(data.draw(st.sampled_from([*_blob(b"abcdefgh" * 4, chunk_bytes=20), b""])))
        for _ in range(data.draw(st.integers(0, 3))):
            if message:
                message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
        message = message[: data.draw(st.integers(0, len(message)))] + data.draw(st.binary(max_size=4))
        fed = _feed_small(assembler, bytes(message))
        assert fed.error is None or isinstance(fed.error, IntegrityError)
    assert _data(assembler.feed(_blob(b"good")[0])) == b"good"


def _feed_small(assembler: Assembler, message: bytes) -> FeedResult:
    """Feed, unless the damage made the claimed size large: the gate's business, not the assembler's."""
    try:
        header, _ = frames.unpack(message)
    except FrameError:
        return assembler.feed(message)
    return FeedResult() if header is not None and header.payload_bytes > 10_000 else assembler.feed(message)
