"""A ring of executors gives what one process gives, for any split; and frozen slices hold nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from edge.data.dataset import OwnerDataset
from edge.runtime import executor as executor_module
from edge.runtime.executor import NodeExecutor
from ringtune.errors import DataError, ModelError, PlanError
from ringtune.job.job import Job
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, items, turn_sequence
from ringtune.schedule.versions import trained
from tests.support import hand_ring as ring
from tests.support import reference, tiny
from tests.support.plans import changed

ONE = {"b": (0, 4)}
TWO = {"b": (0, 2), "c": (2, 4)}
UNEVEN = {"b": (0, 1), "c": (1, 4)}
THREE = {"b": (0, 1), "c": (1, 3), "d": (3, 4)}
EMPTY = {"b": (0, 0), "c": (0, 3), "d": (3, 4)}
OWNER_FIRST = {"a": (0, 2), "b": (2, 4)}
OWNER_MIDDLE = {"b": (0, 1), "a": (1, 3), "c": (3, 4)}
OWNER_LAST = {"b": (0, 3), "a": (3, 4)}
ALONE = {"a": (0, 4)}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for all tests of this file."""
    return tiny.write_model(tmp_path_factory.mktemp("model"))


def _compare(
    model_folder: Path,
    folder: Path,
    slices: dict[str, tuple[int, int]],
    *,
    owners: tuple[str, ...] = ("a",),
    eval_rows: int = 0,
    interleave: bool = False,
    **overrides: object,
) -> tuple[float, ring.HandRing, reference.Trained]:
    """Run the ring and the reference; the largest difference of any adapter or head tensor."""
    job = ring.make_job(model_folder, **overrides)
    datasets = ring.make_datasets(job, model_folder, folder, owners, eval_rows=eval_rows)
    plan = ring.make_plan(job, datasets, slices)
    hand = ring.HandRing(plan, job, model_folder, datasets, interleave=interleave).train()
    expected = _reference(job, plan, datasets)
    return _difference(hand.tensors(), {**expected.adapter(), **expected.head()}), hand, expected


_REFERENCES: dict[str, reference.Trained] = {}


def _reference(job: Job, plan: Plan, datasets: dict[str, OwnerDataset]) -> reference.Trained:
    """One for each job and owners, whatever the slices; without dropout also whatever the number of micro-batches."""
    if job.model.dtype == "float64" and not job.train.dropout:
        job = job.with_overrides({"train.microbatches": 1})
        plan = changed(plan, microbatches=1)
    key = repr((job, plan.course.owners))
    if key not in _REFERENCES:
        _REFERENCES[key] = reference.train(job, plan, Path(job.model.path), datasets)
    return _REFERENCES[key]


def _difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("slices", "microbatches"),
    [(slices, 4) for slices in (ONE, TWO, UNEVEN, THREE, EMPTY, OWNER_FIRST, OWNER_MIDDLE, OWNER_LAST, ALONE)]
    + [(slices, 1) for slices in (TWO, EMPTY, OWNER_MIDDLE)],
    ids=str,
)
@pytest.mark.sampled(1)
def test_executor_of_any_split_equals_one_process(
    model_folder: Path, tmp_path: Path, slices: dict[str, tuple[int, int]], microbatches: int
) -> None:
    """Any split gives the adapters and head of the whole model in float64, with all blocks unfreezing on the way."""
    difference, hand, expected = _compare(
        model_folder,
        tmp_path,
        slices,
        eval_rows=15,
        train__max_steps=12,
        train__microbatches=microbatches,
        train__learning_rate=3e-3,
        train__eval_every=5,
        unfreeze__every_steps=3,
        interleave=microbatches == 4,
    )
    assert difference <= 1e-9
    assert hand.losses == pytest.approx(expected.losses, abs=1e-9)
    assert hand.evaluations.keys() == expected.evaluations.keys() == {5, 10, 12}
    for step, counts in expected.evaluations.items():
        assert hand.evaluations[step] == pytest.approx(counts, abs=1e-9)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    "overrides",
    [
        {"train__optimizer": "sgd", "train__weight_decay": 0.01},
        {"train__weight_decay": 0.1, "train__lr_schedule": "linear", "train__warmup_steps": 5},
        {"train__dropout": 0.2, "train__microbatches": 3},
        {"train__dropout": 0.2, "train__microbatches": 3, "train__method": "all"},
        {"train__method": "all"},
        {"privacy__private_blocks": 1},
        {"train__dropout": 0.1, "privacy__private_blocks": 2},
    ],
    ids=str,
)
@pytest.mark.sampled(1)
def test_executor_equals_one_process_with_options(
    model_folder: Path, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    """Optimizers, schedules, dropout, methods and private blocks keep the equality."""
    private = int(str(overrides.get("privacy__private_blocks", 0)))
    slices = {"b": (private, 3), "c": (3, 4)}
    difference, _, _ = _compare(
        model_folder, tmp_path, slices, train__max_steps=13, unfreeze__every_steps=3, **overrides
    )
    assert difference <= 1e-9


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


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.sampled(1)
def test_executor_hands_the_head_over(model_folder: Path, tmp_path: Path, dropout: float) -> None:
    """Three owners in turn, one of them without a slice, train like one process on the same batches."""
    difference, hand, expected = _compare(
        model_folder,
        tmp_path,
        OWNER_MIDDLE,
        owners=("a", "c", "x"),
        eval_rows=10,
        train__max_steps=14,
        train__local_iterations=2,
        train__microbatches=2,
        train__dropout=dropout,
        train__eval_every=5,
        unfreeze__every_steps=3,
    )
    assert difference <= 1e-9
    assert hand.losses == pytest.approx(expected.losses, abs=1e-9)
    assert {step: found[1:] for step, found in hand.evaluations.items()} == {
        step: (float(count), float(correct)) for step, (_, count, correct) in expected.evaluations.items()
    }


def test_executor_in_float32_equals_with_the_same_micro_batches(model_folder: Path, tmp_path: Path) -> None:
    """In fp32 the same kernels run on the same shapes, so 1e-6 relative holds, dropout or not."""
    for dropout in (0.0, 0.1):
        options: dict[str, Any] = {"model__dtype": "float32", "train__microbatches": 3, "train__dropout": dropout}
        difference, hand, _ = _compare(model_folder, tmp_path, THREE, train__max_steps=14, **options)
        norm = torch.cat([value.flatten() for value in hand.tensors().values()]).norm()
        assert difference <= 1e-6 * float(norm)


@pytest.mark.promise("1 partition invariance")
def test_executor_is_independent_of_the_number_of_micro_batches(model_folder: Path, tmp_path: Path) -> None:
    """Micro-batches only change rounding: the loss is the sum over targets divided by those of the batch."""
    found = []
    for microbatches in (1, 2, 4):
        _, hand, _ = _compare(model_folder, tmp_path, TWO, train__microbatches=microbatches, train__optimizer="sgd")
        found.append(hand.tensors())
    assert _difference(found[1], found[0]) <= 1e-9
    assert _difference(found[2], found[0]) <= 1e-9


def test_executor_comparison_can_fail(model_folder: Path, tmp_path: Path) -> None:
    """The comparison sees a single swapped mask: the tiny model is not insensitive."""
    job = ring.make_job(model_folder)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    hand = ring.HandRing(plan, job, model_folder, datasets)
    put = hand.nodes["c"].put_tensor
    blind = lambda key, tensor, mask: put(  # noqa: E731
        key, tensor, None if mask is None else torch.ones_like(mask)
    )
    hand.nodes["c"].put_tensor = blind  # type: ignore[method-assign]
    expected = reference.train(job, plan, model_folder, datasets)
    assert _difference(hand.train().tensors(), {**expected.adapter(), **expected.head()}) > 1e-6


@pytest.mark.promise("3 frozen means free")
def test_executor_sends_no_gradient_below_the_lowest_trainable_block(model_folder: Path, tmp_path: Path) -> None:
    """Gradients stop at the terminator: none enters a node that is all frozen."""
    job = ring.make_job(model_folder, train__max_steps=12, unfreeze__every_steps=4)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, THREE)
    hand = ring.HandRing(plan, job, model_folder, datasets).train()
    assert {boundary for _, _, boundary in hand.gradients_sent} == {4, 3}
    assert hand.gradients_sent.count(("d", "c", 3)) == 8
    assert not any(target == "b" for _, target, _ in hand.gradients_sent)


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


@pytest.mark.parametrize("kind", [StepKind.SCORE, StepKind.MEASURE])
def test_executor_leaves_no_gradient_of_an_item_without_update(
    model_folder: Path, tmp_path: Path, kind: StepKind
) -> None:
    """A score or measure item between two steps changes nothing."""
    job = ring.make_job(model_folder, train__max_steps=2, train__local_iterations=1, train__microbatches=2)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    plain = ring.HandRing(plan, job, model_folder, datasets).train()
    mixed = ring.HandRing(plan, job, model_folder, datasets)
    for index, (item_kind, step) in enumerate([(StepKind.TRAIN, 0), (kind, 1), (StepKind.TRAIN, 1)]):
        turn = Turn(
            index=index,
            kind=item_kind,
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
    assert _difference(mixed.tensors(), plain.tensors()) == 0.0


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


def test_executor_trains_only_what_the_schedule_unfroze(model_folder: Path, tmp_path: Path) -> None:
    """Adapters below the lowest trainable block keep their initial values to the bit."""
    job = ring.make_job(model_folder, train__max_steps=6, unfreeze__every_steps=4)
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
    plan = ring.make_plan(job, datasets, TWO)
    hand = ring.HandRing(plan, job, model_folder, datasets)
    before = hand.tensors()
    after = hand.train().tensors()
    assert trained(plan.course, StepKind.TRAIN, 5).lowest == 2
    changed = {
        int(name.split(".layer.")[1].split(".")[0])
        for name in before
        if ".layer." in name and not torch.equal(before[name], after[name])
    }
    assert changed == {2, 3}
