"""What an executor hands over, saves and hands in: whole, finite, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edge.agent.torch_backend import copy_into_file
from ringtune.errors import DivergedError, IntegrityError
from ringtune.storage.pieces import Pieces
from tests.support import hand_ring as ring
from tests.support import tiny

TWO = {"b": (0, 2), "c": (2, 4)}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for all tests of this file."""
    return tiny.write_model(tmp_path_factory.mktemp("model"))


def test_executor_refuses_a_damaged_head(model_folder: Path, tmp_path: Path) -> None:
    """A head that is cut, renamed or not finite never replaces the own one."""
    from safetensors.torch import load, save

    job = ring.make_job(model_folder, train__max_steps=1)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    owner = ring.HandRing(plan, job, model_folder, datasets).train().nodes["a"]
    blob = bytes(owner.head_blob())
    tensors = load(blob)
    name = next(key for key in tensors if key.startswith("param/"))
    damaged = [
        blob[:-3],
        save({**tensors, "param/more": torch.zeros(2)}),
        save({**tensors, name: tensors[name].to(torch.float32)}),
        save({**tensors, "state/other/exp_avg": torch.zeros(2)}),
    ]
    for data in damaged:
        with pytest.raises(IntegrityError, match="handed over"):
            owner.load_head_blob(Pieces.of(data))
    not_finite = save({**tensors, name: torch.full_like(tensors[name], torch.nan)})
    with pytest.raises(DivergedError, match="handed over"):
        owner.load_head_blob(Pieces.of(not_finite))
    assert bytes(owner.head_blob()) == blob


def test_executor_says_at_which_step_training_diverged(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learning rate that is far too high is named as what to change, with the step and the owner of its batch."""
    monkeypatch.setattr("edge.runtime.executor.learning_rate", lambda *_: 1e200)  # more than a job may say
    job = ring.make_job(model_folder, train__optimizer="sgd")
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    hand = ring.HandRing(plan, job, model_folder, datasets)
    with pytest.raises(DivergedError, match=r"at step [2-9], a batch of owner a: the loss is .*; lower train.learning"):
        hand.train()


def test_executor_hands_in_no_weights_that_are_not_finite(model_folder: Path, tmp_path: Path) -> None:
    """The last update may be the one that diverges, with no loss after it."""
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    executor = ring.HandRing(plan, job, model_folder, datasets).nodes[plan.placement.hosts[0].node]
    next(iter(executor.part.trained.values())).data[0] = torch.inf
    with pytest.raises(DivergedError, match=r"after the last step; lower train\.learning_rate"):
        executor.adapter_files(with_head=False)


def test_executor_hands_in_no_head_that_is_not_finite(model_folder: Path, tmp_path: Path) -> None:
    """The last U[head] may overflow where the adapters don't; whoever has no head to hand in is not asked about it."""
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    executor = ring.HandRing(plan, job, model_folder, datasets).nodes["a"]
    list(executor._owner(None)[0].head.parameters())[-1].data[0] = torch.inf
    with pytest.raises(DivergedError, match=r"head\..* is not finite after the last step; lower train\.learning_rate"):
        executor.adapter_files(with_head=True)
    executor.adapter_files(with_head=False)


def test_executor_tells_a_head_on_the_disk_from_one_that_was_handed_over(model_folder: Path, tmp_path: Path) -> None:
    """A shard whose head is not finite is refused as such: nobody handed this head over."""
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    owner = ring.HandRing(ring.make_plan(job, datasets, TWO), job, model_folder, datasets).nodes["a"]
    bias = list(owner._owner(None)[0].head.parameters())[-1].data
    bias.fill_(0.123456789)
    shard = bytes(owner.shard({"node": "a"}, with_head=True))
    damaged = shard.replace(bias.cpu().numpy().tobytes(), torch.full_like(bias, torch.inf).cpu().numpy().tobytes())
    assert damaged != shard
    with pytest.raises(DivergedError, match=r"the head in the shard has param/.* not finite"):
        owner.load_shard(Pieces.of(damaged), {"node": "a"}, with_head=True)


def test_executor_saves_no_weights_that_are_not_finite(model_folder: Path, tmp_path: Path) -> None:
    """The last update before a checkpoint may be the one that overflows; the checkpoint before it stays the newest."""
    job = ring.make_job(model_folder, train__max_steps=1)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("b",))
    hand = ring.HandRing(ring.make_plan(job, datasets, TWO), job, model_folder, datasets).train()
    owner = hand.nodes["b"]
    own, head = owner.part.trained.values(), owner._owner(None)[0].head.parameters()
    for part, weights in (("the part of this node", own), ("the head", head)):
        last = list(weights)[-1].data
        good = last.clone()
        owner.shard({"node": "b"}, with_head=True)
        last[0] = torch.nan
        with pytest.raises(DivergedError, match=rf"diverged: {part} has .*, which is not finite; lower train"):
            owner.shard({"node": "b"}, with_head=True)
        last.copy_(good)


def test_executor_keeps_no_turn_that_is_not_finite(model_folder: Path, tmp_path: Path) -> None:
    """Moments may overflow where weights are finite; nobody ever goes back to such a turn."""
    job = ring.make_job(model_folder, train__optimizer="adamw", train__max_steps=1)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    host = ring.HandRing(ring.make_plan(job, datasets, TWO), job, model_folder, datasets).train().nodes["c"]
    copy_into_file(host, (2, 3), {})
    moments = next(iter(host._hosted.optimizers._optimizers[3].state.values()))
    moments["exp_avg_sq"].view(-1)[0] = torch.inf
    with pytest.raises(DivergedError, match="exp_avg_sq is not finite at the turn's end"):
        copy_into_file(host, (2, 3), {})


def test_executor_head_blob_is_a_fixed_point(model_folder: Path, tmp_path: Path) -> None:
    """Loading a blob gives the same blob again, moments and step counts included."""
    job = ring.make_job(model_folder, train__max_steps=3, train__local_iterations=1)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a", "b"))
    plan = ring.make_plan(job, datasets, TWO)
    hand = ring.HandRing(plan, job, model_folder, datasets).train()
    blob = bytes(hand.nodes[hand.holder].head_blob())
    other = next(name for name in datasets if name != hand.holder)
    assert bytes(hand.nodes[other].head_blob()) != blob
    hand.nodes[other].load_head_blob(Pieces.of(blob))
    assert bytes(hand.nodes[other].head_blob()) == blob
