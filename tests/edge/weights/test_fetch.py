"""Fetching weights over real gRPC streams: what comes, what it costs, and what a break or a liar does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge.weights import fetch
from edge.weights.fetch import Sources
from edge.weights.files import CheckedFile
from edge.weights.retrying import Wanted, Watch
from edge.weights.store import ModelCache
from ringtune.errors import (
    ConnectionFailedError,
    DeadlineError,
    IntegrityError,
    InterruptedRunError,
    ModelError,
)
from ringtune.models.folder import read_config
from ringtune.rpc.connections import Server
from ringtune.v1 import weights_pb2, weights_pb2_grpc
from ringtune.weights.codec import manifest_to_proto
from ringtune.weights.manifest import CHUNK_BYTES, ModelManifest, TensorEntry, needed_tensors
from ringtune.weights.source import ModelSource, Offers
from tests.support.tap import Tap
from tests.support.weights_parts import MINILM, RUN, serving, wait_until, wanted, write_bert

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
def tapped(port: int, *, delay_s: float = 0.0) -> Iterator[Tap]:
    """A tap in front of a port."""
    tap = Tap(port, delay_s=delay_s)
    try:
        yield tap
    finally:
        tap.close()


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sizes of MiniLM (all but its token table)."""
    return write_bert(tmp_path_factory.mktemp("minilm") / "model", sizes=MINILM, num_files=2)


def test_weights_fetch_of_a_slice_costs_its_bytes(minilm: Path, tmp_path: Path) -> None:
    """Two of six blocks with an empty cache: everything on the wire is at most 1.02 of the tensors."""
    with serving(minilm) as server, tapped(server.port) as tap:
        with Sources([f"127.0.0.1:{tap.port}"]) as sources:
            manifest = sources.manifest(wanted())
            tensors = slice_of(minilm, manifest, 2, 3)
            came = sources.fetch(missing_in(ModelCache(tmp_path, manifest, "m"), tensors), wanted())
        on_wire = sum(flow.num_bytes for flow in tap.flows)
    needed = sum(tensor.nbytes for tensor in tensors)
    assert came == needed == 2 * 4 * 1_774_464
    assert needed < on_wire <= LIMIT * needed, on_wire / needed


def test_weights_fetch_goes_on_after_a_broken_connection(minilm: Path, tmp_path: Path) -> None:
    """One fetch, its connection cut in the middle: it takes the stream up by itself, and hardly pays for it."""
    with serving(minilm) as server, tapped(server.port) as tap:
        with Sources([f"127.0.0.1:{tap.port}"]) as sources:
            manifest = sources.manifest(wanted())
            tensors = slice_of(minilm, manifest, 2, 3)
            tap.cut_at_bytes = 8_000_000
            came = sources.fetch(missing_in(ModelCache(tmp_path, manifest, "m"), tensors), wanted())
        on_wire = sum(flow.num_bytes for flow in tap.flows)
    needed = sum(tensor.nbytes for tensor in tensors)
    assert len(tap.flows) == 2
    assert came == needed
    assert on_wire <= LIMIT * needed, on_wire / needed


def test_weights_fetch_restarted_goes_on_where_it_stopped(minilm: Path, tmp_path: Path) -> None:
    """Given up in the middle of a large tensor; what comes next is the rest, to the byte."""
    with serving(minilm) as server, tapped(server.port, delay_s=0.01) as tap:
        with Sources([f"127.0.0.1:{tap.port}"]) as sources:
            manifest = sources.manifest(wanted())
            tensors = slice_of(minilm, manifest, 2, 3)
            files = missing_in(ModelCache(tmp_path, manifest, "m"), tensors)
            stop = threading.Event()
            is_far = stop_when(stop, lambda: sum(file.offset for file in files) > 5_000_000)
            with is_far, pytest.raises(InterruptedRunError):
                sources.fetch(files, wanted(stop=stop))
        kept = sum(file.offset for file in files)
        with Sources([f"127.0.0.1:{tap.port}"]) as sources:
            again = missing_in(ModelCache(tmp_path, sources.manifest(wanted()), "m"), tensors)
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
        self.asked = 0
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
        for index, _ in enumerate(request.pieces):
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
def test_weights_fetch_never_uses_what_has_another_digest(
    lie: Callable[[int], weights_pb2.FetchChunk], tmp_path: Path
) -> None:
    """A source that sends something else is left, and the next one makes good; alone it is named and nothing stays."""
    folder = write_bert(tmp_path / "m")
    with lying(folder, lie) as (liar, address):
        with Sources([address]) as sources:
            manifest = sources.manifest(wanted())
            tensors = slice_of(folder, manifest, 1)
            cache = ModelCache(tmp_path / "alone", manifest, "m")
            with pytest.raises(IntegrityError, match=address):
                sources.fetch(missing_in(cache, tensors), wanted())
            assert liar.asked == 1
            assert not list(cache.weights.glob("*.safetensors"))
        with serving(folder) as server, Sources([address, f"127.0.0.1:{server.port}"]) as sources:
            assert sources.manifest(wanted()) == manifest
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
        manifest = sources.manifest(wanted())
        cache = ModelCache(tmp_path / "cache", manifest, "m")
        tensors = slice_of(folder, manifest, 0)

        def watch(call: Any, who: Wanted, *, idle_s: float) -> Watch:
            wait_until(lambda: liar.asked > 0)  # however long the machine takes to serve the first call
            return Watch(call, who, idle_s=next(idle_times, idle_s))

        monkeypatch.setattr(fetch, "Watch", watch)
        came = sources.fetch(missing_in(cache, tensors), wanted(timeout_s=3600.0, idle_s=3600.0))
    assert came == sum(tensor.nbytes for tensor in tensors)
    assert liar.asked == 1


def test_weights_fetch_stops_within_a_moment(tmp_path: Path) -> None:
    """A released run does not wait for a hanging source."""
    folder = write_bert(tmp_path / "m")
    stop = threading.Event()
    with lying(folder, lambda index: None) as (liar, address), Sources([address]) as sources:
        manifest = sources.manifest(wanted())
        files = missing_in(ModelCache(tmp_path / "cache", manifest, "m"), slice_of(folder, manifest, 0))
        with stop_when(stop, lambda: liar.asked > 0), pytest.raises(InterruptedRunError):
            sources.fetch(files, wanted(timeout_s=3600.0, idle_s=3600.0, stop=stop))


@pytest.mark.promise("6 every wait ends")
def test_weights_fetch_ends_at_its_deadline(tmp_path: Path) -> None:
    """And says that what came is kept."""
    folder = write_bert(tmp_path / "m")
    with lying(folder, lambda index: None) as (_, address), Sources([address]) as sources:
        manifest = sources.manifest(wanted())
        files = missing_in(ModelCache(tmp_path / "cache", manifest, "m"), slice_of(folder, manifest, 0))
        with pytest.raises(DeadlineError, match="kept"):
            sources.fetch(files, wanted(timeout_s=0.3))


def test_weights_fetch_ends_when_every_source_is_gone(tmp_path: Path) -> None:
    """After a few tries, with what to do."""
    folder = write_bert(tmp_path / "m")
    with serving(folder) as server, Sources([f"127.0.0.1:{server.port}"]) as sources:
        manifest = sources.manifest(wanted())
    files = missing_in(ModelCache(tmp_path / "cache", manifest, "m"), slice_of(folder, manifest, 0))
    with Sources([f"127.0.0.1:{server.port}"]) as sources, pytest.raises(ConnectionFailedError, match="again"):
        sources.fetch(files, wanted())


def test_weights_manifest_is_waited_for_while_a_run_is_not_known_yet(tmp_path: Path) -> None:
    """Nodes are asked to inspect at about the same time; whoever is first asks again."""
    folder = write_bert(tmp_path / "m")
    offers = Offers()
    with serving(None, offers=offers) as server, Sources([f"127.0.0.1:{server.port}"]) as sources:
        timer = threading.Timer(0.5, lambda: offers.put(RUN, folder))
        timer.start()
        assert sources.manifest(wanted()) == ModelSource(folder).manifest
        timer.join()
        offers.drop(RUN)
        with pytest.raises(DeadlineError):
            sources.manifest(wanted(timeout_s=0.5))


def test_weights_manifest_nobody_has_says_who_was_asked(tmp_path: Path) -> None:
    """A node without a copy, one with a damaged copy, and one that is not there."""
    damaged = write_bert(tmp_path / "m")
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with serving(None) as without, serving(damaged) as broken:
        addresses = [f"127.0.0.1:{server.port}" for server in (without, broken)]
        with Sources([*addresses, "127.0.0.1:9"]) as sources, pytest.raises(ModelError) as caught:
            sources.manifest(wanted())
    for part in (*addresses, "no copy", "model.safetensors", "127.0.0.1:9"):
        assert part in str(caught.value)


def test_weights_fetch_waits_for_a_busy_source(minilm: Path, tmp_path: Path) -> None:
    """A source serves so many streams at a time; the others come later, however long that takes."""
    offers = Offers(max_streams=1)
    offers.put(RUN, minilm)
    with serving(None, offers=offers) as server, Sources([f"127.0.0.1:{server.port}"]) as sources:
        manifest = sources.manifest(wanted())
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            pieces = [weights_pb2.Piece(sha256=bytes.fromhex(tensor.sha256)) for tensor in manifest.tensors]
            call = weights_pb2_grpc.WeightsStub(channel).Fetch(weights_pb2.FetchRequest(run_id=RUN, pieces=pieces))
            next(call)  # nobody reads on, so it holds its place
            threading.Timer(1.0, call.cancel).start()
            files = missing_in(ModelCache(tmp_path, manifest, "m"), slice_of(minilm, manifest, 0))
            assert sources.fetch(files, wanted()) == sum(file.nbytes for file in files)


def test_weights_fetch_asks_for_equal_digests_of_the_source(tmp_path: Path) -> None:
    """What a source has under another manifest is not taken for ours."""
    mine, other = write_bert(tmp_path / "a"), write_bert(tmp_path / "b", seed=1)
    manifest = ModelSource(mine).manifest
    tensors = slice_of(mine, manifest, 0)
    with serving(other) as server, Sources([f"127.0.0.1:{server.port}"]) as sources:
        cache = ModelCache(tmp_path / "cache", manifest, "m")
        with pytest.raises(ConnectionFailedError, match="another one"):
            sources.fetch(missing_in(cache, tensors), wanted())
    assert not list(cache.weights.glob("*.safetensors"))
