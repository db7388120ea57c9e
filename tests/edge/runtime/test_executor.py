"""Executors of a ring: frozen slices hold nothing, graphs are freed, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edge.runtime import executor as executor_module
from edge.runtime.executor import NodeExecutor
from ringtune.errors import DataError, ModelError, PlanError
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.turns import StepKind, Turn, items, turn_sequence
from ringtune.schedule.versions import trained
from tests.support import hand_ring as ring
from tests.support import tiny

TWO = {"b": (0, 2), "c": (2, 4)}
THREE = {"b": (0, 1), "c": (1, 3), "d": (3, 4)}
ALONE = {"a": (0, 4)}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for all tests of this file."""
    return tiny.write_model(tmp_path_factory.mktemp("model"))


def test_executor_ends_an_action_when_the_device_has_done_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that is only queued on a device would make launches of all actions: each waits for a made-up device."""
    order: list[str] = []
    monkeypatch.setattr(executor_module, "settle_of", lambda device: lambda: order.append(f"settled {device}"))

    def queue(*_: object) -> tuple[()]:
        order.append("queued")
        return ()

    monkeypatch.setattr(NodeExecutor, "_embed", queue)
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, ALONE)
    executor = NodeExecutor(plan, "a", job, model_folder, datasets["a"])
    executor.grant(next(iter(turn_sequence(plan.course))))
    executor.run(Action(Op.EMBED, 0, 0))
    assert order == ["queued", "settled cpu"]


def _forward_turn(hand: ring.HandRing, num_items: int, *, kind: StepKind = StepKind.TRAIN, step: int = 0) -> Turn:
    turn = Turn(
        index=0, kind=kind, owner="a", round=0, first_seq=0, num_items=num_items, first_step=step, first_batch=0
    )
    for node in hand.nodes.values():
        node.grant(turn)
    return turn


def _pass_frozen(hand: ring.HandRing, seq: int, micro: int) -> int:
    """Run node b's frozen blocks for one micro-batch up to sending; what b holds while it has the hidden state."""
    owner, host = hand.nodes["a"], hand.nodes["b"]
    owner.run(ring.action(Op.EMBED, seq, micro))
    hidden, mask = owner.take_tensor(TensorKey("h", seq, micro, 0))
    assert mask is not None
    host.put_tensor(TensorKey("h", seq, micro, 0), hidden, mask.clone())
    for block in range(2):
        host.run(ring.action(Op.FORWARD_FREE, seq, micro, block, block + 1))
    return host.live_bytes()


@pytest.mark.promise("3 frozen means free")
def test_executor_keeps_nothing_of_frozen_batches(model_folder: Path, tmp_path: Path) -> None:
    """A frozen slice holds one hidden state while it works and nothing afterwards, however many batches pass."""
    job = ring.make_job(model_folder, train__microbatches=2, train__local_iterations=6)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    hand = ring.HandRing(plan, job, model_folder, datasets)
    _forward_turn(hand, 6)
    host = hand.nodes["b"]
    for seq in range(6):
        for micro in range(2):
            held = _pass_frozen(hand, seq, micro)
            hidden, mask = host.take_tensor(TensorKey("h", seq, micro, 2))
            assert mask is not None
            assert not hidden.requires_grad
            assert hidden.grad_fn is None
            kernel_mask_bytes = hidden.shape[0] * hidden.shape[1] ** 2 * hidden.element_size()
            assert held <= hidden.nbytes + mask.nbytes + kernel_mask_bytes
            assert host.live_bytes() == 0


def test_executor_frees_a_graph_after_its_backward(model_folder: Path, tmp_path: Path) -> None:
    """A trainable slice holds a graph from forward to backward, and nothing after the item."""
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    hand = ring.HandRing(plan, job, model_folder, datasets)
    _forward_turn(hand, 1)
    _pass_frozen(hand, 0, 0)
    hidden, mask = hand.nodes["b"].take_tensor(TensorKey("h", 0, 0, 2))
    top = hand.nodes["c"]
    top.put_tensor(TensorKey("h", 0, 0, 2), hidden, mask)
    top.run(ring.action(Op.FORWARD_FREE, 0, 0, 2, 3))
    top.run(ring.action(Op.FORWARD, 0, 0, 3, 4))
    out, _ = top.take_tensor(TensorKey("h", 0, 0, 4))
    assert top.live_bytes() > 3 * out.nbytes
    top.put_tensor(TensorKey("g", 0, 0, 4), torch.ones_like(out), None)
    top.run(ring.action(Op.BACKWARD, 0, 0, 3, 4))
    assert top.live_bytes() == 0
    with pytest.raises(PlanError, match="nothing to send"):
        top.take_tensor(TensorKey("g", 0, 0, 2))


@pytest.mark.promise("3 frozen means free")
def test_executor_trains_only_what_the_schedule_unfroze(model_folder: Path, tmp_path: Path) -> None:
    """Gradients stop at the terminator, and adapters below it keep their initial values to the bit."""
    job = ring.make_job(model_folder, train__max_steps=6, unfreeze__every_steps=4)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, THREE)
    hand = ring.HandRing(plan, job, model_folder, datasets)
    before, after = hand.tensors(), hand.train().tensors()
    assert trained(plan.course, StepKind.TRAIN, 5).lowest == 2
    assert hand.gradients_sent == [("a", "d", 4)] * 4 + [("a", "d", 4), ("d", "c", 3)] * 2
    changed = [name for name, value in before.items() if ".layer." in name and not torch.equal(value, after[name])]
    assert {int(name.split(".layer.")[1].split(".")[0]) for name in changed} == {2, 3}


def test_executor_leaves_no_gradient_of_an_item_without_update(model_folder: Path, tmp_path: Path) -> None:
    """A score and a measure item between two steps change no bit."""
    job = ring.make_job(model_folder, train__max_steps=2, train__local_iterations=1, train__microbatches=2)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    plain = ring.HandRing(plan, job, model_folder, datasets).train().tensors()
    mixed = ring.HandRing(plan, job, model_folder, datasets)
    kinds = ((StepKind.TRAIN, 0), (StepKind.SCORE, 1), (StepKind.MEASURE, 1), (StepKind.TRAIN, 1))
    for index, (kind, step) in enumerate(kinds):
        turn = Turn(
            index=index,
            kind=kind,
            owner="a",
            round=0,
            first_seq=index,
            num_items=1,
            first_step=step,
            first_batch=step,
        )
        mixed.start_turn(turn)
        for item in items(plan.course, turn):
            mixed.run_item(item)
    found = mixed.tensors()
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)


def test_executor_refuses_what_has_no_input(model_folder: Path, tmp_path: Path) -> None:
    """Actions without a granted turn, an input, or a role are refused by name."""
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    hand = ring.HandRing(plan, job, model_folder, datasets)
    with pytest.raises(PlanError, match="no granted turn"):
        hand.nodes["b"].run(ring.action(Op.FORWARD_FREE, 0, 0, 0, 1))
    _forward_turn(hand, 1)
    with pytest.raises(PlanError, match="before its input"):
        hand.nodes["b"].run(ring.action(Op.FORWARD_FREE, 0, 0, 0, 1))
    with pytest.raises(PlanError, match="needs an owner"):
        hand.nodes["b"].run(ring.action(Op.EMBED, 0))
    with pytest.raises(PlanError, match="needs an owner"):
        hand.nodes["b"].head_blob()


def test_executor_needs_data_and_model_of_the_plan(model_folder: Path, tmp_path: Path) -> None:
    """An owner without rows, another number of rows, and another model are refused before anything runs."""
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    with pytest.raises(DataError, match="--data"):
        NodeExecutor(plan, "a", job, model_folder, None)
    fewer = ring.make_datasets(job, model_folder, tmp_path, ("a",), num_rows=30)
    with pytest.raises(DataError, match="30 training"):
        NodeExecutor(plan, "a", job, model_folder, fewer["a"])
    other = tiny.write_model(tmp_path / "other", num_blocks=5)
    with pytest.raises(ModelError, match="5 blocks"):
        NodeExecutor(plan, "b", job, other, None)
    long = ring.make_plan(ring.make_job(model_folder, train__max_length=65), datasets, TWO)
    with pytest.raises(ModelError, match="65"):
        NodeExecutor(long, "b", job, model_folder, None)
