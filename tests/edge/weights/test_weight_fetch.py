"""Base weights over real gRPC streams, and a node that plans and runs without a copy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from edge.model.tensor_files import SafetensorsFiles
from edge.options import AgentOptions
from edge.runtime.executor import host
from edge.techniques.offload.sites import adapter_weights
from edge.weights import weight_fetch
from edge.weights.weight_cache import CheckedFile, ModelCache
from edge.weights.weight_fetch import IdleWatchdog, ModelFetcher, PendingFetch, Sources
from ringtune.costs.model_facts import model_facts
from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    ModelError,
    RingTuneError,
    TrustError,
)
from ringtune.job.job import Job, Model
from ringtune.models.folder import read_config, read_headers
from ringtune.models.weights_by_digest import (
    CHUNK_BYTES,
    ModelManifest,
    ModelSource,
    Offers,
    TensorEntry,
    manifest_to_proto,
    needed_tensors,
)
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import Pieces
from ringtune.transport.channels import Server
from ringtune.v1 import weights_pb2, weights_pb2_grpc
from tests.support.plans import make_plan
from tests.support.tap import Tap
from tests.support.weights_parts import (
    MINILM,
    RUN,
    TIMEOUT_S,
    digest_at,
    poisoned,
    serving,
    wait_until,
    wanted,
    write_bert,
)

LIMIT = 1.02


def slice_of(folder: Path, manifest: ModelManifest, *blocks: int) -> tuple[TensorEntry, ...]:
    """What a host of these blocks needs."""
    return needed_tensors(manifest, read_config(folder), blocks=blocks, is_owner=False, with_decoder=False)


def missing_in(cache: ModelCache, tensors: tuple[TensorEntry, ...]) -> list[CheckedFile]:
    """The files that are still to come, taken up where they are."""
    files = [file for file in map(cache.tensor, tensors) if not file.is_complete()]
    for file in files:
        file.resume()
    return files


@contextlib.contextmanager
def tapped(port: int) -> Iterator[Tap]:
    """A tap in front of a port."""
    tap = Tap(port)
    try:
        yield tap
    finally:
        tap.close()


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sizes of MiniLM (all but its token table), of four blocks."""
    return write_bert(tmp_path_factory.mktemp("minilm") / "model", sizes=MINILM, num_files=2)


def test_weights_fetch_of_a_slice_costs_its_bytes(minilm: Path, tmp_path: Path) -> None:
    """Two of four blocks with an empty cache: everything on the wire is at most 1.02 of the tensors.

    A fetch whose connection is cut in the middle takes the stream up by itself, and hardly pays for it.
    """
    for cut_at_bytes in (0, 8_000_000):
        with serving(minilm) as server, tapped(server.port) as tap:
            with Sources([f"127.0.0.1:{tap.port}"]) as sources:
                manifest = sources.manifest(wanted(), digest(minilm))
                tensors = slice_of(minilm, manifest, 2, 3)
                tap.cut_at_bytes = cut_at_bytes or tap.cut_at_bytes
                cache = ModelCache(tmp_path / str(cut_at_bytes), manifest, "m")
                came = sources.fetch(missing_in(cache, tensors), wanted())
            on_wire = sum(flow.num_bytes for flow in tap.flows)
        assert len(tap.flows) == (2 if cut_at_bytes else 1)
        needed = sum(tensor.nbytes for tensor in tensors)
        assert came == needed == 2 * 4 * 1_774_464
        assert needed < on_wire <= LIMIT * needed, on_wire / needed


def test_weights_fetch_restarted_goes_on_where_it_stopped(minilm: Path, tmp_path: Path) -> None:
    """Given up in the middle of a large tensor; what comes next is the rest, to the byte."""
    with serving(minilm) as server, tapped(server.port) as tap:
        with Sources([f"127.0.0.1:{tap.port}"]) as sources:
            manifest = sources.manifest(wanted(), digest(minilm))
            tensors = slice_of(minilm, manifest, 2, 3)
            files = missing_in(ModelCache(tmp_path, manifest, "m"), tensors)
            stop, tap.hold_at_bytes = threading.Event(), 6_000_000  # so it is not over before it is given up
            is_far = stop_when(stop, lambda: sum(file.offset for file in files) > 5_000_000)
            with is_far, pytest.raises(InterruptedRunError):
                sources.fetch(files, wanted(stop=stop))
        tap.passes.set()
        kept = sum(file.offset for file in files)
        with Sources([f"127.0.0.1:{tap.port}"]) as sources:
            again = missing_in(ModelCache(tmp_path, sources.manifest(wanted(), digest(minilm)), "m"), tensors)
            came = sources.fetch(again, wanted())
        on_wire = sum(flow.num_bytes for flow in tap.flows)
    needed = sum(tensor.nbytes for tensor in tensors)
    assert kept > 5_000_000
    assert came == needed - kept
    assert on_wire <= LIMIT * needed, on_wire / needed


@contextlib.contextmanager
def stop_when(stop: threading.Event, predicate: Callable[[], bool]) -> Iterator[None]:
    """Set ``stop`` when something has happened."""

    def watch() -> None:
        wait_until(predicate)
        stop.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        watcher.join()


# ---- bad sources -----------------------------------------------------------------------------------


class Liar(weights_pb2_grpc.WeightsServicer):
    """Has the right manifest and sends something else."""

    def __init__(self, manifest: ModelManifest, chunk: Callable[[int], weights_pb2.FetchChunk | None]) -> None:
        self._manifest = manifest
        self._chunk = chunk
        self.asked, self.most = 0, 1 << 20
        self.ended = threading.Event()

    def Manifest(
        self, request: weights_pb2.ManifestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.ManifestReply:
        """The truth."""
        return manifest_to_proto(self._manifest)

    def Fetch(
        self, request: weights_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[weights_pb2.FetchChunk]:
        """Whatever the test wants; None hangs."""
        self.asked += 1
        for index, _ in enumerate(request.pieces[: self.most]):
            chunk = self._chunk(index)
            if chunk is None:
                context.add_callback(self.ended.set)
                self.ended.wait(30)
                return
            yield chunk


@contextlib.contextmanager
def lying(folder: Path, chunk: Callable[[int], weights_pb2.FetchChunk | None]) -> Iterator[tuple[Liar, str]]:
    """A liar and its address."""
    liar = Liar(ModelSource(folder).manifest, chunk)
    server = Server("127.0.0.1:0", lambda made: weights_pb2_grpc.add_WeightsServicer_to_server(liar, made))
    try:
        yield liar, f"127.0.0.1:{server.port}"
    finally:
        liar.ended.set()
        server.stop(0.1)


LIES: list[Callable[[int], weights_pb2.FetchChunk]] = [
    lambda index: weights_pb2.FetchChunk(piece=index, data=b"x" * 32),
    lambda index: weights_pb2.FetchChunk(piece=index, data=b"x" * 5000),
    lambda index: weights_pb2.FetchChunk(piece=index + 10_000, data=b"x"),
    lambda index: weights_pb2.FetchChunk(piece=index, data=b""),
    lambda index: weights_pb2.FetchChunk(piece=index, data=bytes(CHUNK_BYTES + 1)),
]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.sampled(3)
def test_weights_fetch_never_uses_what_has_another_digest(
    lie: Callable[[int], weights_pb2.FetchChunk], tmp_path: Path
) -> None:
    """A source that sends something else is left, and the next one makes good; alone it is named and nothing stays."""
    folder = write_bert(tmp_path / "m")
    with lying(folder, lie) as (liar, address):
        with Sources([address]) as sources:
            manifest = sources.manifest(wanted(), digest(folder))
            tensors = slice_of(folder, manifest, 1)
            cache = ModelCache(tmp_path / "alone", manifest, "m")
            with pytest.raises(IntegrityError, match=address):
                sources.fetch(missing_in(cache, tensors), wanted())
            assert liar.asked == 1
            assert not list(cache.weights.glob("*.safetensors"))
        with serving(folder) as server, Sources([address, f"127.0.0.1:{server.port}"]) as sources:
            assert sources.manifest(wanted(), digest(folder)) == manifest
            cache = ModelCache(tmp_path / "two", manifest, "m")
            sources.fetch(missing_in(cache, tensors), wanted())
            assert all(cache.tensor(tensor).is_complete() for tensor in tensors)
            assert liar.asked == 2


@pytest.mark.promise("6 every wait ends")
def test_weights_fetch_leaves_a_source_that_brings_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without progress is given up after the idle time, whatever the deadline.

    Only the first source has a short idle time: on a busy machine the other one may be silent for a while too.
    """
    folder = write_bert(tmp_path / "m")
    idle_times = iter([0.05])
    with (
        lying(folder, lambda index: None) as (liar, address),
        serving(folder) as server,
        Sources([address, f"127.0.0.1:{server.port}"]) as sources,
    ):
        manifest = sources.manifest(wanted(), digest(folder))
        cache = ModelCache(tmp_path / "cache", manifest, "m")
        tensors = slice_of(folder, manifest, 0)

        def watch(call: Any, who: PendingFetch, *, idle_s: float) -> IdleWatchdog:
            wait_until(lambda: liar.asked > 0)  # however long the machine takes to serve the first call
            return IdleWatchdog(call, who, idle_s=next(idle_times, idle_s))

        monkeypatch.setattr(weight_fetch, "IdleWatchdog", watch)
        came = sources.fetch(missing_in(cache, tensors), wanted(timeout_s=3600.0, idle_s=3600.0))
    assert came == sum(tensor.nbytes for tensor in tensors)
    assert liar.asked == 1


@pytest.mark.promise("6 every wait ends")
def test_weights_manifest_of_a_silent_source_has_its_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that never answers leaves the others theirs; one that is slow alone is asked again."""
    manifest, asked = ModelSource(write_bert(tmp_path / "m")).manifest, list[tuple[str, float]]()
    no_answer, no_copy = DeadlineError("no answer"), ModelError("no copy")
    answers: dict[str, list[ModelManifest | RingTuneError]] = {
        "silent": [no_answer],
        "lacks": [no_copy, no_copy],
        "good": [manifest],
        "slow": [no_answer, manifest],
    }

    def ask(self: Sources, address: str, fetch: PendingFetch, sha256: str, *, timeout_s: float) -> ModelManifest:
        asked.append((address, timeout_s))
        if isinstance(answer := answers[address].pop(0), ModelManifest):
            return answer
        raise answer

    monkeypatch.setattr(Sources, "_ask", ask)
    sources = Sources(["silent", "lacks", "good"])
    assert sources.manifest(wanted(timeout_s=600.0), manifest.sha256) == manifest
    assert [address for address, _ in asked] == ["silent", "lacks", "good"]
    assert asked[0][1] <= 200.0 and sources.addresses == ("good", "silent")
    asked.clear()
    assert Sources(["slow", "lacks"]).manifest(wanted(timeout_s=600.0), manifest.sha256) == manifest
    assert [address for address, _ in asked] == ["slow", "lacks", "slow"] and asked[2][1] > 400.0


def test_weights_fetch_leaves_a_source_that_ends_its_streams_early(tmp_path: Path) -> None:
    """A source that sends one byte a stream would be asked for all the time; a wrong byte costs one more stream."""
    folder = write_bert(tmp_path / "m")
    tensors = slice_of(folder, ModelSource(folder).manifest, 0)
    right = contents_of(folder)[tensors[0].name][:1]
    for byte in (bytes([right[0] ^ 1]), right):
        chunk = weights_pb2.FetchChunk(piece=0, data=byte)
        with (
            lying(folder, {0: chunk}.get) as (liar, address),
            serving(folder) as server,
            Sources([address, f"127.0.0.1:{server.port}"]) as sources,
        ):
            liar.most = 1
            manifest = sources.manifest(wanted(), digest(folder))
            cache = ModelCache(tmp_path / f"cache {byte!r}", manifest, "m")
            came = sources.fetch(missing_in(cache, tensors), wanted())
            assert liar.asked == 1 and all(cache.tensor(tensor).is_complete() for tensor in tensors)
            assert came == sum(tensor.nbytes for tensor in tensors) + (tensors[0].nbytes if byte != right else 0)


@pytest.mark.promise("6 every wait ends")
def test_weights_fetch_ends_at_its_deadline_and_when_it_is_stopped(tmp_path: Path) -> None:
    """And says that what came is kept; a released run does not wait for a hanging source."""
    folder, stop = write_bert(tmp_path / "m"), threading.Event()
    with lying(folder, lambda index: None) as (liar, address), Sources([address]) as sources:
        manifest = sources.manifest(wanted(), digest(folder))
        files = missing_in(ModelCache(tmp_path / "cache", manifest, "m"), slice_of(folder, manifest, 0))
        with pytest.raises(DeadlineError, match="kept"):
            sources.fetch(files, wanted(timeout_s=0.3))
        before = liar.asked
        with stop_when(stop, lambda: liar.asked > before), pytest.raises(InterruptedRunError):
            sources.fetch(files, wanted(timeout_s=3600.0, idle_s=3600.0, stop=stop))


def test_weights_fetch_ends_when_every_source_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few tries, with what to do."""
    monkeypatch.setattr(weight_fetch, "_BACK_OFF_S", (0.0,) * 4)
    folder = write_bert(tmp_path / "m")
    with serving(folder) as server, Sources([f"127.0.0.1:{server.port}"]) as sources:
        manifest = sources.manifest(wanted(), digest(folder))
    files = missing_in(ModelCache(tmp_path / "cache", manifest, "m"), slice_of(folder, manifest, 0))
    with Sources([f"127.0.0.1:{server.port}"]) as sources, pytest.raises(ConnectionFailedError, match="again"):
        sources.fetch(files, wanted())


def test_weights_manifest_is_waited_for_while_a_run_is_not_known_yet(tmp_path: Path) -> None:
    """Nodes are asked to inspect at about the same time; whoever is first asks again."""
    folder, asked = write_bert(tmp_path / "m"), threading.Event()

    class Late(Offers):
        def manifest(self, request: weights_pb2.ManifestRequest, *, is_node: bool = False) -> weights_pb2.ManifestReply:
            if asked.is_set():
                self.put(RUN, folder)
            asked.set()
            return super().manifest(request, is_node=is_node)

    with serving(None, offers=Late()) as server, Sources([f"127.0.0.1:{server.port}"]) as sources:
        assert sources.manifest(wanted(), digest(folder)) == ModelSource(folder).manifest
    with (
        serving(None, offers=Offers()) as server,
        Sources([f"127.0.0.1:{server.port}"]) as sources,
        pytest.raises(DeadlineError),
    ):
        sources.manifest(wanted(timeout_s=0.2), digest(folder))


def test_weights_manifest_nobody_has_says_who_was_asked(tmp_path: Path) -> None:
    """A node without a copy, one with a damaged copy, and one that is not there."""
    damaged = write_bert(tmp_path / "m")
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with serving(None) as without, serving(damaged) as broken:
        addresses = [f"127.0.0.1:{server.port}" for server in (without, broken)]
        with Sources([*addresses, "127.0.0.1:9"]) as sources, pytest.raises(ModelError) as caught:
            sources.manifest(wanted(), "0" * 64)
    for part in (*addresses, "no copy", "model.safetensors", "127.0.0.1:9"):
        assert part in str(caught.value)


def test_weights_fetch_waits_for_a_busy_source(minilm: Path, tmp_path: Path) -> None:
    """A source serves so many streams at a time; the others come later, however long that takes."""
    offers = Offers(max_streams=1)
    offers.put(RUN, minilm)
    with serving(None, offers=offers) as server, Sources([f"127.0.0.1:{server.port}"]) as sources:
        manifest = sources.manifest(wanted(), digest(minilm))
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            pieces = [weights_pb2.Piece(sha256=bytes.fromhex(tensor.sha256)) for tensor in manifest.tensors]
            call = weights_pb2_grpc.WeightsStub(channel).Fetch(weights_pb2.FetchRequest(run_id=RUN, pieces=pieces))
            next(call)  # nobody reads on, so it holds its place
            threading.Timer(1.0, call.cancel).start()
            files = missing_in(ModelCache(tmp_path, manifest, "m"), slice_of(minilm, manifest, 0))
            assert sources.fetch(files, wanted()) == sum(file.nbytes for file in files)


def test_weights_fetches_of_one_caller_leave_room_for_others(minilm: Path) -> None:
    """A member that reads none of its fetches has two places of eight; what it ends it may begin again."""
    offers = Offers()
    offers.put(RUN, minilm)
    piece = weights_pb2.Piece(sha256=bytes.fromhex(offers.source(RUN).manifest.tensors[0].sha256))

    def begun(caller: str) -> Iterator[weights_pb2.FetchChunk]:
        found = offers.chunks(weights_pb2.FetchRequest(run_id=RUN, pieces=[piece]), caller=caller)
        next(found)
        return found

    held = [begun("node a"), begun("node a"), begun("node b")]
    with pytest.raises(BusyError, match="node a fetches 2 times from here already; ask again"):
        begun("node a")
    held.clear()
    begun("node a")


PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=2)
JOB = Job(model=Model(path="elsewhere/all-MiniLM-L6-v2")).with_overrides({"train.max_length": 16})


class Node:
    """A node with its own cache, and a source."""

    def __init__(self, cache: Path, port: int, *, name: str = "b", **options: Any) -> None:
        self.cache = cache
        self.found: list[str] = []
        self.coordinator = f"127.0.0.1:{port}"
        settings = AgentOptions(coordinator=self.coordinator, name=name, cache=cache, **options)
        self.borrower = ModelFetcher(settings, lambda: self.found)
        self.offers = self.borrower.offers

    def outline(self, job: Job = JOB, *, run_id: str = RUN, sha256: str = "") -> Path:
        """The folder that it plans from; the coordinator has named the model that its first source has."""
        self.trust(run_id, sha256)
        return Path(self.borrower.for_planning(run_id, job, timeout_s=TIMEOUT_S).model.path)

    def folder(self, plan: Plan = PLAN, *, run_id: str = RUN) -> Path:
        """The folder that it runs from."""
        self.trust(run_id)
        return Path(self.borrower.for_run(run_id, JOB, plan, timeout_s=TIMEOUT_S).model.path)

    def trust(self, run_id: str, sha256: str = "") -> None:
        """Let it fetch a model, by default that of its first source."""
        self.borrower.trust(run_id, sha256 or digest_at(*self.found, self.coordinator, run_id=run_id))


def digest(folder: Path) -> str:
    """The digest of a model's manifest."""
    return ModelSource(folder).manifest.sha256


def tensors_in(folder: Path) -> dict[str, bytes]:
    """Every tensor that the index of a folder names, read by the loader."""
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    with SafetensorsFiles(folder) as weights:
        return {name: weights.read(name).numpy().tobytes() for name in names}


def contents_of(folder: Path) -> dict[str, bytes]:
    """Every tensor of a source."""
    source = ModelSource(folder)
    return {
        entry.name: b"".join(data for _, data in source.read([(entry.sha256, 0)])) for entry in source.manifest.tensors
    }


@pytest.mark.parametrize(("num_files", "prefix"), [(1, "bert."), (3, "")])
def test_weights_outline_plans_like_the_model(tmp_path: Path, num_files: int, prefix: str) -> None:
    """The facts, digest included, are those of a copy, with hardly a byte of weights on the disk."""
    folder = write_bert(tmp_path / "m", num_files=num_files, prefix=prefix)
    with serving(folder) as server:
        outline = Node(tmp_path / "cache", server.port).outline()
    assert model_facts(outline, JOB) == model_facts(folder, JOB)
    assert sorted(path.name for path in outline.iterdir()) == ["config.json", "model.safetensors"]
    assert not list((tmp_path / "cache").rglob("weights/*/*"))


def test_weights_run_folder_has_the_slice_and_no_more(tmp_path: Path) -> None:
    """The very bytes of the source, for the blocks of this node; its name is the model's."""
    folder = write_bert(tmp_path / "m", num_files=2)
    with serving(folder) as server:
        got = Node(tmp_path / "cache", server.port).folder()
    wanted = {name: data for name, data in contents_of(folder).items() if ".layer.2." in name or ".layer.3." in name}
    assert tensors_in(got) == wanted
    assert got.name == "all-MiniLM-L6-v2"
    assert not (got / "tokenizer.json").exists()


def test_weights_helper_gets_no_base_weights(tmp_path: Path) -> None:
    """A node that only helps fits adapters of others' blocks from the configuration alone."""
    folder = write_bert(tmp_path / "m")
    bare = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=2, hidden_size=8)
    placement = dataclasses.replace(bare.placement, helpers=(Helper(node="z", start=2, stop=4),))
    plan = Plan.of(bare.course, placement)
    with serving(folder) as server:
        got = Node(tmp_path / "cache", server.port, name="z").folder(plan)
    assert not tensors_in(got) and not list((tmp_path / "cache").rglob("weights/*/*.safetensors"))
    job = JOB.with_overrides({"model.path": str(got)})
    hosted = host(plan, "z", job, got, None, device=torch.device("cpu"))
    assert sorted(hosted.optimizers.units) == [2, 3]
    wanted = host(plan, "b", job.with_overrides({"model.path": str(folder)}), folder, None, device=torch.device("cpu"))
    theirs = adapter_weights(wanted.skeleton, (2, 3))
    assert hosted.parts.fitted().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in hosted.parts.fitted().items())


def test_weights_owner_gets_embedding_private_blocks_and_tokenizer(tmp_path: Path) -> None:
    """What it needs beside its slice, and no pooler."""
    folder = write_bert(tmp_path / "m")
    template = Path("additional_chat_templates", "rag.jinja")
    (folder / template).parent.mkdir()
    (folder / template).write_text("{{ messages }}")
    plan = make_plan([("a", 1, 2), ("b", 2, 4)], ["b"], num_steps=2, private_blocks=1)
    with serving(folder) as server:
        node = Node(tmp_path / "cache", server.port, data=tmp_path / "rows.csv")
        assert (node.outline() / "tokenizer.json").exists()
        assert (node.outline() / template).read_text() == "{{ messages }}"
        got = node.folder(plan)
    assert (got / template).read_text() == "{{ messages }}"
    names = tensors_in(got)
    assert {name.split(".layer.")[-1][:2] for name in names} == {"em", "0.", "2.", "3."}
    assert (got / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (got / "notes.txt").exists()


def test_weights_second_run_fetches_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is in the cache is checked and used; another slice brings only what is new; damage only what is damaged."""
    caplog.set_level("INFO", logger="edge.weights.weight_fetch")
    folder = write_bert(tmp_path / "m")
    offers = Offers()
    with serving(folder, offers=offers) as server:

        def run(plan: Plan, run_id: str) -> str:
            offers.put(run_id, folder)
            caplog.clear()
            got = Node(tmp_path / "cache", server.port).folder(plan, run_id=run_id)
            assert tensors_in(got).items() <= contents_of(folder).items()
            return caplog.messages[-1]

        assert "0 of 32 tensors were in the cache" in run(PLAN, "r20260101-000000-00000001")
        assert "32 of 32 tensors were in the cache; 0 B" in run(PLAN, "r20260101-000000-00000002")
        wider = make_plan([("a", 0, 1), ("b", 1, 4)], ["a"], num_steps=2)
        assert "32 of 48 tensors were in the cache" in run(wider, "r20260101-000000-00000003")
        victim = next((tmp_path / "cache").rglob("weights/*/*.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-1])
        assert "47 of 48 tensors were in the cache" in run(wider, "r20260101-000000-00000004")


def test_weights_cache_torn_by_a_power_cut_is_made_whole(tmp_path: Path) -> None:
    """Files of an earlier run with zeros in their content: the outline, and a tensor that this run does not need."""
    folder = write_bert(tmp_path / "m")
    with serving(folder) as server:
        node = Node(tmp_path / "cache", server.port)
        outline, got = node.outline() / "model.safetensors", node.folder()
        names = json.loads((got / "model.safetensors.index.json").read_text())["weight_map"]
        unneeded = next(got / file for name, file in names.items() if ".layer.2." in name)
        for torn in (outline, unneeded):
            torn.write_bytes(bytes(torn.stat().st_size))
        assert model_facts(node.outline(), JOB) == model_facts(folder, JOB)
        narrow = make_plan([("a", 0, 3), ("b", 3, 4)], ["a"], num_steps=2)
        assert tensors_in(node.folder(narrow)).items() < contents_of(folder).items()
        assert len(tensors_in(node.folder())) == len(names)


def test_weights_of_a_file_that_changed_are_refused_by_its_name(tmp_path: Path) -> None:
    """A peer is told no folder of this machine."""
    folder = write_bert(tmp_path / "m")
    source, path = ModelSource(folder), folder / "model.safetensors"
    last = max(source.manifest.tensors, key=lambda entry: read_headers(folder)[entry.name].info.offset)
    why = r"^model\.safetensors can't be read, or became shorter; start the run again"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=why):
        list(source.read([(last.sha256, 0)]))
    path.unlink()
    with pytest.raises(IntegrityError, match=why):
        list(source.read([(last.sha256, 0)]))


def test_weights_own_copy_is_used_and_offered(tmp_path: Path) -> None:
    """Nothing is fetched; peers of this run get it until the run is released."""
    folder = write_bert(tmp_path / "m")
    node = Node(tmp_path / "cache", 9)
    job = JOB.with_overrides({"model.path": str(folder)})
    assert node.outline(job) == folder
    assert node.offers.source(RUN).manifest == ModelSource(folder).manifest
    node.borrower.release("r20260101-000000-11111111")
    assert node.offers.source(RUN)
    node.borrower.release(RUN)
    with pytest.raises(FrameError):
        node.offers.source(RUN)
    assert not (tmp_path / "cache").exists()


@pytest.mark.promise("6 every wait ends")
def test_weights_release_ends_the_fetching(tmp_path: Path) -> None:
    """From another thread, once the source was asked."""
    asked = threading.Event()

    class Asked(Offers):
        def manifest(self, request: weights_pb2.ManifestRequest, *, is_node: bool = False) -> weights_pb2.ManifestReply:
            asked.set()
            return super().manifest(request, is_node=is_node)

    with serving(None, offers=Asked()) as server, ThreadPoolExecutor(1) as pool:
        node = Node(tmp_path / "cache", server.port)
        fetching = pool.submit(node.outline, sha256="0" * 64)
        assert asked.wait(30.0)
        node.borrower.release("")
        with pytest.raises(InterruptedRunError):
            fetching.result(30.0)


def test_weights_peers_serve_too_but_not_beyond_this_machine(tmp_path: Path) -> None:
    """The coordinator has none; a peer has; one on another machine is not asked without ``--insecure``."""
    folder = write_bert(tmp_path / "m")
    with serving(None) as coordinator, serving(folder) as peer:
        node = Node(tmp_path / "cache", coordinator.port)
        node.found = ["192.0.2.1:7000"]
        with pytest.raises(ModelError, match="all-MiniLM-L6-v2") as caught:
            node.outline()
        assert "192.0.2.1" not in str(caught.value)
        node.found.append(f"127.0.0.1:{peer.port}")
        assert model_facts(node.outline(), JOB) == model_facts(folder, JOB)


@pytest.mark.promise("2 right version")
def test_weights_are_those_that_the_coordinator_named(tmp_path: Path) -> None:
    """A member that answers first, with other weights of the same shapes, is left, and another one's are taken.

    Without the coordinator's word nothing is fetched, nor from a source that a node can't name the model to.
    """
    folder, evil = write_bert(tmp_path / "m"), poisoned(write_bert(tmp_path / "evil"))
    facts = model_facts(folder, JOB)
    assert dataclasses.replace(model_facts(evil, JOB), digest=facts.digest) == facts
    with serving(folder) as server, serving(evil) as liar:
        node = Node(tmp_path / "cache", server.port)
        node.found = [f"127.0.0.1:{liar.port}"]
        node.borrower.trust(RUN, digest(folder))
        assert model_facts(node.borrower.for_planning(RUN, JOB, timeout_s=TIMEOUT_S).model.path, JOB) == facts
        got = Path(node.borrower.for_run(RUN, JOB, PLAN, timeout_s=TIMEOUT_S).model.path)
        assert tensors_in(got).items() <= contents_of(folder).items()
        node.borrower.trust(RUN, "")
        with pytest.raises(ModelError, match="the coordinator named no model to fetch"):
            node.borrower.for_planning(RUN, JOB, timeout_s=TIMEOUT_S)
        node.borrower.trust(RUN, "0" * 64)
        with pytest.raises(ModelError, match="the model here is not the one that was asked for"):
            node.borrower.for_planning(RUN, JOB, timeout_s=TIMEOUT_S)
    offers = Offers()
    offers.put(RUN, folder)
    for sha256 in ("", digest(evil)):
        with pytest.raises(TrustError, match="from the coordinator"):
            offers.manifest(weights_pb2.ManifestRequest(run_id=RUN, sha256=sha256), is_node=True)


def test_weights_source_that_is_damaged_or_runs_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated shard: which file, at which node. Keys that run code, also if the source itself does not look."""
    folder = write_bert(tmp_path / "damaged", num_files=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with serving(folder) as server, pytest.raises((ModelError, IntegrityError), match=shard.name):
        Node(tmp_path / "cache", server.port).outline()
    folder = write_bert(tmp_path / "code")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    monkeypatch.setattr("ringtune.models.weights_by_digest.read_config", lambda path: {})
    with serving(folder) as server, pytest.raises(ModelError, match="auto_map"):
        Node(tmp_path / "cache", server.port).outline()


def test_initial_values_are_fetched_by_digest(tmp_path: Path) -> None:
    """From the coordinator, whose model folder is not needed; the file goes with the context; another is refused."""
    content, job = Pieces.of(bytes(range(256)) * 1000), Job(model=Model(path=str(tmp_path / "none")))
    offers = Offers()
    offers.put(RUN, None, content)
    with serving(None, offers=offers) as server, tapped(server.port) as tap:
        tap.cut_at_bytes = 100_000  # the fetch continues where it was cut off
        fetcher = ModelFetcher(AgentOptions(name="pi", coordinator=f"127.0.0.1:{tap.port}", cache=tmp_path), list)
        with fetcher.with_initial(RUN, job, content.sha256(), timeout_s=TIMEOUT_S) as own:
            file = Path(own.adapter.from_)
            assert file.read_bytes() == bytes(content)
        assert not file.exists() and len(tap.flows) > 1
        with fetcher.with_initial(RUN, job, "", timeout_s=TIMEOUT_S) as own:
            assert own is job
        with (
            pytest.raises(ModelError, match=r"file of initial values \(adapter\.from\) can't be fetched"),
            fetcher.with_initial(RUN, job, "0" * 64, timeout_s=TIMEOUT_S),
        ):
            pass


def test_weights_folder_that_the_user_named_is_not_replaced(tmp_path: Path) -> None:
    """A wrong ``--model`` is an error of its own, not a reason to fetch."""
    node = Node(tmp_path / "cache", 9, model=tmp_path / "typo")
    assert node.outline() == Path(JOB.model.path)
