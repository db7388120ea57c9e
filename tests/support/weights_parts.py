"""Sources of weights for tests: model folders by bytes, and a real gRPC server in front of one."""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from edge.weights.weight_fetch import PendingFetch
from ringtune.errors import RingTuneError
from ringtune.models.folder import read_headers
from ringtune.models.weights_by_digest import Offers, manifest_from_proto
from ringtune.transport.channels import Server, open_channel
from ringtune.transport.weights_servicer import WeightsServicer
from ringtune.v1 import weights_pb2, weights_pb2_grpc
from tests.support.model_folder import bert_shapes, with_header

RUN = "r20260101-000000-00000000"
TINY = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 1000,
}
TIMEOUT_S = 60.0


def random_safetensors(shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0) -> bytes:
    """A valid float32 file whose tensors all differ."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    finite = bytes(byte & 0xBF for byte in range(256))  # no exponent is all ones, in any type of numbers
    return with_header(header, random.Random(seed).randbytes(at).translate(finite))


def write_bert(
    folder: Path, *, sizes: Mapping[str, int] | None = None, prefix: str = "", num_files: int = 1, seed: int = 0
) -> Path:
    """A BERT folder with config, a file of a tokenizer, and random weights in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "bert", "max_position_embeddings": 32, **(sizes or TINY)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "notes.txt").write_text("not part of the model")
    named = bert_shapes(prefix=prefix, config=sizes or TINY)
    if num_files == 1:
        (folder / "model.safetensors").write_bytes(random_safetensors(named, seed=seed))
        return folder
    names = list(named)
    weight_map: dict[str, str] = {}
    for index in range(num_files):
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        part = names[index::num_files]
        (folder / file).write_bytes(random_safetensors({name: named[name] for name in part}, seed=seed + index))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def poisoned(folder: Path) -> Path:
    """The model with one other bit in each tensor of the blocks."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    for name, stored in read_headers(folder).items():
        if ".layer." in name:
            data[stored.info.offset] ^= 1
    path.write_bytes(data)
    return folder


@contextlib.contextmanager
def serving(folder: Path | None, *, offers: Offers | None = None) -> Iterator[Server]:
    """A real server on loopback that offers a folder to a run."""
    if offers is None:
        offers = Offers()
        offers.put(RUN, folder)
    servicer = WeightsServicer(offers)
    server = Server(
        "127.0.0.1:0", lambda grpc_server: weights_pb2_grpc.add_WeightsServicer_to_server(servicer, grpc_server)
    )
    try:
        yield server
    finally:
        server.stop(0.1)


def digest_at(*addresses: str, run_id: str = RUN) -> str:
    """The digest of the model that the first of these sources has, as the coordinator learns it; zeros of none."""
    for address in addresses:
        with open_channel(address) as channel, contextlib.suppress(grpc.RpcError, RingTuneError):
            request = weights_pb2.ManifestRequest(run_id=run_id)
            reply = weights_pb2_grpc.WeightsStub(channel).Manifest(request, timeout=TIMEOUT_S)
            return manifest_from_proto(reply).sha256
    return "0" * 64


def wanted(*, timeout_s: float = TIMEOUT_S, idle_s: float = 30.0, stop: threading.Event | None = None) -> PendingFetch:
    """A fetch that is waited for."""
    return PendingFetch(
        run_id=RUN, deadline_s=time.monotonic() + timeout_s, stop=stop or threading.Event(), idle_s=idle_s
    )


def wait_until(predicate: Callable[[], bool]) -> None:
    """Wait for something that is about to happen."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not predicate():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)
