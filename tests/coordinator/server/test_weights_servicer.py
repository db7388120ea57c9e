"""The coordinator as a source of weights: what it serves, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from coordinator.server.coordinator import model_folder
from coordinator.server.server import CoordinatorServer
from ringtune.job.job import Job, Model
from ringtune.models.weights_by_digest import ModelSource, manifest_from_proto
from ringtune.v1 import weights_pb2, weights_pb2_grpc
from tests.support.model_folder import write_model

RUN = "r20260101-000000-00000000"
TIMEOUT_S = 30.0


@pytest.fixture
def server() -> Iterator[CoordinatorServer]:
    """A coordinator that listens."""
    with CoordinatorServer("127.0.0.1:0", lease_s=5.0) as made:
        yield made


def test_weights_coordinator_serves_the_model_of_its_run(server: CoordinatorServer, tmp_path: Path) -> None:
    """The bytes of the folder, by digest, under the id of the run."""
    folder = write_model(tmp_path / "m")
    server.coordinator.offers.put(RUN, model_folder(Job(model=Model(path=str(folder)))))
    with grpc.insecure_channel(server.address) as channel:
        stub = weights_pb2_grpc.WeightsStub(channel)
        reply = stub.Manifest(weights_pb2.ManifestRequest(run_id=RUN), timeout=TIMEOUT_S)
        manifest = manifest_from_proto(reply)
        assert manifest == ModelSource(folder).manifest
        pieces = [weights_pb2.Piece(sha256=bytes.fromhex(manifest.files[0].sha256), offset=3)]
        chunks = stub.Fetch(weights_pb2.FetchRequest(run_id=RUN, pieces=pieces), timeout=TIMEOUT_S)
        assert b"".join(chunk.data for chunk in chunks) == (folder / "config.json").read_bytes()[3:]


def test_weights_coordinator_refuses_what_it_does_not_have(server: CoordinatorServer, tmp_path: Path) -> None:
    """An unknown run, a run whose model is elsewhere, and a digest that is not the model's: each its own status."""
    request = weights_pb2.ManifestRequest(run_id=RUN)
    with grpc.insecure_channel(server.address) as channel:
        stub = weights_pb2_grpc.WeightsStub(channel)
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Manifest(request, timeout=TIMEOUT_S)
        server.coordinator.offers.put(RUN, model_folder(Job(model=Model(path=str(tmp_path / "nowhere")))))
        with pytest.raises(grpc.RpcError) as elsewhere:
            stub.Manifest(request, timeout=TIMEOUT_S)
        server.coordinator.offers.put(RUN, write_model(tmp_path / "m"))
        fetch = weights_pb2.FetchRequest(run_id=RUN, pieces=[weights_pb2.Piece(sha256=bytes(32))])
        with pytest.raises(grpc.RpcError) as foreign:
            list(stub.Fetch(fetch, timeout=TIMEOUT_S))
    assert [caught.value.code() for caught in (unknown, elsewhere, foreign)] == [
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DATA_LOSS,
    ]
