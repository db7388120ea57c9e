"""A ring that saves by VeLoRA equals one process that computes the paper's formulas word by word."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from ringtune.errors import IntegrityError
from ringtune.run_control import events as rd
from ringtune.schedule.course import FrozenWeights
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import INITS, Velora
from ringtune.schedule.turns import StartPoint, turn_sequence
from ringtune.schedule.units import Range
from tests.support import reference
from tests.support.family_inputs import TASKS, family_writer
from tests.support.hand_ring import HandRing
from tests.support.literal_velora import every_layer, make_literal
from tests.support.operation_masks import SPLITS, Slices
from tests.support.operation_masks import run as run_plan
from tests.support.plans import changed
from tests.support.resumed import holder_of, rebuilt, same_bits
from tests.support.resumed import run as run_resumable
from tests.support.rounded import LORA, WAYS
from tests.support.tiny_families import MODEL_TYPES
from tests.support.torch_ring import Case, distance, make_carrier

ALL = (Range(0, 4),)
ADAPTER_DOWN = Velora(blocks=ALL, layers=("adapter_down",), parts=8)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the inputs of a family once."""
    return family_writer(tmp_path_factory.mktemp("inputs"))


def case_of(inputs: Any, model_type: str = "bert", **changes: Any) -> Case:
    """Two owners, blocks that unfreeze, two micro-batches, an evaluation."""
    values: dict[str, Any] = {"owners": ("a", "b"), "microbatches": 2, "num_steps": 4, "every_steps": 1}
    values |= {"eval_every": 2, "local_iterations": 2}
    return Case(folder=inputs(model_type), task=TASKS[model_type], **{**values, **changes})


def plan_of(case: Case, slices: Slices, velora: Velora | None, recompute: tuple[Range, ...] = ()) -> Plan:
    """A plan with VeLoRA."""
    return changed(case.plan(slices), velora=velora, recompute=recompute)


def trained(
    case: Case, slices: Slices, velora: Velora | None, *, recompute: tuple[Range, ...] = (), seed: int = 0
) -> dict[str, torch.Tensor]:
    """What a ring with random delays trains."""
    plan = plan_of(case, slices, velora, recompute)
    carrier = run_plan(case, plan, seed)[1]
    assert {executor.live_bytes() for executor in carrier.executors.values()} == {0}
    return carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)


@functools.lru_cache(maxsize=16)
def literal(case: Case, velora: Velora) -> dict[str, torch.Tensor]:
    """What one process trains."""
    plan = case.plan(SPLITS["one"])
    prepare = functools.partial(make_literal, velora=velora, seed=plan.course.seed)
    found = reference.train(case.job, plan, case.folder / "model", case.datasets(), prepare=prepare)
    return {**found.adapter(), **found.head()}


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.sampled(1)
def test_velora_of_own_weights_equals_the_formula(inputs: Any, model_type: str) -> None:
    """Every base layer of every family; 5 parts do not divide a width of 32."""
    case, velora = case_of(inputs, model_type, adapter="full"), every_layer(model_type, parts=5)
    wanted = literal(case, velora)
    assert distance(trained(case, SPLITS["two"], velora), wanted) < 1e-9
    assert distance(trained(case, SPLITS["two"], None), wanted) > 1e-4


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [(name, adapter) for name in ("bert", "llama") for adapter in ("seq_bn", "lora[r=4]", "seq_bn|lora[r=2]")]
    + [("bert", "par_bn"), ("bert", "double_seq_bn"), ("gpt2", "lora[r=4]")]
    + [
        ("bert", "linear[alpha=0.5,attn_matrices=['q']]|lora[attn_matrices=['v']]"),
        ("gpt2", "mlp[hidden=8,intermediate_lora=True]"),
    ],
)
@pytest.mark.sampled(1)
def test_velora_of_adapters_equals_the_formula(inputs: Any, model_type: str, adapter: str) -> None:
    """Down projections of bottlenecks, first matrices of LoRA and of auxiliary models."""
    case = case_of(inputs, model_type, adapter=adapter)
    wanted = literal(case, ADAPTER_DOWN)
    assert distance(trained(case, SPLITS["two"], ADAPTER_DOWN), wanted) < 1e-9
    assert distance(trained(case, SPLITS["two"], None), wanted) > 1e-5


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.sampled(2)
def test_velora_in_any_split_equals_the_formula(inputs: Any, init: str, split: str) -> None:
    """All four ways to begin, on 1, 2 and 4 nodes, with dropout."""
    case, velora = case_of(inputs, adapter="full", dropout=0.1), every_layer("bert", parts=5, init=init)
    assert distance(trained(case, SPLITS[split], velora), literal(case, velora)) < 1e-9


def test_velora_of_some_blocks_leaves_the_others_alone(inputs: Any) -> None:
    """Only layers of the named blocks, and of these only the named layers."""
    case = case_of(inputs, adapter="full")
    velora = Velora(blocks=(Range(1, 2), Range(3, 4)), layers=("down",), parts=8)
    assert distance(trained(case, SPLITS["four"], velora), literal(case, velora)) < 1e-9


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("init", INITS)
@pytest.mark.sampled(1)
def test_velora_with_micro_batches_in_flight_equals_one_after_the_other(inputs: Any, init: str) -> None:
    """A graph keeps the vector that it was made with, whatever comes before its backward."""
    case, velora = case_of(inputs, adapter="full", microbatches=4, dtype="float32"), every_layer("bert", init=init)
    found = []
    for interleave in (False, True):
        plan = plan_of(case, SPLITS["two"], velora)
        hand = HandRing(plan, case.job, case.folder / "model", case.datasets(), interleave=interleave)
        found.append(hand.train().tensors())
    assert same_bits(*found)
    assert same_bits(trained(case, SPLITS["two"], velora, seed=5), found[0])


@pytest.mark.parametrize(
    ("adapter", "method", "init"),
    [("full", "ringada", init) for init in INITS]
    + [(*way, init) for way in (("lora[r=4]", "all"), ("full", "pipeadapter")) for init in INITS[::2]],
)
@pytest.mark.sampled(1)
def test_velora_of_recomputed_blocks_gives_the_same_bits(inputs: Any, adapter: str, method: str, init: str) -> None:
    """A block that is run again is projected on the vectors of its first run."""
    base = every_layer("bert", init=init) if adapter == "full" else dataclasses.replace(ADAPTER_DOWN, init=init)
    case = case_of(inputs, adapter=adapter, method=method, dtype="float32", dropout=0.1, local_iterations=4)
    wanted = trained(case, SPLITS["two"], base)
    assert same_bits(trained(case, SPLITS["two"], base, recompute=ALL), wanted)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.sampled(1)
def test_velora_resumed_gives_the_bits_of_the_whole_run(inputs: Any, init: str) -> None:
    """Vectors are in the shards, those of layers that do not train yet too; an evaluation changes none."""
    velora = every_layer("bert", init=init)
    case = case_of(inputs, adapter="full", dtype="float32", checkpoint_every=2, num_steps=8, every_steps=2)
    plan = plan_of(case, SPLITS["two"], velora)
    whole = make_carrier(case, plan)
    result = run_resumable(plan, whole, 0)
    wanted = whole.collected(plan, holder_of(plan, result))
    saved = [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
    assert [entry.step for entry in saved] == [2, 4, 6, 8]
    for checkpoint in saved[:2]:
        carrier = rebuilt(case, plan, whole.shards[checkpoint.step], checkpoint)
        start = StartPoint.of(plan.course, step=checkpoint.step, holder=checkpoint.holder)
        rest = run_resumable(plan, carrier, 1, start=start)
        assert same_bits(carrier.collected(plan, holder_of(plan, rest)), wanted)
        assert carrier.shards == {step: whole.shards[step] for step in carrier.shards}


def test_velora_with_tables_of_whole_blocks_begins_with_the_first_full_micro_batch(inputs: Any) -> None:
    """Where a table skips a block, or keeps no graph of it, its vectors wait; any split gives the same."""
    rows = ("3211", "1321", "1111", "2113")
    batches = tuple(
        BatchOperations(owner=owner, batch_id=batch, rows=rows) for owner in ("a", "b") for batch in range(2)
    )
    case = case_of(inputs, adapter="full", microbatches=4, operations=Operations(batches=batches), method="all")
    velora = every_layer("bert")
    wanted = trained(case, SPLITS["one"], velora)
    assert distance(trained(case, SPLITS["four"], velora), wanted) < 1e-9
    assert distance(trained(case, SPLITS["two"], velora, recompute=ALL), wanted) < 1e-9
    assert distance(trained(case, SPLITS["one"], None), wanted) > 1e-4


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.sampled(1)
def test_velora_and_recomputation_with_hift(inputs: Any, k: int) -> None:
    """A layer's vector begins when its group first trains; any split, and blocks that are run again, give the same."""
    case = case_of(inputs, method="hift", adapter="full", hift=f"group_size = {k}\n", num_steps=12, owners=("a",))
    velora = every_layer("bert")
    wanted = trained(case, SPLITS["one"], velora)
    assert distance(trained(case, SPLITS["four"], velora), wanted) < 1e-9
    assert same_bits(trained(case, SPLITS["one"], velora, recompute=ALL), wanted)
    assert same_bits(trained(case, SPLITS["one"], None, recompute=ALL), trained(case, SPLITS["one"], None))
    assert distance(trained(case, SPLITS["one"], None), wanted) > 1e-4


def test_velora_in_a_shard_is_checked(inputs: Any) -> None:
    """A shard without vectors is of another course: it is refused, and nothing is changed."""
    case = case_of(inputs, adapter="full", checkpoint_every=2)
    plan, velora = case.plan(SPLITS["two"]), every_layer("bert")
    carrier = make_carrier(case, plan)
    saved = next(entry for entry in run_resumable(plan, carrier, 0).logged if isinstance(entry, rd.LogCheckpoint))
    with pytest.raises(IntegrityError, match="the shard has VeLoRA's vectors of other layers than this node's"):
        rebuilt(case, changed(plan, velora=velora), carrier.shards[saved.step], saved)


@pytest.mark.parametrize("frozen", WAYS, ids=str)
@pytest.mark.sampled(1)
def test_velora_and_recomputation_with_frozen_weights_held_small(inputs: Any, frozen: FrozenWeights) -> None:
    """LoRA's first matrices are projected beside frozen matrices in 16 and 8 bits; blocks run again give the same."""
    case = case_of(inputs, adapter=LORA, dtype="float32", dropout=0.1, frozen=frozen)
    wanted = trained(case, SPLITS["two"], ADAPTER_DOWN)
    assert same_bits(trained(case, SPLITS["one"], ADAPTER_DOWN, recompute=ALL), wanted)
    plain = trained(case, SPLITS["two"], None)
    assert same_bits(trained(case, SPLITS["two"], None, recompute=ALL), plain)
    assert distance(plain, wanted) > 1e-5
