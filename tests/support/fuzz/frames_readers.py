"""What reads messages of a link."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from edge.transport import frames, tensors
from edge.transport.admission import FrameCheck, check_hello
from edge.transport.frames import BLOBS, DTYPE_NAMES, NAMES, Assembler, unpack
from edge.transport.server import RunExpectation
from ringtune.errors import RingTuneError
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.storage.pieces import Pieces
from ringtune.v1 import ring_pb2
from tests.support.fuzz.reader import Reader
from tests.support.wire_parts import expectation, hello, hidden, plan

_SHAPE: Final = (2, 6, 8)
_LENGTH: Final = 2
_WIRES: Final = ("float32", "bfloat16", "float16", "int8", "float64")


def readers() -> tuple[Reader, ...]:
    """Make them."""
    streams = tuple(_joined(_of_link(wire)) for wire in _WIRES)
    head = frames.blob_header(hello(), Payload.HEAD, 1, Pieces.of(b"0123456789"))
    single = [one for wire in _WIRES for one in _of_link(wire)] + list(frames.messages(head, [b"0123456789"], 4))
    return (
        Reader(name="unpack", seeds=tuple(single), read=unpack),
        Reader(name="hello", seeds=(hello().message(), hello().goodbye()), read=_greet),
        Reader(name="link", seeds=(*streams, _joined(frames.messages(head, [b"0123456789"], 4))), read=_link),
        *(Reader(name=f"decode {wire}", seeds=_payloads(wire), read=_decoder(wire)) for wire in _WIRES),
    )


@functools.cache
def _expected(wire: str) -> RunExpectation:
    return expectation(plan(wire_dtype=wire))


def _of_link(wire: str) -> list[bytes]:
    """The messages of two hidden states, one whole and one in chunks."""
    of = plan(wire_dtype=wire)
    found = [hello(of).message()]
    for micro in (0, 1):
        encoded = tensors.encode(*hidden(), wire)
        header = frames.tensor_header(hello(of), TensorKey(Payload.HIDDEN, 0, micro, 2), encoded)
        found += frames.messages(header, encoded.parts, 1 << 20 if micro else 100)
    return [*found, hello(of).goodbye()]


def _joined(messages: Iterable[bytes]) -> bytes:
    """Messages one after the other, each with its length before it."""
    return b"".join(len(one).to_bytes(_LENGTH, "big") + one for one in messages)


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + _LENGTH], "big")
        yield data[at + _LENGTH : at + _LENGTH + length]
        at += _LENGTH + length


def _greet(data: bytes) -> None:
    check_hello(_expected(_WIRES[0]), unpack(data)[0])


def _link(data: bytes) -> None:
    """Take the messages of a link as a node does: every refusal is of the frame alone."""
    messages = list(_split(data))
    with contextlib.suppress(RingTuneError):
        first, _ = unpack(messages[0] if messages else b"")
        wire = next((one for one in _WIRES if first and first.plan_digest == _expected(one).plan.digest), "float32")
        _take(messages, wire)


def _take(messages: list[bytes], wire: str) -> None:
    check = FrameCheck(_expected(wire), "a")
    assembler = Assembler(check.admit, check.revoke)
    for message in messages:
        fed = assembler.feed(message)
        if fed.received is None:
            continue
        header = fed.received.header
        assert header.kind in NAMES, "a frame of no kind was let in"
        if header.kind in BLOBS:
            bytes(fed.received.blob)
            continue
        try:
            tensor, _ = tensors.decode(
                fed.received.payload,
                tuple(header.shape),
                DTYPE_NAMES[header.dtype],
                header.mask_bytes,
                compute_dtype=torch.float32,
                exponent=header.exponent,
            )
            assert tuple(tensor.shape)[::2] == _SHAPE[::2], "a tensor of another shape was let in"
            assert bool(torch.isfinite(tensor).all()) or wire in ("float64", "float16", "int8")
        except RingTuneError as error:
            check.revoke(header)
            check.explained(header, error)


def _payloads(wire: str) -> tuple[bytes, ...]:
    return (b"".join(bytes(part) for part in tensors.encode(*hidden(), wire).parts),)


def _decoder(wire: str):  # type: ignore[no-untyped-def]
    def decode(data: bytes) -> ring_pb2.Ack:
        tensor, mask = tensors.decode(memoryview(data), _SHAPE, wire, 12, compute_dtype=torch.float64)
        assert bool(torch.isfinite(tensor).all()), "NaN or infinity passed"
        assert mask is not None and int(mask.max()) <= 1
        return ring_pb2.Ack()

    return decode
