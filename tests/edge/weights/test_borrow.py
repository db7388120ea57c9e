"""A node without a copy: it plans from an outline and runs from the tensors of its slice."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.agent_options import AgentOptions
from edge.compute.capturing.install import adapter_weights
from edge.compute.hosting import host
from edge.model.safetensors_files import SafetensorsFiles
from edge.weights.borrow import Borrower
from ringtune.costs.facts.model_facts import model_facts
from ringtune.errors import FrameError, IntegrityError, InterruptedRunError, ModelError
from ringtune.jobs.job import Job, Model
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.plan import Plan
from ringtune.v1 import weights_pb2
from ringtune.weights.source import ModelSource, Offers
from tests.support.plans import make_plan
from tests.support.weights_parts import RUN, TIMEOUT_S, serving, write_bert

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=2)
JOB = Job(model=Model(path="elsewhere/all-MiniLM-L6-v2")).with_overrides({"train.max_length": 16})


class Node:
    """A node with its own cache, and a source.

    Args:
        cache: its cache.
        port: where the coordinator serves weights; the nodes have none.
    """

    def __init__(self, cache: Path, port: int, *, name: str = "b", **options: Any) -> None:
        self.cache = cache
        self.found: list[str] = []
        settings = AgentOptions(coordinator=f"127.0.0.1:{port}", name=name, cache=cache, **options)
        self.borrower = Borrower(settings, lambda: self.found)
        self.offers = self.borrower.offers

    def outline(self, job: Job = JOB, *, run_id: str = RUN) -> Path:
        """The folder that it plans from."""
        return Path(self.borrower.for_planning(run_id, job, timeout_s=TIMEOUT_S).model.path)

    def folder(self, plan: Plan = PLAN, *, run_id: str = RUN) -> Path:
        """The folder that it runs from."""
        return Path(self.borrower.for_run(run_id, JOB, plan, timeout_s=TIMEOUT_S).model.path)


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


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("prefix", ["", "bert."])
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
    assert hosted.fitted().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in hosted.fitted().items())


def test_weights_owner_gets_embedding_private_blocks_and_tokenizer(tmp_path: Path) -> None:
    """What it needs beside its slice, and no pooler."""
    folder = write_bert(tmp_path / "m")
    plan = make_plan([("a", 1, 2), ("b", 2, 4)], ["b"], num_steps=2, private_blocks=1)
    with serving(folder) as server:
        node = Node(tmp_path / "cache", server.port, data=tmp_path / "rows.csv")
        assert (node.outline() / "tokenizer.json").exists()
        got = node.folder(plan)
    names = tensors_in(got)
    assert {name.split(".layer.")[-1][:2] for name in names} == {"em", "0.", "2.", "3."}
    assert (got / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (got / "notes.txt").exists()


def test_weights_second_run_fetches_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is in the cache is checked and used; another slice brings only what is new; damage only what is damaged."""
    caplog.set_level("INFO", logger="edge.weights.borrow")
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


def test_weights_equal_tensors_travel_once(tmp_path: Path) -> None:
    """Zero biases of one shape are one content."""
    folder = write_bert(tmp_path / "m")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    source = ModelSource(folder)
    biases = [entry for entry in source.manifest.tensors if entry.name.endswith(".bias") and entry.shape == (8,)]
    for entry in biases:
        at = data.index(b"".join(piece for _, piece in source.read([(entry.sha256, 0)])))
        data[at : at + entry.nbytes] = bytes(entry.nbytes)
    path.write_bytes(data)
    with serving(folder) as server:
        got = Node(tmp_path / "cache", server.port).folder()
    names = tensors_in(got)
    assert len(names) == 32
    assert sum(content == bytes(32) for content in names.values()) == 14


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


def test_weights_folder_that_the_user_named_is_not_replaced(tmp_path: Path) -> None:
    """A wrong ``--model`` is an error of its own, not a reason to fetch."""
    node = Node(tmp_path / "cache", 9, model=tmp_path / "typo")
    assert node.outline() == Path(JOB.model.path)


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


def test_weights_config_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the source itself does not look."""
    folder = write_bert(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    monkeypatch.setattr("ringtune.weights.source.read_config", lambda path: {})
    with serving(folder) as server, pytest.raises(ModelError, match="auto_map"):
        Node(tmp_path / "cache", server.port).outline()


def test_weights_release_ends_the_fetching(tmp_path: Path) -> None:
    """From another thread, once the source was asked."""
    asked = threading.Event()

    class Asked(Offers):
        def manifest(self, request: weights_pb2.ManifestRequest) -> weights_pb2.ManifestReply:
            asked.set()
            return super().manifest(request)

    offers = Asked()
    with serving(None, offers=offers) as server:
        node = Node(tmp_path / "cache", server.port)
        raised: list[BaseException] = []

        def work() -> None:
            try:
                node.outline()
            except BaseException as error:
                raised.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        assert asked.wait(30.0)
        node.borrower.release("")
        worker.join(30.0)
    assert [type(error) for error in raised] == [InterruptedRunError]


def test_weights_damaged_source_is_named(tmp_path: Path) -> None:
    """A truncated shard: which file, at which node."""
    folder = write_bert(tmp_path / "m", num_files=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with serving(folder) as server, pytest.raises((ModelError, IntegrityError), match=shard.name):
        Node(tmp_path / "cache", server.port).outline()
