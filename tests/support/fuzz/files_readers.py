"""What reads files of others."""

from __future__ import annotations

import io
import itertools
import json
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from coordinator.server.run_record import RunRecord
from edge.agent import torch_backend
from ringtune.run_control.checkpoint import CheckpointManifest
from ringtune.storage import chunks
from ringtune.storage.gguf import read_gguf_header
from ringtune.storage.pieces import Pieces
from ringtune.storage.tables import table_rows
from ringtune.storage.tensor_files import TensorFile, header_bytes, header_of
from ringtune.transport.identity import facts_of, make_key, make_request, read_identity, read_key, requested_key
from ringtune.transport.parties import IDENTITY, parse_token
from ringtune.v1 import control_pb2
from sim.recorded_run import read_trace
from tests.contract.run_control.test_checkpoint import manifest
from tests.coordinator.server.test_run_record import record
from tests.edge.checkpoint.test_shard_file import METADATA, load_shard, optimizer_of, parameters, to_shard, train
from tests.support.fuzz.plan_readers import _text, _with_right_digest
from tests.support.fuzz.reader import Reader
from tests.support.trust_parts import speaker_of

_LENGTH: Final = 2
_TOKEN: Final = f"ringtune1:node:pi-4:7071:{'ab' * 32}:{'s' * 43}"
_ROWS: Final = b'text,label\n"a, b",pos\nc,neg\n'
_LINES: Final = b'{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n'
_TRACE: Final = (
    b'{"traceEvents": [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "a"}},'
    b' {"ph": "X", "pid": 1, "ts": 1, "dur": 2, "args": {"action": "f12.0[0,1)"}}]}'
)
_SHARD_BYTES: Final = 156
"""Of the tensors of the shard."""

_SNAPSHOT: Final = {"format": "ringtune-shard-1", **METADATA}


def readers() -> tuple[Reader, ...]:
    """Make them."""
    folder = Path(tempfile.mkdtemp(prefix="ringtune-fuzz-"))
    trained = parameters(0)
    optimizer = optimizer_of(trained)
    train(trained, optimizer, "0.up", "1.up")
    shard = to_shard(trained, optimizer, b"head", METADATA)
    header = header_bytes({"a": ("F32", (2, 3)), "b": ("BF16", (4,)), "c": ("U8", (0, 3))}, metadata={"x": "y"})
    plain = header + bytes(32)
    who = speaker_of("pi-4").identity
    whole = who.key_pem + who.certificate_pem + who.authorities_pem
    files = list(itertools.chain(chunks.cut_pieces("a", [b"abc"]), chunks.cut_pieces("sub/b", [b""])))
    return (
        Reader(name="header", seeds=(plain, shard), read=_header),
        Reader(name="header of text", seeds=(plain[8 : len(header)],), read=_header_of_text, is_json=True),
        Reader(name="gguf", seeds=(_gguf(),), read=_Gguf(folder / "model.gguf")),
        Reader(name="tensors", seeds=(plain, shard), read=_tensors),
        Reader(name="shard", seeds=(shard,), read=_shard),
        Reader(name="shard of text", seeds=(shard[8 : 8 + int.from_bytes(shard[:8], "little")],), read=_shard_of_text,
               is_json=True),
        Reader(name="snapshot", seeds=(to_shard(parameters(0), None, None, METADATA), plain), read=_snapshot),
        _text_reader("manifest", manifest(4).to_json(), CheckpointManifest.parse, repair=_with_right_digest),
        Reader(name="record", seeds=(record().to_text().encode(),), read=lambda data: RunRecord.parse(_text(data)),
               is_json=True),
        Reader(name="joined files", seeds=(_framed(files),), read=_Joined(folder / "joined")),
        Reader(name="certificate", seeds=(who.certificate_pem,), read=facts_of),
        Reader(name="key", seeds=(who.key_pem,), read=read_key),
        Reader(name="request", seeds=(make_request(make_key()),), read=requested_key),
        Reader(name="identity", seeds=(whole,), read=_Identity(folder / "identity")),
        Reader(name="token", seeds=(_TOKEN.encode(),), read=lambda data: parse_token(_text(data))),
        Reader(name="csv", seeds=(_ROWS,), read=_Rows(folder / "rows.csv")),
        Reader(name="jsonl", seeds=(_LINES,), read=_Rows(folder / "rows.jsonl")),
        Reader(name="trace", seeds=(_TRACE,), read=_Trace(folder / "trace.json"), is_json=True),
    )  # fmt: skip


def _text_reader(name: str, value: Any, read: Callable[[str], object], **more: Any) -> Reader:
    return Reader(
        name=name, seeds=(json.dumps(value).encode(),), read=lambda data: read(_text(data)), is_json=True, **more
    )


def _with_length(text: bytes, size: int) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(size)


def _header(data: bytes) -> object:
    return header_of(io.BytesIO(data), len(data), where="f")


def _gguf() -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    words = text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    names = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    one = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 2, 2, 0)
    other = text("blk.0.attn_q.weight") + struct.pack("<IQQIQ", 2, 32, 4, 8, 64)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + names + words + one + other
    return head + bytes(-len(head) % 32 + 64 + 4 * 34)


class _Gguf:
    """The header of a GGUF file, of which a path is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, data: bytes) -> object:
        self._path.write_bytes(data)
        return read_gguf_header(self._path, lists=["tokens"])


def _header_of_text(data: bytes) -> object:
    return _tensors(_with_length(data, 32))


def _tensors(data: bytes) -> object:
    file = TensorFile(Pieces.of(data), where="f")
    return [bytes(file.tensor(name).data) for name in file.infos]


def _shard(data: bytes) -> object:
    own = parameters(1)
    return load_shard(data, own, optimizer_of(own), METADATA, with_head=True)


def _shard_of_text(data: bytes) -> object:
    return _shard(_with_length(data, _SHARD_BYTES))


def _snapshot(data: bytes) -> object:
    file = TensorFile(Pieces.of(data), where="a snapshot")
    torch_backend._check(file, _SNAPSHOT)
    return [torch_backend._block_of(name) for name in file.infos]


def _framed(messages: list[control_pb2.FileChunk]) -> bytes:
    texts = [message.SerializeToString() for message in messages]
    return b"".join(len(text).to_bytes(_LENGTH, "big") + text for text in texts)


class _Joined:
    """Files in pieces, into a folder that has nothing else; none may lie outside it, and no name is made up."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, itertools.count()

    def __call__(self, data: bytes) -> object:
        messages, at = [], 0
        while at < len(data):
            length = int.from_bytes(data[at : at + _LENGTH], "big")
            try:
                messages.append(control_pb2.FileChunk.FromString(data[at + _LENGTH : at + _LENGTH + length]))
            except DecodeError:
                return None
            at += _LENGTH + length
        with tempfile.TemporaryDirectory(prefix=self._folder.name, dir=self._folder.parent) as into:
            try:
                chunks.write_any_files(messages, Path(into), names=("a", "sub/b"), max_bytes=1000, source="a node")
            finally:
                names = {str(path.relative_to(into)) for path in Path(into).rglob("*") if path.is_file()}
                assert names <= {"a", "sub/b"}, "a file that nobody expected"
        return None


class _Identity:
    """The identity of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)
        (folder / IDENTITY).touch(mode=0o600)

    def __call__(self, data: bytes) -> object:
        (self._folder / IDENTITY).write_bytes(data)
        return read_identity(self._folder, time.time())


class _Rows:
    """The rows of an owner."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, data: bytes) -> object:
        self._path.write_bytes(data)
        return list(table_rows(self._path, {"data.text": "text", "data.label": "label"}))


class _Trace:
    """A recorded run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, data: bytes) -> object:
        self._path.write_bytes(data)
        return read_trace(self._path, 4)
