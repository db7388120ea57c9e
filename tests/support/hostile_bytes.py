"""Hostile bytes for whatever reads what another machine, or a disk, has given: readers, changes and the judge."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import random
import re
import resource
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import torch
from google.protobuf.message import DecodeError

from coordinator.planner.given_plan import GivenPlan
from coordinator.run.requests import RunRequest, read_run_request, run_request_to_proto
from coordinator.server.run_record import RunRecord
from coordinator.server.server import entry_of, member_of
from edge.agent import torch_backend
from edge.transport import frames, tensors
from edge.transport.admission import FrameCheck, check_hello
from edge.transport.frames import BLOBS, DTYPE_NAMES, NAMES, Assembler, unpack
from edge.transport.server import RunExpectation
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import RingTuneError
from ringtune.job.job import Job, Model, parse_job
from ringtune.models.weights_by_digest import ModelSource, manifest_from_proto, manifest_to_proto, pieces_from_proto
from ringtune.run_control.checkpoint import CheckpointManifest, Resume
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import turn_sequence
from ringtune.storage import chunks
from ringtune.storage.gguf import read_gguf_header
from ringtune.storage.pieces import Pieces
from ringtune.storage.strict import json_digest, read_object
from ringtune.storage.tables import table_rows
from ringtune.storage.tensor_files import TensorFile, header_bytes, header_of
from ringtune.transport.codecs import GrantReader, GrantWriter, check_report, scores_from_proto
from ringtune.transport.identity import facts_of, make_key, make_request, read_identity, read_key, requested_key
from ringtune.transport.parties import IDENTITY, parse_token
from ringtune.v1 import control_pb2, ring_pb2, weights_pb2
from sim.recorded_run import read_trace
from tests.contract.run_control.test_checkpoint import JOB, manifest
from tests.contract.run_control.test_checkpoint import PLAN as PLAN_OF_MANIFEST
from tests.coordinator.server.test_run_record import record
from tests.edge.checkpoint.test_shard_file import METADATA, load_shard, optimizer_of, parameters, to_shard, train
from tests.support.choosing import make_choice, table_of
from tests.support.fake_agents import facts, job
from tests.support.moves import moving
from tests.support.plans import changed, make_plan, random_operations, random_plan, random_replicas
from tests.support.trust_parts import credentials_of
from tests.support.weights_parts import write_bert
from tests.support.wire_parts import expectation, hello, hidden, plan

MAX_S: Final = 1.0
MAX_GROWTH_BYTES: Final = 64 << 20
"""What a call may make this process grow by; an input has some kilobytes."""

MAX_TEXT: Final = 16_000
_OUR_CODE: Final = re.compile(r"/(?:proto|edge|coordinator|sim)/.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Something that reads bytes of others.

    Attributes:
        name: of it.
        seeds: right inputs.
        read: takes any bytes; every error of ours is an answer.
        is_json: whether the inputs are JSON texts, whose values are replaced by hostile ones.
        repair: makes the digests of a changed JSON text right again; None = it has none.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    is_json: bool = False
    repair: Callable[[object], object] | None = None


def problem_of(reader: Reader, data: bytes) -> str:
    """Give a reader an input; say what is wrong with its answer, with the place in our code; empty = nothing is."""
    before = _peak_bytes()
    began_s = time.thread_time()
    problem = ""
    try:
        reader.read(data)
    except RingTuneError as error:
        if len(str(error)) > MAX_TEXT:
            problem = f"an error text of {len(str(error)):,} characters"
    except Exception as error:
        problem = f"{type(error).__name__} at {_place(error)}"
    if not problem and time.thread_time() - began_s > MAX_S:
        problem = f"more than {MAX_S:g} s of a processor"
    if not problem and _peak_bytes() - before > MAX_GROWTH_BYTES:
        problem = f"more than {MAX_GROWTH_BYTES >> 20} MiB"
    return f"{reader.name}: {problem}" if problem else ""


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _place(error: Exception) -> str:
    """The last line of ours that an error has passed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        found = _OUR_CODE.search(frame.filename)
        if found:
            return f"{found[0][1:]}:{frame.lineno}"
    return "the test itself"


MAX_BYTES: Final = 1 << 16

HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2, 3, 1 << 20, 1 << 31, 1 << 62, 1 << 63, 10**19, 10**400, -(10**400), 0.5, -0.5),
    *(1e308, -1e308, "", "x", "a", "b", "a/../b", "../../x", "/etc/x", "\x1b[2J", "\ud800", "x" * 5000, "0" * 64),
    *([], [[]], {}, {"a": 1}, [1, 2], ["a", "a"], [None], [{"node": "a"}], "nan", "Infinity", "\0", [0] * 2000),
)
_TEXTS: Final = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "0.0", "1" * 5000, "[" * 30_000, '{"a":' * 30_000)
_NUMBERS: Final = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
_DEEP: Final = "HERE IT IS DEEP"


def mutated(reader: Reader, data: bytes, rng: random.Random) -> bytes:
    """Change an input; what is JSON stays JSON more often than not."""
    if reader.is_json and rng.random() < 0.8:
        try:
            return _changed_json(reader, json.loads(data), rng)[:MAX_BYTES]
        except (ValueError, RecursionError):
            return _changed_json(reader, json.loads(rng.choice(reader.seeds)), rng)[:MAX_BYTES]
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        _change_bytes(content, reader, rng)
    return bytes(content[:MAX_BYTES])


def _changed_json(reader: Reader, value: Any, rng: random.Random) -> bytes:
    value = copy.deepcopy(value)
    known = _places(value)
    for _ in range(rng.randint(1, 3)):
        if known:
            _put(value, rng.choice(known), rng, known)
    if rng.random() < 0.5:
        value = without_digests(value)
    elif reader.repair is not None:
        value = reader.repair(value)
    text = json.dumps(value)
    if _DEEP in text:
        text = text.replace(f'"{_DEEP}"', rng.choice(_TEXTS))
    return text.encode("utf-8", "replace")


def without_digests(value: Any) -> Any:
    """A value without the digests that would refuse any change before it is looked at."""
    if isinstance(value, dict):
        return {key: without_digests(item) for key, item in value.items() if key != "digest"}
    return [without_digests(item) for item in value] if isinstance(value, list) else value


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    if len(at) > 20:
        return found
    inside = value.items() if isinstance(value, dict) else enumerate(value[:50]) if isinstance(value, list) else ()
    for key, item in inside:
        found += _places(item, (*at, key))
    return found


def _put(value: Any, at: tuple[Any, ...], rng: random.Random, known: list[tuple[Any, ...]]) -> None:
    whole = value
    for key in at[:-1]:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return
    what = rng.random()
    if what < 0.1 and isinstance(value, dict):
        value.pop(at[-1], None)
    elif what < 0.15 and isinstance(value, list) and len(value) < 50:
        value.append(copy.deepcopy(value[-1]) if value else 0)
    elif (isinstance(value, dict) and at[-1] in value) or (
        isinstance(value, list) and isinstance(at[-1], int) and at[-1] < len(value)
    ):
        if what < 0.25:
            value[at[-1]] = _DEEP
        elif what < 0.4:
            value[at[-1]] = copy.deepcopy(_at(whole, rng.choice(known)))
        elif what < 0.6 and type(value[at[-1]]) is int:
            value[at[-1]] += rng.choice((-1, 1, 2, 7))
        else:
            value[at[-1]] = copy.deepcopy(rng.choice(HOSTILE))


def _at(value: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _change_bytes(content: bytearray, reader: Reader, rng: random.Random) -> None:
    at = rng.randrange(len(content) + 1)
    end = min(len(content), at + rng.choice((1, 2, 4, 8, 64, 4096)))
    match rng.randrange(7):
        case 0:
            content[at:end] = b""
        case 1:
            content[at:at] = rng.randbytes(rng.randint(1, 16))
        case 2 if at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        case 3:
            content[at:end] = rng.choice(_NUMBERS).to_bytes(8, rng.choice(("little", "big")))[: end - at or 8]
        case 4:
            content[at:at] = content[at:end] * rng.choice((1, 2, 100))
        case 5:
            other = rng.choice(reader.seeds)
            begin = rng.randrange(len(other) + 1)
            content[at:end] = other[begin : begin + rng.choice((1, 8, 64, 4096))]
        case _:
            content[at:end] = rng.choice(_TEXTS).encode()


_LENGTH: Final = 2
"""Bytes of a message's length, where several are one input."""
_SHAPE: Final = (2, 6, 8)
_WIRES: Final = ("float32", "bfloat16", "float16", "int8", "float64")


def frames_readers() -> tuple[Reader, ...]:
    """What reads messages of a link."""
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
    check_hello(_expected(_WIRES[0]), unpack(data)[0] or ring_pb2.FrameHeader())


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


def plan_readers() -> tuple[Reader, ...]:
    """What reads plans, jobs, profiles and what a run goes on from."""
    rng = random.Random(0)
    still = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], checkpoint_every=2, eval_every=2)
    plans = [still, moving(still, (1, (("b", 0, 2), ("a", 2, 4)))), random_replicas(rng)]
    plans += [random_plan(rng, with_operations=True) for _ in range(4)]
    tables = [random_operations(rng, still.course), random_operations(rng, still.course, subnets=2, codes="12")]
    resume = Resume(plan=PLAN_OF_MANIFEST, manifests=(manifest(4),))
    profile = Profile(nodes=(facts("a"), facts("b")))
    given = GivenPlan(plan=still)
    jobs = [Job(model=Model(path="model")), job(), job(train__method="hift", hift__group_size=1)]
    request = RunRequest(job=jobs[1], resume=resume, profile=profile, plan=given, nodes=("a",))
    return (
        _of_json("plan", [one.to_json() for one in plans], Plan.from_json, _again(Plan.from_json)),
        _of_json("given plan", [given.to_json()], GivenPlan.from_json),
        _of_json("facts", [facts("a").to_message()], NodeFacts.from_message, _again(NodeFacts.from_message)),
        _of_json("profile", [profile.to_json()], Profile.from_json, _again(Profile.from_json)),
        _of_json("table", [one.to_json() for one in tables], lambda value: Operations.from_json(value, where="table")),
        _of_json("manifest", [manifest(4).to_json()], CheckpointManifest.from_json, repair=_with_right_digest),
        Reader(
            name="resume",
            seeds=(resume.to_text().encode(),),
            read=lambda data: Resume.parse(_text(data)).check(JOB),
            is_json=True,
        ),
        Reader(
            name="job",
            seeds=tuple(one.to_toml().encode() for one in jobs),
            read=lambda data: parse_job(_text(data), source="job.toml").to_toml(),
        ),
        Reader(name="request", seeds=(run_request_to_proto(request).SerializeToString(),), read=read_run_request),
    )


def _of_json(
    name: str,
    values: list[Any],
    read: Callable[[Any], Any],
    check: Callable[[Any], None] = lambda found: None,
    *,
    repair: Callable[[Any], Any] | None = None,
) -> Reader:
    seeds = tuple(json.dumps(value).encode() for value in values)

    def whole(data: bytes) -> None:
        check(read(read_object(data, "a text")))

    return Reader(name=name, seeds=seeds, read=whole, is_json=True, repair=repair)


def _again(read: Callable[[Any], Any]) -> Callable[[Any], None]:
    """What passes can be written again, and is read as the same."""

    def check(found: Any) -> None:
        written = found.to_message() if isinstance(found, NodeFacts) else found.to_json()
        assert read(json.loads(json.dumps(written, allow_nan=False))) == found, "it reads another one"

    return check


def _with_right_digest(value: Any) -> Any:
    """A manifest that says what its content is, as somebody does who changes one on purpose."""
    if not isinstance(value, dict):
        return value
    of = {key: item for key, item in value.items() if key not in ("digest", "unfreezing") and item is not None}
    return {**value, "digest": json_digest(of)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


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


def files_readers() -> tuple[Reader, ...]:
    """What reads files of others."""
    folder = Path(tempfile.mkdtemp(prefix="ringtune-fuzz-"))
    trained = parameters(0)
    optimizer = optimizer_of(trained)
    train(trained, optimizer, "0.up", "1.up")
    shard = to_shard(trained, optimizer, b"head", METADATA)
    header = header_bytes({"a": ("F32", (2, 3)), "b": ("BF16", (4,)), "c": ("U8", (0, 3))}, metadata={"x": "y"})
    plain = header + bytes(32)
    who = credentials_of("pi-4").identity
    whole = who.key_pem + who.certificate_pem + who.authorities_pem
    files = list(itertools.chain(chunks.cut_pieces("a", [b"abc"]), chunks.cut_pieces("sub/b", [b""])))
    return (
        Reader(name="header", seeds=(plain, shard), read=_header),
        Reader(name="header of text", seeds=(plain[8 : len(header)],), read=_header_of_text, is_json=True),
        Reader(name="gguf", seeds=(_gguf(),), read=_from_path(folder / "model.gguf", _gguf_header)),
        Reader(name="tensors", seeds=(plain, shard), read=_tensors),
        Reader(name="shard", seeds=(shard,), read=_shard),
        Reader(name="shard of text", seeds=(shard[8 : 8 + int.from_bytes(shard[:8], "little")],), read=_shard_of_text,
               is_json=True),
        Reader(name="snapshot", seeds=(to_shard(parameters(0), None, None, METADATA), plain), read=_snapshot),
        _text_reader("manifest", manifest(4).to_json(), CheckpointManifest.parse, repair=_with_right_digest),
        Reader(name="record", seeds=(record().to_text().encode(),), read=lambda data: RunRecord.parse(_text(data)),
               is_json=True),
        Reader(name="joined files", seeds=(_joined(file.SerializeToString() for file in files),),
               read=_Joined(folder / "joined")),
        Reader(name="certificate", seeds=(who.certificate_pem,), read=facts_of),
        Reader(name="key", seeds=(who.key_pem,), read=read_key),
        Reader(name="request", seeds=(make_request(make_key()),), read=requested_key),
        Reader(name="identity", seeds=(whole,), read=_from_path(_identity_file(folder / "identity"), _identity)),
        Reader(name="token", seeds=(_TOKEN.encode(),), read=lambda data: parse_token(_text(data))),
        Reader(name="csv", seeds=(_ROWS,), read=_from_path(folder / "rows.csv", _rows)),
        Reader(name="jsonl", seeds=(_LINES,), read=_from_path(folder / "rows.jsonl", _rows)),
        Reader(name="trace", seeds=(_TRACE,), read=_from_path(folder / "trace.json", lambda path: read_trace(path, 4)),
               is_json=True),
    )  # fmt: skip


def _text_reader(name: str, value: Any, read: Callable[[str], object], **more: Any) -> Reader:
    return Reader(
        name=name, seeds=(json.dumps(value).encode(),), read=lambda data: read(_text(data)), is_json=True, **more
    )


def _identity_file(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    (folder / IDENTITY).touch(mode=0o600)
    return folder / IDENTITY


def _identity(path: Path) -> object:
    return read_identity(path.parent, time.time())


def _gguf_header(path: Path) -> object:
    return read_gguf_header(path, lists=["tokens"])


def _rows(path: Path) -> object:
    return list(table_rows(path, {"data.text": "text", "data.label": "label"}))


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


def _from_path(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Read bytes from a file at a path."""

    def written(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return written


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


class _Joined:
    """Files in pieces, into a folder that has nothing else; none may lie outside it, and no name is made up."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, itertools.count()

    def __call__(self, data: bytes) -> object:
        try:
            messages = [control_pb2.FileChunk.FromString(message) for message in _split(data)]
        except DecodeError:
            return None
        with tempfile.TemporaryDirectory(prefix=self._folder.name, dir=self._folder.parent) as into:
            try:
                chunks.write_any_files(messages, Path(into), names=("a", "sub/b"), max_bytes=1000, source="a node")
            finally:
                names = {str(path.relative_to(into)) for path in Path(into).rglob("*") if path.is_file()}
                assert names <= {"a", "sub/b"}, "a file that nobody expected"
        return None


def calls_readers() -> tuple[Reader, ...]:
    """What reads the messages of calls, once protobuf has taken them apart."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], checkpoint_every=2, eval_every=2)
    chosen = changed(plan, choice=make_choice())
    table = table_of(chosen.course, 0)
    turns = list(turn_sequence(plan.course))
    with_table = [dataclasses.replace(turns[0], operations=table)]
    grants = [GrantWriter("r").request(some) for some in (with_table, with_table * 3)]
    report = control_pb2.ReportRequest(run_id="r", node="a", number=1)
    step = report.steps.add()
    step.seq, step.kind = 0, "train"
    scores = control_pb2.SubnetScores(owner="a", scores=2, subnets=1, values=bytes(32))
    joined = control_pb2.JoinRequest(node="a", address="127.0.0.1:1", version="1", wire=1)
    manifest = ModelSource(write_bert(Path(mkdtemp(prefix="ringtune-fuzz-")) / "model")).manifest
    asked = weights_pb2.FetchRequest(pieces=[{"sha256": bytes(32), "offset": 0}])
    return (
        _of_call("grant", grants, lambda message: GrantReader(chosen.course).turns(message)),
        _of_call("report", [report], lambda message: check_report(message, last=0, nodes=("a", "b"), end_seq=100)),
        _of_call("scores", [scores], scores_from_proto),
        _of_call("join", [joined], lambda message: entry_of(member_of(message), "idle", 0.0)),
        _of_call("model manifest", [manifest_to_proto(manifest)], lambda message: manifest_from_proto(message).sha256),
        _of_call("pieces", [asked], pieces_from_proto),
    )


def _of_call(name: str, messages: list[Any], read: Callable[[Any], object]) -> Reader:
    kind = type(messages[0])

    def whole(data: bytes) -> None:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return  # the wire answers these itself
        read(message)

    return Reader(name=name, seeds=tuple(one.SerializeToString() for one in messages), read=whole)


READERS: Final[dict[str, Callable[[], tuple[Reader, ...]]]] = {
    "frames": frames_readers,
    "plan": plan_readers,
    "files": files_readers,
    "calls": calls_readers,
}
