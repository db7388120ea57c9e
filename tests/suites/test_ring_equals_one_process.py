"""Invariant 1: the ring gives the adapters and head of one process, for any split.

The reference (``tests.support.reference``) is plain transformers + adapters + autograd on the whole model.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtune.schedule.actions import Action, Payload
from ringtune.schedule.turns import StepKind, items, turn_sequence
from ringtune.schedule.versions import trained
from sim.ring import RingResult, VirtualRing
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, reference_of, write_inputs

Slices = tuple[tuple[str, int, int], ...]

ONE: Slices = (("a", 0, 4),)
TWO: Slices = (("b", 0, 1), ("a", 1, 4))
THREE: Slices = (("a", 0, 2), ("b", 2, 2), ("c", 2, 3), ("d", 3, 4))
FOUR: Slices = (("d", 0, 1), ("c", 1, 2), ("b", 2, 3), ("a", 3, 4))
EMPTY_OWNER: Slices = (("b", 0, 3), ("c", 3, 4))
SPLITS = {"one": ONE, "two": TWO, "three": THREE, "four": FOUR, "owner-hosts-nothing": EMPTY_OWNER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def case_of(folder: Path, **changes: Any) -> Case:
    """8 steps in turns of two, each with a block more: all train in the last one, the first of three owners has two."""
    return Case(folder=folder, **{"num_steps": 8, "every_steps": 2, "local_iterations": 2, **changes})


def run(case: Case, slices: Slices, *, seed: int = 0, keep_messages: bool = False) -> tuple[RingResult, TorchCarrier]:
    """Run a case on the virtual ring with random delays."""
    plan = case.plan(slices)
    carrier = make_carrier(case, plan, keep_messages=keep_messages)
    rng = random.Random(seed)

    def action_s(node: str, action: Action) -> float:
        return rng.random()

    def message_s(source: str, target: str, payload: str) -> float:
        return rng.choice([0.0, 0.1, 2.0]) * rng.random()

    result = VirtualRing(plan, action_s=action_s, message_s=message_s, carrier=carrier).run()
    assert result.finish is not None and result.finish.error == "", result.finish
    return result, carrier


@functools.lru_cache(maxsize=64)
def collected(case: Case, slices: Slices, seed: int) -> dict[str, torch.Tensor]:
    """Adapters and head after a run; what was run once is not run again."""
    _, carrier = run(case, slices, seed=seed)
    plan = case.plan(slices)
    return carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)


def distance_to_reference(case: Case, slices: Slices, against: Case | None = None, seed: int = 0) -> float:
    """Run a case and compare adapters and head with the reference of the same (or another) case."""
    trained = reference_of(against or case)
    return distance(collected(case, slices, seed), {**trained.adapter(), **trained.head()})


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("method", ["ringada", "all"])
@pytest.mark.sampled(3)
def test_ring_of_any_split_equals_one_process(folder: Path, split: str, microbatches: int, method: str) -> None:
    """AdamW in float64, unfreezing during the run: 1e-9."""
    case = case_of(folder, microbatches=microbatches, method=method)
    assert distance_to_reference(case, SPLITS[split]) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", ["one", "two", "three", "four"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.sampled(1)
def test_ring_of_several_owners_equals_one_process(folder: Path, split: str, optimizer: str) -> None:
    """The head travels with its moments: three owners in turn give the result of one process."""
    case = case_of(folder, owners=("a", "c", "b"), optimizer=optimizer, microbatches=2, eval_every=7)
    assert distance_to_reference(case, SPLITS[split]) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("optimizer", ["momentum", "adagrad", "adafactor"])
def test_ring_with_other_optimizers_equals_one_process(folder: Path, optimizer: str) -> None:
    """Their state travels with the head too, factored as it is."""
    case = Case(folder=folder, owners=("a", "b"), optimizer=optimizer, microbatches=2, num_steps=9)
    assert distance_to_reference(case, TWO) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("turns", ["equal", "rows"])
@pytest.mark.sampled(1)
def test_ring_of_owners_with_unequal_rows_equals_one_process(folder: Path, turns: str) -> None:
    """Turns by rows, and an owner with fewer rows than a batch, which has batches of its own size."""
    owners = ("a", "c", "b")
    case = Case(folder=folder, owners=owners, split="dirichlet:0.1", turns=turns, microbatches=4, num_steps=16)
    rows = [owner.train_rows for owner in case.plan(ONE).course.owners]
    assert min(rows) < 8 < max(rows)
    assert distance_to_reference(case, THREE) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", ["one", "two", "four", "owner-hosts-nothing"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.sampled(1)
def test_ring_with_dropout_equals_one_process(folder: Path, split: str, microbatches: int) -> None:
    """Dropout is seeded per (step, micro-batch, unit), so the split never changes it."""
    case = case_of(folder, dropout=0.2, microbatches=microbatches, owners=("a", "b"))
    assert distance_to_reference(case, SPLITS[split]) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("slices", [(("a", 1, 4),), (("b", 1, 2), ("a", 2, 4)), (("c", 1, 3), ("d", 3, 4))])
def test_ring_with_private_blocks_equals_one_process(folder: Path, slices: Slices) -> None:
    """Owners run frozen block 0 themselves; it stays frozen, nothing else changes."""
    case = case_of(folder, private_blocks=1, owners=("a", "b"), microbatches=2)
    assert distance_to_reference(case, slices) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("optimizer", "same", "bound"),
    [("sgd", True, 1e-6), ("adamw", True, 1e-6), ("sgd", False, 1e-5), ("adamw", False, 1e-3)],
)
@pytest.mark.sampled(1)
def test_ring_in_float32_stays_within_rounding(folder: Path, optimizer: str, same: bool, bound: float) -> None:
    """50 steps. Same micro-batches 1e-6; others 1e-5 with SGD, 1e-3 with AdamW, whose first steps amplify rounding."""
    case = Case(folder=folder, dtype="float32", optimizer=optimizer, microbatches=2, owners=("a", "b"))
    against = case if same else dataclasses.replace(case, microbatches=1)
    assert distance_to_reference(case, THREE, against) < bound


def test_ring_comparison_can_fail(folder: Path) -> None:
    """Negative control: one step more or another unfreezing is far outside the bounds."""
    case = case_of(folder, owners=("a", "b"))
    assert distance_to_reference(case, TWO, dataclasses.replace(case, num_steps=9)) > 1e-4
    assert distance_to_reference(case, TWO, dataclasses.replace(case, every_steps=3)) > 1e-4


@pytest.mark.promise("1 partition invariance")
def test_ring_losses_and_evaluations_equal_one_process(folder: Path) -> None:
    """The loss of every step and the counts of every evaluation are those of the reference."""
    case = case_of(folder, owners=("a", "b"), eval_every=4, microbatches=4, num_steps=12)
    result, _ = run(case, THREE)
    trained = reference_of(case)
    steps = [entry for entry in result.logged if type(entry).__name__ == "LogStep" and entry.turn.kind == "train"]
    losses = [dict(entry.values)["loss_sum"] / dict(entry.values)["count"] for entry in steps]
    assert losses == pytest.approx(trained.losses, rel=1e-9)
    evaluations = [entry for entry in result.logged if type(entry).__name__ == "LogEvaluation"]
    assert len(evaluations) > 2
    for entry in evaluations:
        values = dict(entry.values)
        found = (values["loss_sum"], values["count"], values["correct"])
        assert found == pytest.approx(trained.evaluations[entry.step], rel=1e-9)


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.sampled(1)
def test_ring_delays_never_change_a_bit(folder: Path, seed: int) -> None:
    """Invariant 5 with tensors: other delays give bit-equal adapters and head in fp32."""
    case = Case(folder=folder, dtype="float32", owners=("a", "b"), microbatches=4, num_steps=8, dropout=0.1)
    first, other = collected(case, THREE, 0), collected(case, THREE, seed)
    assert all(bool((first[name] == other[name]).all()) for name in first)


@pytest.mark.promise("3 frozen means free")
def test_ring_frozen_slices_hold_nothing_and_get_no_gradient(folder: Path) -> None:
    """Invariant 3: below the lowest trainable block 0 bytes of gradient travel, and nothing is kept."""
    case = Case(folder=folder, every_steps=1000, microbatches=4, num_steps=12)
    plan = case.plan(FOUR)
    result, carrier = run(case, FOUR, keep_messages=True)
    by_seq = {item.seq: item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    sent_down = [message for message in result.messages if message.payload == Payload.GRAD]
    assert {message.key.boundary for message in sent_down} == set()
    assert all(trained(plan.course, StepKind.TRAIN, item.step).lowest == 3 for item in by_seq.values())
    assert [executor.live_bytes() for executor in carrier.executors.values()] == [0, 0, 0, 0]


@pytest.mark.promise("3 frozen means free")
@pytest.mark.parametrize("num_steps", [4, 20])
def test_ring_live_bytes_do_not_grow_with_batches(folder: Path, num_steps: int) -> None:
    """Invariant 3 and 7: what a frozen host holds at once is bounded by credits, however many batches pass."""
    case = Case(folder=folder, every_steps=1000, microbatches=4, num_steps=num_steps, local_iterations=num_steps)
    plan = case.plan(FOUR)
    carrier = make_carrier(case, plan)
    peaks = dict.fromkeys(plan.nodes, 0)
    original = carrier.run

    def watched(node: str, action: Action) -> tuple[tuple[str, float], ...]:
        values = original(node, action)
        peaks[node] = max(peaks[node], carrier.executors[node].live_bytes())
        return values

    carrier.run = watched  # type: ignore[method-assign]
    assert VirtualRing(plan, carrier=carrier).run().finish is not None
    hidden_bytes = 2 * 16 * 32 * 8
    # at most the credits of its outgoing link and one under way, each a micro-batch of 2 x 16 x 32 in float64
    for node in ("d", "c", "b"):
        assert 0 < peaks[node] <= (plan.placement.credits + 1) * (hidden_bytes + 2 * 16 * 8)


@pytest.mark.promise("4 labels stay")
def test_ring_messages_hold_neither_token_ids_nor_labels(folder: Path) -> None:
    """Invariant 4: what travels is floating point, except the 0/1 mask; no integer tensor else."""
    case = Case(folder=folder, owners=("a", "b"), microbatches=2, num_steps=8)
    _, carrier = run(case, THREE, keep_messages=True)
    assert carrier.messages
    for _, payload, boundary, (tensor, mask) in carrier.messages:
        assert tensor.is_floating_point()
        assert mask is None or set(mask.unique().tolist()) <= {0, 1}
        assert (mask is not None) == (payload == Payload.HIDDEN and boundary < case.num_blocks)
