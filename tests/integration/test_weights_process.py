"""Nodes without a copy of the model, as real processes: they fetch their slice, and go on after SIGKILL."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.weights.weight_cache import PARTIAL
from ringtune.models.folder import read_config
from ringtune.models.weights_by_digest import ModelSource, TensorEntry, needed_tensors
from ringtune.v1 import weights_pb2
from tests.support import tiny
from tests.support.cluster import RUN_S, Cluster, Outcome
from tests.support.results import largest_difference, reference_of, trained
from tests.support.tap import Connection, Tap

pytestmark = pytest.mark.slow

ELSEWHERE = "somewhere/else/tiny-bert"
NO_LEASE_S = RUN_S  # no test of leases: however late a busy machine lets heartbeats come, the run's deadline decides
MIDDLE_BYTES = 1600000
RING = (("node-0", 0, 2), ("node-1", 2, 3), ("node-2", 3, 4))


@contextlib.contextmanager
def one_copy(folder: Path, *, hidden_size: int = 32) -> Iterator[tuple[Cluster, Tap]]:
    """Three nodes of which one has the model, behind a tap; the job's path is nowhere."""
    model = str(folder / "model")
    more = {name: ["--cache", str(folder / f"cache-{name}")] for name in ("node-1", "node-2")}
    cluster = Cluster(
        folder, owners=["node-0", "node-1"], hosts=["node-2"], more={**more, "node-0": ["--model", model]}
    )
    if hidden_size != 32:
        tiny.write_model(cluster.model, num_blocks=4, hidden_size=hidden_size)
    tap = Tap(cluster.ports["node-0"])
    cluster.advertised["node-0"] = tap.port
    try:
        with cluster.listening():
            yield cluster, tap
    finally:
        tap.close()


def needed_by(cluster: Cluster, outcome: Outcome, node: str) -> tuple[TensorEntry, ...]:
    """What a node has to fetch for the plan of a run."""
    assert outcome.plan is not None
    piece = outcome.plan.slice_of(node)
    return needed_tensors(
        ModelSource(cluster.model).manifest,
        read_config(cluster.model),
        blocks=range(piece.start, piece.stop),
        is_owner=outcome.plan.owner(node) is not None,
        with_decoder=False,
    )


def cached(cluster: Cluster, node: str) -> list[Path]:
    """The tensors in the cache of a node."""
    return sorted((cluster.folder / f"cache-{node}").glob("models/*/weights/tiny-bert/*.safetensors"))


def weight_flows(tap: Tap, *, since: int = 0) -> list[Connection]:
    """Connections over which weights were fetched, without the first ``since`` ones of the tap."""
    return [flow for flow in tap.flows[since:] if b"/ringtune.v1.Weights/" in flow.sent]


def test_weights_of_one_copy_train_a_ring(tmp_path: Path) -> None:
    """An owner and a host without a copy: the result is that of one process; the second run fetches nothing."""
    with one_copy(tmp_path) as (cluster, tap):
        job = cluster.job(model__path=ELSEWHERE, runtime__lease_s=NO_LEASE_S)
        plan = cluster.plan_on(job, RING)
        outcome = cluster.run(job, plan=plan)
        local = job.with_overrides({"model.path": str(cluster.model)})
        wanted = reference_of(cluster, local, outcome)
        assert largest_difference(trained(outcome), {**wanted.adapter(), **wanted.head()}) < 1e-9
        for node in ("node-1", "node-2"):
            assert len(cached(cluster, node)) == len(needed_by(cluster, outcome, node))
        assert not list(cluster.folder.glob("cache-node-2/**/vocab.txt")), "a host has no use for a tokenizer"
        before = sum(len(flow.received) for flow in weight_flows(tap))
        assert before > sum(
            entry.nbytes for node in ("node-1", "node-2") for entry in needed_by(cluster, outcome, node)
        )
        cluster.run(job, plan=plan)
        manifests = sum(len(flow.received) for flow in weight_flows(tap)) - before
        assert manifests < 3 * 70_000, "manifests only"


@pytest.mark.thorough
def test_weights_fetch_killed_goes_on_in_the_next_run(tmp_path: Path) -> None:
    """SIGKILL in the middle of a tensor; the restarted node asks for the rest only."""
    with one_copy(tmp_path, hidden_size=256) as (cluster, tap):
        tap.hold_at_bytes = MIDDLE_BYTES
        job = cluster.job(
            model__path=ELSEWHERE, model__dtype="float32", wire__dtype="float32", runtime__lease_s=NO_LEASE_S
        )
        plan = cluster.plan_on(job, RING)
        follower = cluster.follow(job, plan=plan)
        cache = cluster.folder / "cache-node-2"
        deadline_s = time.monotonic() + RUN_S
        while not any(path.stat().st_size > 70_000 for path in existing(cache.glob(f"**/weights/*/*{PARTIAL}"))):
            assert time.monotonic() < deadline_s
            assert not follower.outcome.is_done, "the run ended while the weights were held"
            time.sleep(0.001)
        cluster.signal("node-2", signal.SIGKILL)
        cluster.wait_exit("node-2")
        tap.hold_at_bytes = 0
        tap.passes.set()
        cluster.end_lease("node-2")
        failed = follower.wait()
        assert failed.error == "PeerLostError", failed.message
        came_bytes = [content_bytes(path) for path in cache.glob(f"**/weights/*/*{PARTIAL}")]
        assert max(came_bytes) > 0
        num_flows = len(tap.flows)
        cluster.start("node-2")
        cluster.wait_idle("node-0", "node-1", "node-2")
        outcome = cluster.run(job, plan=plan)
        needed = needed_by(cluster, outcome, "node-2")
        assert len(cached(cluster, "node-2")) >= len(needed)
        asked = b"".join(flow.sent for flow in weight_flows(tap, since=num_flows))
        for offset in filter(None, came_bytes):
            rests = [weights_pb2.Piece(sha256=bytes.fromhex(entry.sha256), offset=offset) for entry in needed]
            assert any(piece.SerializeToString() in asked for piece in rests), f"nothing was asked for from {offset} on"


def content_bytes(partial: Path) -> int:
    """Bytes of a tensor that its partial file has, after the header of its own."""
    content = partial.read_bytes()
    return max(0, len(content) - 8 - int.from_bytes(content[:8], "little"))


def existing(paths: Iterator[Path]) -> list[Path]:
    """Those that are still there: a partial file gets its name at any moment."""
    return [path for path in paths if path.exists()]
