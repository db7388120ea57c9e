"""The frames of a link: payloads cut into messages of some MiB, reassembled, and named in errors.

A message is a ``ringtune.v1.Frame``. It is written field by field, because protobuf's ``bytes`` field would cost one
more copy of every tensor; ``Frame.FromString`` reads the same bytes::

    0x0A <length> header      first chunk of a payload only
    0x12 <length> chunk

Independent of gRPC. Memory is allocated only for admitted headers.
"""

from __future__ import annotations

import mmap
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from google.protobuf.message import DecodeError

from edge.transport.tensors import EncodedTensor, bytes_of
from ringtune.errors import FrameError, IntegrityError
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.lowering import PARCELS
from ringtune.storage.pieces import HeldPieces, Piece, Pieces
from ringtune.v1 import ring_pb2

CHUNK_BYTES: Final = 4 * 1024 * 1024 + 64 * 1024
"""Most payload bytes of one message: 4 MiB of hidden state and its mask.

Every message costs gRPC's Python layer a dozen thread switches at each end, and the receiver does not copy a
payload in one message. On a 2-core machine 4 MiB tensors took 2.7 ms of CPU time (both ends together) in one
message, 2.9 ms in chunks of 2 MiB, 3.3 ms in chunks of 1 MiB.
"""

MAX_HEADER_BYTES: Final = 4096

_NOTHING: Final = memoryview(b"")

_OWN_PAGES_BYTES: Final = 1 << 16
_MAX_CHUNKS: Final = 1024
"""Most chunks of a payload, and one more for each 64 KiB of it: each takes 300 bytes until the payload is whole."""

_HUGE_PAGES: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)
"""Requests large pages, if available: allocating small ones takes as much CPU time as filling them."""

with warnings.catch_warnings():  # torch warns once that bytes are not writable; these are not shared
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

ALIGNMENT_BYTES: Final = 64
"""A chunk after a header is aligned to this number of bytes, as torch's tensors are, if possible."""

_CHUNK_OFFSET: Final = 16
"""Offset of an aligned address in a message: CPython's ``bytes`` and glibc put 48 bytes before its content."""

_PADDING_BYTES: Final = 128
"""Least padding: from this length on, a byte of padding adds exactly one byte to the header."""

_HEADER_TAG: Final = 0x0A
_CHUNK_TAG: Final = 0x12

DTYPES: Final[dict[str, ring_pb2.DType]] = {
    "float32": ring_pb2.DTYPE_FLOAT32,
    "bfloat16": ring_pb2.DTYPE_BFLOAT16,
    "float16": ring_pb2.DTYPE_FLOAT16,
    "int8": ring_pb2.DTYPE_INT8_ROWS,
    "float64": ring_pb2.DTYPE_FLOAT64,
}
"""``wire_dtype`` of a plan -> element type on the wire."""

DTYPE_NAMES: Final = {number: name for name, number in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The sending node of a link, with its run and plan."""

    run_id: str
    placement_number: int
    source: str
    digest: str
    wire_dtype: str = "float32"

    def message(self, link: str = "", *, is_reopened: bool = False) -> bytes:
        """Return the first message of a call; ``link`` is the id of a link that may be opened again."""
        header = self.header(ring_pb2.FRAME_KIND_HELLO)
        header.plan_digest, header.link, header.is_reopened = self.digest, link, is_reopened
        return pack(header, ())

    def goodbye(self) -> bytes:
        """Return the last message of a link that ends in order; a stream without it is broken."""
        return pack(self.header(ring_pb2.FRAME_KIND_BYE), ())

    def header(self, kind: ring_pb2.FrameKind) -> ring_pb2.FrameHeader:
        """Return a header of this link without a payload's description."""
        return ring_pb2.FrameHeader(
            run_id=self.run_id, placement_number=self.placement_number, kind=kind, source=self.source
        )


class Ack(NamedTuple):
    """The receiver's message on a link: credits, or the refusal of a frame.

    Attributes:
        refusal: why a frame was refused and dropped; empty = none.
    """

    credits: int
    boundary: int
    refusal: str = ""
    error: str = ""


def pack(header: ring_pb2.FrameHeader | None, chunk: Sequence[memoryview]) -> bytes:
    """Pack a header and the parts of a chunk into one message; the bytes of ``chunk`` are copied once.

    The header is padded so that the chunk is aligned: the receiver of a whole tensor in one message computes on it in
    place.
    """
    if not chunk:
        return b"" if header is None else _header_field(header)
    start = b""
    length = bytes((_CHUNK_TAG,)) + _varint(sum(part.nbytes for part in chunk))
    if header is not None:
        header.padding = bytes(_PADDING_BYTES)
        at = len(_header_field(header)) + len(length)
        header.padding = bytes(_PADDING_BYTES + (_CHUNK_OFFSET - at) % ALIGNMENT_BYTES)
        start = _header_field(header)
    return b"".join((start, length, *chunk))


def _header_field(header: ring_pb2.FrameHeader) -> bytes:
    text = header.SerializeToString()
    return bytes((_HEADER_TAG,)) + _varint(len(text)) + text


def unpack(message: bytes) -> tuple[ring_pb2.FrameHeader | None, memoryview]:
    """Split a message into its header, or None, and a view of its chunk; raises ``FrameError``."""
    view = memoryview(message)
    try:
        header, at = None, 0
        if message[:1] == bytes((_HEADER_TAG,)):
            length, at = _read_varint(message, 1)
            if length > MAX_HEADER_BYTES:
                raise FrameError(f"a header of {length} bytes arrived, the limit is {MAX_HEADER_BYTES}")
            header = ring_pb2.FrameHeader.FromString(message[at : at + length])
            at += length
        if at == len(message):
            return header, view[at:]
        if message[at : at + 1] == bytes((_CHUNK_TAG,)):
            length, at = _read_varint(message, at + 1)
            if at + length == len(message):
                return header, view[at:]
        frame = ring_pb2.Frame.FromString(message)
    except (DecodeError, IndexError) as error:
        raise FrameError(f"{len(message)} bytes arrived that are no frame; use one version on all machines") from error
    return (frame.header if frame.HasField("header") else None), memoryview(frame.chunk)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a length has too many bytes")


def tensor_header(hello: Hello, key: TensorKey, encoded: EncodedTensor) -> ring_pb2.FrameHeader:
    """Return the header of a tensor's payload."""
    header = hello.header(KINDS[key.payload])
    header.seq, header.micro, header.boundary = key.seq, key.micro, key.boundary
    header.dtype = DTYPES[encoded.dtype]
    header.shape.extend(encoded.shape)
    header.payload_bytes, header.mask_bytes = encoded.payload_bytes, encoded.mask_bytes
    header.exponent = encoded.exponent
    return header


def parcel_header(hello: Hello, key: TensorKey, data: Pieces) -> ring_pb2.FrameHeader:
    """Return the header of a parcel; micro-batch and boundary are stored plus 1, as they may be -1."""
    header = blob_header(hello, key.payload, key.seq, data)
    header.micro, header.boundary = key.micro + 1, key.boundary + 1
    return header


def blob_header(hello: Hello, kind: str, seq: int, data: Pieces) -> ring_pb2.FrameHeader:
    """Return the header of opaque bytes, with their checksum."""
    header = hello.header(KINDS[kind])
    header.seq, header.dtype = seq, ring_pb2.DTYPE_BYTES
    header.shape.append(data.size_bytes)
    header.payload_bytes = data.size_bytes
    for piece in data:
        header.crc32 = zlib.crc32(piece, header.crc32)
    return header


def messages(header: ring_pb2.FrameHeader, parts: Iterable[Piece], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the messages of one payload: the first has the header, all but the last have ``chunk_bytes``.

    Example: 10 bytes in parts of 3 and 7 with ``chunk_bytes`` 4 are messages of 4, 4 and 2.
    """
    first: ring_pb2.FrameHeader | None = header
    chunk: list[memoryview] = []
    room = chunk_bytes
    for part in parts:
        view, at = memoryview(part), 0
        while at < view.nbytes:
            piece = view[at : at + room]
            chunk.append(piece)
            at += piece.nbytes
            room -= piece.nbytes
            if room == 0:
                yield pack(first, chunk)
                first, chunk, room = None, [], chunk_bytes
    if chunk or first is not None:
        yield pack(first, chunk)


class Received(NamedTuple):
    """A whole payload with its header; its bytes are not shared.

    A tensor has a ``payload``; any other kind a ``blob`` in the received pieces.
    """

    header: ring_pb2.FrameHeader
    payload: memoryview
    blob: Pieces


class FeedResult(NamedTuple):
    """The outcome of one message.

    Attributes:
        error: a refusal; with ``received`` it is of the previous payload, which was cut short.
        is_goodbye: whether the sender ends the link in order.
        is_dropped: whether the message is of a payload that was refused before.
    """

    received: Received | None = None
    error: IntegrityError | None = None
    is_goodbye: bool = False
    is_dropped: bool = False


class Assembler:
    """Assembles the chunks of one link to payloads.

    After a refusal the rest of that payload is dropped silently; the next header begins a new one.

    Args:
        admit: raises :class:`FrameError` for a header that is not expected now. Memory is allocated only after it
            returns, so it must check ``payload_bytes``.
        revoke: called with an admitted header if its payload is dropped.
    """

    def __init__(
        self, admit: Callable[[ring_pb2.FrameHeader], None], revoke: Callable[[ring_pb2.FrameHeader], None]
    ) -> None:
        self._admit, self._revoke = admit, revoke
        self._header: ring_pb2.FrameHeader | None = None
        self._payload = _NOTHING
        self._pieces: list[memoryview] = []
        self._filled_bytes = self._crc32 = self._num_chunks = 0
        self._is_dropping = False

    def feed(self, message: bytes) -> FeedResult:
        """Process one message; a tensor that fits in the message is not copied."""
        cut: IntegrityError | None = None
        try:
            header, chunk = unpack(message)
            if header is None:
                return FeedResult(self._fill(chunk), is_dropped=self._is_dropping)
            cut = self._cut()
            if header.kind == ring_pb2.FRAME_KIND_BYE:
                return FeedResult(None, cut, is_goodbye=True)
            self._admit(header)
            self._header, self._filled_bytes, self._crc32, self._num_chunks = header, 0, 0, 0
            if header.kind not in BLOBS:
                is_whole = chunk.nbytes == header.payload_bytes
                self._payload = chunk if is_whole else bytes_of(torch.empty(header.payload_bytes, dtype=torch.uint8))
            return FeedResult(self._fill(chunk), cut)
        except IntegrityError as error:
            self._abandon()
            return FeedResult(None, error if cut is None else FrameError(f"{cut}; then: {error}"))

    def _cut(self) -> FrameError | None:
        """Drop an incomplete payload, cut short by the next header, and return its error; None if there is none."""
        header = self._header
        if header is None:
            return None
        filled_bytes = self._filled_bytes
        self._abandon()
        return FrameError(
            f"{as_text(header)} ended after {filled_bytes} of {header.payload_bytes} bytes; it is dropped"
        )

    def _fill(self, chunk: memoryview) -> Received | None:
        header = self._header
        if header is None:
            if self._is_dropping:
                return None
            raise FrameError(f"a chunk of {chunk.nbytes} bytes arrived without a header; it is dropped")
        end = self._filled_bytes + chunk.nbytes
        if end > header.payload_bytes:
            raise FrameError(f"{as_text(header)} has more than its {header.payload_bytes} bytes; it is dropped")
        self._num_chunks += 1
        if self._num_chunks > _MAX_CHUNKS + header.payload_bytes // _OWN_PAGES_BYTES:
            raise FrameError(f"{as_text(header)} has only {end} bytes in {self._num_chunks} chunks; it is dropped")
        if header.kind in BLOBS:
            self._pieces.append(_apart(chunk))
        elif self._payload is not chunk:
            self._payload[self._filled_bytes : end] = chunk
        self._filled_bytes = end
        if header.crc32:
            self._crc32 = zlib.crc32(chunk, self._crc32)
        return self._complete(header) if end == header.payload_bytes else None

    def _complete(self, header: ring_pb2.FrameHeader) -> Received:
        if self._crc32 != header.crc32:
            raise IntegrityError(f"{as_text(header)} arrived damaged (its checksum differs); it is dropped")
        received = Received(header, self._payload, HeldPieces(self._pieces))
        self._reset()
        return received

    def _abandon(self) -> None:
        """Drop the incomplete payload, and its chunks that have not arrived yet."""
        header = self._header
        self._reset()
        self._is_dropping = True
        if header is not None:
            self._revoke(header)

    def _reset(self) -> None:
        self._header, self._is_dropping = None, False
        self._payload, self._pieces = _NOTHING, []


def _apart(chunk: memoryview) -> memoryview:
    """Copy a large chunk to memory pages of its own, which the system gets back when the chunk is freed.

    Memory of the allocator would stay with the process, so a received head would take its size twice.
    """
    if chunk.nbytes < _OWN_PAGES_BYTES:
        return chunk
    pages = mmap.mmap(-1, chunk.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE_PAGES is not None:
        pages.madvise(_HUGE_PAGES)
    pages[:] = chunk
    return memoryview(pages)


KINDS: Final[dict[str, ring_pb2.FrameKind]] = {
    Payload.HIDDEN.value: ring_pb2.FRAME_KIND_HIDDEN,
    Payload.GRAD.value: ring_pb2.FRAME_KIND_GRAD,
    Payload.HEAD.value: ring_pb2.FRAME_KIND_HEAD,
    Payload.UNIT_GRAD.value: ring_pb2.FRAME_KIND_UNIT_GRAD,
    Payload.PAIRS.value: ring_pb2.FRAME_KIND_PAIRS,
    Payload.WEIGHTS.value: ring_pb2.FRAME_KIND_WEIGHTS,
    Payload.REPLICA_GRAD.value: ring_pb2.FRAME_KIND_REPLICA_GRAD,
}

NAMES: Final = {number: name for name, number in KINDS.items()}

BLOBS: Final = frozenset(KINDS[name] for name in (Payload.HEAD, *PARCELS))
"""Kinds with a blob as payload."""


def key_of(header: ring_pb2.FrameHeader) -> TensorKey:
    """Return the key of a header's payload; for a head ``seq`` is the turn."""
    name = NAMES[header.kind]
    if name == Payload.HEAD:
        return TensorKey(name, header.seq, 0, 0)
    if name in PARCELS:
        return TensorKey(name, header.seq, header.micro - 1, header.boundary - 1)
    return TensorKey(name, header.seq, header.micro, header.boundary)


def as_text(header: ring_pb2.FrameHeader) -> str:
    """Describe a payload for errors: "the head for turn 3 from node a"."""
    kind = NAMES.get(header.kind, "")
    if kind == Payload.HEAD:
        return f"the head for turn {header.seq} from node {header.source}"
    if kind == Payload.UNIT_GRAD:
        unit = "head" if header.boundary else "embedding"
        return f"the gradient of the {unit} for item {header.seq} from node {header.source}"
    if kind == Payload.REPLICA_GRAD:
        return f"the gradients of item {header.seq} from block {header.boundary - 1} on, of replica {header.source}"
    if kind in PARCELS:
        what = {Payload.PAIRS: "pairs", Payload.WEIGHTS: "updated weights"}[Payload(kind)]
        key = key_of(header)
        micro = f", micro-batch {key.micro}" if key.micro >= 0 else ""
        return f"the {what} of item {key.seq}{micro}, block {key.boundary}, from node {header.source}"
    name = {Payload.HIDDEN.value: "hidden state", Payload.GRAD.value: "gradient"}.get(kind, kind or "payload")
    where = f"item {header.seq}, micro-batch {header.micro}, block {header.boundary}"
    return f"the {name} of {where}, from node {header.source}"
