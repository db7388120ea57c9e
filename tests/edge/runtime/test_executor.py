"""Executors of a ring: frozen slices hold nothing, graphs are freed, what is not finite is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from edge.agent.torch_backend import kept_file
from edge.model.tensor_files import pieces_of
from edge.runtime import executor as executor_module
from edge.runtime.executor import NodeExecutor
from edge.techniques.micro_batches import MicroBatch, MicroBatches
from ringtune.errors import DataError, DivergedError, FrameError, IntegrityError, ModelError, PlanError
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.stages import unit_grad_key
from ringtune.schedule.turns import StepKind, Turn, turn_sequence
from ringtune.schedule.units import EMBEDDING
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import write_tensors
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.torch_ring import Case, make_carrier, write_inputs

TWO = {"b": (0, 2), "c": (2, 4)}


@pytest.fixture(scope="module")
def hand(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ring.HandRing:
    """A ring that has not trained, with a granted turn of items of two micro-batches; each test has its own items."""
    made = ring.make_ring(
        model_folder, tmp_path_factory.mktemp("rows"), TWO, train__microbatches=2, train__local_iterations=5
    )
    made.start_turn(next(iter(turn_sequence(made.plan.course))))
    return made


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
def test_executor_keeps_nothing_of_frozen_batches(hand: ring.HandRing) -> None:
    """A frozen slice holds one hidden state while it works and nothing afterwards, however many batches pass."""
    host = hand.nodes["b"]
    before = host.live_bytes()  # of other tests
    for seq, micro in ((0, 0), (0, 1), (1, 0), (1, 1)):
        held = _pass_frozen(hand, seq, micro) - before
        hidden, mask = host.take_tensor(TensorKey("h", seq, micro, 2))
        assert mask is not None
        assert not hidden.requires_grad
        assert hidden.grad_fn is None
        kernel_mask_bytes = hidden.shape[0] * hidden.shape[1] ** 2 * hidden.element_size()
        assert held <= hidden.nbytes + mask.nbytes + kernel_mask_bytes
        assert host.live_bytes() == before


def test_executor_frees_a_graph_after_its_backward(hand: ring.HandRing) -> None:
    """A trainable slice holds a graph from forward to backward, and nothing after the item."""
    _pass_frozen(hand, 2, 0)
    hidden, mask = hand.nodes["b"].take_tensor(TensorKey("h", 2, 0, 2))
    top = hand.nodes["c"]
    before = top.live_bytes()
    top.put_tensor(TensorKey("h", 2, 0, 2), hidden, mask)
    top.run(ring.action(Op.FORWARD_FREE, 2, 0, 2, 3))
    top.run(ring.action(Op.FORWARD, 2, 0, 3, 4))
    out, _ = top.take_tensor(TensorKey("h", 2, 0, 4))
    assert top.live_bytes() - before > 3 * out.nbytes
    top.put_tensor(TensorKey("g", 2, 0, 4), torch.ones_like(out), None)
    top.run(ring.action(Op.BACKWARD, 2, 0, 3, 4))
    assert top.live_bytes() == before
    with pytest.raises(PlanError, match="nothing to send"):
        top.take_tensor(TensorKey("g", 2, 0, 2))


def test_executor_refuses_other_tokens_than_it_has_sent(hand: ring.HandRing) -> None:
    """A gradient, and a hidden state that enters the head, come back with the tokens of each row that were sent."""
    _pass_frozen(hand, 4, 0)
    hidden, mask = hand.nodes["b"].take_tensor(TensorKey("h", 4, 0, 2))
    short = hidden[:, :-1].contiguous()
    with pytest.raises(FrameError, match=f"tokens a row, and {hidden.shape[1]} were sent"):
        hand.nodes["b"].put_tensor(TensorKey("g", 4, 0, 2), short, None)
    with pytest.raises(FrameError, match=f"tokens a row, and {hidden.shape[1]} were sent"):
        hand.nodes["a"].put_tensor(TensorKey("h", 4, 0, 4), short, None)
    hand.nodes["c"].put_tensor(TensorKey("h", 4, 0, 2), short, None if mask is None else mask[:, :-1])
    hand.nodes["b"].put_tensor(TensorKey("g", 4, 0, 2), hidden, None)


def test_micro_batch_that_returns_to_the_blocks_of_a_node_has_the_tokens_that_it_sent(hand: ring.HandRing) -> None:
    """What the head reads is too little for them: their backward would fail at this node, as an error of its own."""
    course = dataclasses.replace(hand.plan.course, head_tokens=1)
    flows = MicroBatches(course, dtype=torch.float32, device=torch.device("cpu"))
    flows.begin(ring.action(Op.EMBED, 0), MicroBatch(hidden=torch.zeros(2, 5, 8)))
    flows.take(TensorKey("h", 0, 0, 0))
    for payload, boundary, tokens in (("h", 2, 5), ("h", course.head, 1), ("g", 2, 5), ("g", 2, 1)):
        flows.check_tokens(TensorKey(payload, 0, 0, boundary), torch.zeros(2, tokens, 8))
    with pytest.raises(FrameError, match=r"hidden state 0\.0 at block 2 has 1 tokens a row, and 5 were sent"):
        flows.check_tokens(TensorKey("h", 0, 0, 2), torch.zeros(2, 1, 8))


def test_owner_refuses_other_tokens_than_its_rows_have(hand: ring.HandRing) -> None:
    """It has sent none of a micro-batch that comes from the activation cache of a host."""
    owner, tokens = hand.nodes["a"], hand.plan.course.max_length
    for boundary, mask in ((4, None), (2, torch.ones(2, 3, dtype=torch.int64))):
        with pytest.raises(FrameError, match=f"has 3 tokens a row, and {tokens} were sent"):
            owner.put_tensor(TensorKey("h", 4, 1, boundary), torch.zeros(2, 3, 8), mask)


def test_executor_refuses_the_mask_of_packed_rows_for_a_text(
    hand: ring.HandRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may pack rows and write texts; blocks can't give one text the keys and values of several rows."""
    host, key = hand.nodes["b"], TensorKey("h", 4, 1, 0)
    entry = host._items[key.seq]
    monkeypatch.setattr(entry, "item", dataclasses.replace(entry.item, kind=StepKind.GENERATE))
    hidden, mask = torch.zeros(1, 3, 8), torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(FrameError, match="is of a text, and has the mask of packed rows"):
        host.put_tensor(key, hidden, 2 * mask)
    host.put_tensor(key, hidden, mask)


def test_executor_refuses_what_has_no_input(hand: ring.HandRing) -> None:
    """Actions without a granted turn, an input, or a role are refused by name."""
    host = hand.nodes["b"]
    for action, message in (
        (ring.action(Op.FORWARD_FREE, 99, 0, 0, 1), "no granted turn"),
        (ring.action(Op.FORWARD_FREE, 3, 0, 0, 1), "before its input"),
        (ring.action(Op.EMBED, 3), "needs an owner"),
    ):
        with pytest.raises(PlanError, match=message):
            host.run(action)
    with pytest.raises(PlanError, match="needs an owner"):
        host.head_blob()


def test_executor_ends_an_action_when_the_device_has_done_it(
    hand: ring.HandRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that is only queued on a device would make launches of all actions: each waits for a made-up device."""
    order: list[str] = []
    monkeypatch.setattr(executor_module, "settle_of", lambda device: lambda: order.append(f"settled {device}"))

    def queue(*_: object) -> tuple[()]:
        order.append("queued")
        return ()

    monkeypatch.setattr(NodeExecutor, "_embed", queue)
    executor = NodeExecutor(hand.plan, "a", hand.job, hand.model_folder, hand.datasets["a"])
    executor.grant(next(iter(turn_sequence(hand.plan.course))))
    executor.run(Action(Op.EMBED, 0, 0))
    assert order == ["queued", "settled cpu"]


def test_executor_needs_data_and_model_of_the_plan(model_folder: Path, hand: ring.HandRing, tmp_path: Path) -> None:
    """An owner without rows, another number of rows, and another model are refused before anything runs."""
    plan, job, datasets = hand.plan, hand.job, hand.datasets
    fewer = ring.make_datasets(job, model_folder, tmp_path, ("a",), num_rows=30)["a"]
    other = tiny.write_model(tmp_path / "other", num_blocks=5)
    long = ring.make_plan(ring.make_job(model_folder, train__max_length=65), datasets, TWO)
    for arguments, error, message in (
        ((plan, "a", job, model_folder, None), DataError, "--data"),
        ((plan, "a", job, model_folder, fewer), DataError, "30 training"),
        ((plan, "b", job, other, None), ModelError, "5 blocks"),
        ((long, "b", job, model_folder, None), ModelError, "65"),
    ):
        with pytest.raises(error, match=message):
            NodeExecutor(*arguments)


@pytest.fixture(scope="module")
def trained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ring.HandRing:
    """Three turns of one step of owners a, b and a; a test that changes a number puts it back."""
    steps = {"train__max_steps": 3, "train__local_iterations": 1}
    return ring.make_ring(model_folder, tmp_path_factory.mktemp("rows"), TWO, ("a", "b"), **steps).train()


@contextmanager
def spoiled(value: torch.Tensor, number: float = torch.inf) -> Iterator[None]:
    """One number of a tensor is another one meanwhile."""
    good = value.clone()
    value.view(-1)[0] = number
    yield
    value.copy_(good)


def head_of(owner: NodeExecutor) -> torch.Tensor:
    """The last tensor of a head."""
    return list(owner._owner(None)[0].head.parameters())[-1].data


def own_of(host: NodeExecutor) -> torch.Tensor:
    """The last tensor of the adapters of a host."""
    return list(host.part.trained.values())[-1].data


def test_executor_leaves_nothing_of_an_item_without_update(trained: ring.HandRing) -> None:
    """A score item leaves no gradient, and changes no bit of what trains."""

    def state() -> list[dict[str, bytes]]:
        moments = [node._hosted.optimizers.tensors() for node in trained.nodes.values()]
        return [{name: bytes(value.data) for name, value in each.items()} for each in moments]

    before, moments = trained.tensors(), state()
    turn = Turn(
        index=100, kind=StepKind.SCORE, owner="a", round=0, first_seq=100, num_items=1, first_step=3, first_batch=0
    )
    trained.run_turn(turn)
    after = trained.tensors()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert state() == moments
    for node in trained.nodes.values():
        assert not [name for name, value in node._hosted.skeleton.model.named_parameters() if value.grad is not None]


def test_executor_refuses_a_damaged_head(trained: ring.HandRing) -> None:
    """A head that is cut, renamed or not finite never replaces the own one."""
    from safetensors.torch import load, save

    owner = trained.nodes["a"]
    blob = bytes(owner.head_blob())
    tensors = load(blob)
    name = next(key for key in tensors if key.startswith("param/"))
    step = next(key for key in tensors if key.endswith("/step"))
    squares = step.replace("/step", "/exp_avg_sq")
    for data, error in (
        (blob[:-3], IntegrityError),
        (save({**tensors, "param/more": torch.zeros(2)}), IntegrityError),
        (save({**tensors, name: tensors[name].to(torch.float32)}), IntegrityError),
        (save({**tensors, "state/other/exp_avg": torch.zeros(2)}), IntegrityError),
        (save({**tensors, name: torch.full_like(tensors[name], torch.nan)}), DivergedError),
        (save({**tensors, step: tensors[step].to(torch.int64)}), IntegrityError),  # the next update would fail
        (save({**tensors, step: tensors[step] - 100}), IntegrityError),  # or give numbers that are not finite
        (save({**tensors, squares: tensors[squares] - 1}), IntegrityError),
    ):
        with pytest.raises(error, match="handed over"):
            owner.load_head_blob(Pieces.of(data))
    assert bytes(owner.head_blob()) == blob


def test_executor_tells_a_head_on_the_disk_from_one_that_was_handed_over(trained: ring.HandRing) -> None:
    """A shard whose head is not finite is refused as such: nobody handed this head over."""
    owner = trained.nodes["a"]
    bias = head_of(owner)
    shard = bytes(owner.shard({"node": "a"}, with_head=True))
    damaged = shard.replace(bias.cpu().numpy().tobytes(), torch.full_like(bias, torch.inf).cpu().numpy().tobytes())
    assert damaged != shard
    with pytest.raises(DivergedError, match=r"the head in the shard has param/.* not finite"):
        owner.load_shard(Pieces.of(damaged), {"node": "a"}, with_head=True)


def test_executor_saves_and_hands_in_no_number_that_is_not_finite(trained: ring.HandRing) -> None:
    """The last update may be the one that overflows, of adapters, head or moments: the checkpoint before it stays."""
    last = r"is not finite after the last step; lower train\.learning_rate"
    owner, both, host = (trained.nodes[name] for name in "abc")
    with spoiled(own_of(host)), pytest.raises(DivergedError, match=last):
        host.adapter_files(with_head=False)
    with spoiled(head_of(owner)):
        with pytest.raises(DivergedError, match=rf"of the head {last}"):
            owner.adapter_files(with_head=True)
        owner.adapter_files(with_head=False)  # whoever has no head to hand in is not asked about it
    both.shard({"node": "b"}, with_head=True)
    for part, value in (("the part of this node", own_of(both)), ("the head", head_of(both))):
        with (
            spoiled(value, torch.nan),
            pytest.raises(DivergedError, match=rf"diverged: .* of {part} {last}"),
        ):
            both.shard({"node": "b"}, with_head=True)
    kept_file(host, (2, 3), {})
    moments = next(iter(host._hosted.optimizers._optimizers[3].state.values()))["exp_avg_sq"]
    with spoiled(moments), pytest.raises(DivergedError, match="exp_avg_sq is not finite at the turn's end"):
        kept_file(host, (2, 3), {})


def test_executor_checks_tensors_of_different_devices_apart(
    trained: ring.HandRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with an accelerator may have merged adapters in a file: torch adds nothing up across devices."""
    owner, checked = trained.nodes["a"], list[set[str]]()

    def check(tensors: Mapping[str, torch.Tensor], where: str) -> None:
        checked.append({value.device.type for value in tensors.values()})

    elsewhere = property(lambda _: {"0.merged": torch.empty(1, device="meta")})
    monkeypatch.setattr(type(owner.offloading), "installed", elsewhere)
    monkeypatch.setattr(executor_module, "require_finite_values", check)
    owner.adapter_files(with_head=True)
    assert {"cpu"} in checked and {"meta"} in checked and all(len(kinds) < 2 for kinds in checked)


def test_executor_says_at_which_step_training_diverged(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learning rate that is far too high is named as what to change, with the step and the owner of its batch."""
    monkeypatch.setattr("edge.runtime.executor.learning_rate", lambda *_: 1e200)  # more than a job may say
    diverging = ring.make_ring(model_folder, tmp_path, {"a": (0, 4)}, train__optimizer="sgd")
    with pytest.raises(DivergedError, match=r"at step [2-9], a batch of owner a: the loss is .*; lower train.learning"):
        diverging.train()


def test_executor_refuses_a_gradient_that_no_other_owner_may_send(tmp_path: Path) -> None:
    """One that diverged names step and owner of the batch; one of another unit, and one for a host, are none."""
    case = Case(folder=write_inputs(tmp_path), method="hift", adapter="full", owners=("a", "b"), num_steps=8)
    plan = case.plan((("a", 0, 4), ("c", 4, 4)))
    nodes = make_carrier(case, plan).executors
    for node in nodes.values():
        node.grant(next(iter(turn_sequence(plan.course))))  # of steps 0 to 3 of owner a
    diverged = "at step 1, a batch of owner a: the gradient of the embedding for item 0"
    for name, unit, value, error, message in (
        ("b", EMBEDDING, torch.nan, DivergedError, diverged),
        ("b", 4, 1.0, IntegrityError, "the gradient of the head for item 0 has the tensors"),
        ("c", EMBEDDING, 1.0, PlanError, "needs an owner"),
    ):
        grad = pieces_of(torch.full((32,), value, dtype=torch.float64))
        blob = write_tensors({"grad/embeddings.LayerNorm.bias": grad})
        with pytest.raises(error, match=message):
            nodes[name].put_parcel(unit_grad_key(0, unit), blob)
