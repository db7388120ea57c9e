"""Tables of subnets: a ring that leaves heads out gives what one process gives that computes and masks them."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtune.errors import JobError, PlanError
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT, Operations
from ringtune.schedule.turns import Item
from tests.support.operation_masks import SPLITS, Masks, collected, mixed_table, one_process, run
from tests.support.stale_reference import StaleProcess
from tests.support.tiny_families import MODEL_TYPES, PLUGGED
from tests.support.torch_ring import Case, distance, make_carrier, write_family_inputs

LORA = "lora[r=4, attn_matrices=['q','k','v'], intermediate_lora=True, output_lora=True, init_weights='bert']"
ADAPTERS = {"seq_bn": "seq_bn", "double_seq_bn": "double_seq_bn", "lora": LORA, "full": "full"}
# every family with every adapter on one split, in turn; the first family on all of them
MIXED = [
    (model_type, adapter, split)
    for at, model_type in enumerate(MODEL_TYPES)
    for shift, adapter in enumerate(ADAPTERS)
    for turn, split in enumerate(SPLITS)
    if at == 0 or (at + shift) % len(SPLITS) == turn
]
GROUPED = ("llama", "mistral", *PLUGGED)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes the inputs of a family once."""
    folder = tmp_path_factory.mktemp("inputs")

    @functools.lru_cache
    def write(model_type: str, **config: Any) -> Path:
        name = "-".join([model_type, *map(str, config.values())])
        task = "image-classification" if model_type == "vit" else "sequence-classification"
        return write_family_inputs(folder / name, model_type, task, **config)

    return write


def case_of(folder: Path, *, subnets: int, adapter: str = "seq_bn", **changes: Any) -> Case:
    """A step of each of two owners, four micro-batches, every batch with its own operations."""
    owners = ("a", "b")
    values = {"num_steps": 2, "local_iterations": 1, "microbatches": 4, "method": "all", "owners": owners, **changes}
    return Case(folder=folder, adapter=adapter, operations=mixed_table(7, owners, subnets), **values)


def family_case(inputs: Any, model_type: str, adapter: str) -> Case:
    """As many subnets as key/value heads."""
    task = "image-classification" if model_type == "vit" else "sequence-classification"
    subnets = 2 if model_type in GROUPED else 4
    return case_of(inputs(model_type), subnets=subnets, adapter=ADAPTERS[adapter], task=task)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(("model_type", "adapter", "split"), MIXED)
@pytest.mark.sampled(3)
def test_subnets_of_every_family_and_adapter_equal_masks(
    inputs: Any, model_type: str, adapter: str, split: str
) -> None:
    """Full, forward-only and skipped subnets in every mix; AdamW steps in float64: 1e-9."""
    case = family_case(inputs, model_type, adapter)
    plan = case.plan(SPLITS[split])
    assert distance(collected(plan, run(case, plan)[1]), one_process(case)) < 1e-9


def with_codes(case: Case, old: str, new: str) -> Case:
    """The same case with other codes in its table."""
    table = case.operations or Operations()
    batches = tuple(
        dataclasses.replace(entry, rows=tuple(row.replace(old, new) for row in entry.rows)) for entry in table.batches
    )
    return dataclasses.replace(case, operations=Operations(batches=batches, subnets=table.subnets))


def result_of(case: Case, split: str = "two", seed: int = 0) -> dict[str, torch.Tensor]:
    """What the ring trains."""
    plan = case.plan(SPLITS[split])
    return collected(plan, run(case, plan, seed)[1])


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.sampled(1)
def test_every_code_of_a_subnet_counts(inputs: Any, adapter: str) -> None:
    """Negative control: with forward-only taken for full or for skipped, or nothing skipped, the result is another."""
    case = family_case(inputs, "bert", adapter)
    found = result_of(case)
    for old, new in ((FORWARD_ONLY, FULL), (FORWARD_ONLY, SHORTCUT), (SHORTCUT, FULL)):
        assert distance(result_of(with_codes(case, old, new)), found) > 1e-4, (old, new)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("adapter", ["seq_bn", "lora"])
@pytest.mark.sampled(1)
def test_groups_of_one_two_and_three_heads_equal_masks(inputs: Any, heads: int, adapter: str) -> None:
    """Six heads, and 50 feed-forward rows that no number of subnets divides evenly."""
    folder = inputs("llama", num_attention_heads=6, num_key_value_heads=6, head_dim=8, intermediate_size=50)
    case = case_of(folder, subnets=6 // heads, adapter=ADAPTERS[adapter])
    assert distance(result_of(case), one_process(case)) < 1e-9


def test_heads_of_a_key_value_head_stay_together(inputs: Any) -> None:
    """Six query heads over three key/value heads in three subnets."""
    folder = inputs("mistral", num_attention_heads=6, num_key_value_heads=3, head_dim=8, intermediate_size=50)
    case = case_of(folder, subnets=3, adapter=LORA)
    assert distance(result_of(case), one_process(case)) < 1e-9


@pytest.mark.parametrize("adapter", ["par_bn", "seq_bn[use_gating=True,ln_before=True]", "seq_bn|lora[r=2]"])
@pytest.mark.sampled(1)
def test_other_covered_adapters_equal_masks(inputs: Any, adapter: str) -> None:
    """Bottlenecks of any kind are applied once to the whole, and unions are covered part by part."""
    case = case_of(inputs("bert"), subnets=2, adapter=adapter)
    assert distance(result_of(case), one_process(case)) < 1e-9


@pytest.mark.parametrize("model_type", ["gpt2", "distilbert"])
def test_lora_on_some_matrices_equals_masks(inputs: Any, model_type: str) -> None:
    """Queries and values have one, keys have none; in GPT-2 they are parts of one matrix."""
    case = case_of(inputs(model_type), subnets=4, adapter="lora[r=4, attn_matrices=['q','v'], init_weights='bert']")
    assert distance(result_of(case), one_process(case)) < 1e-9


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("adapter", ["seq_bn", "full"])
@pytest.mark.sampled(1)
def test_subnets_under_unfreezing_equal_masks(inputs: Any, split: str, adapter: str) -> None:
    """Where a block does not train yet and nothing below it does, full acts as forward-only."""
    case = case_of(inputs("bert"), subnets=4, adapter=adapter, method="ringada", every_steps=2, num_steps=7)
    assert distance(result_of(case, split), one_process(case)) < 1e-9


class StaleWithMasks(StaleProcess):
    """PipeAdapter's rule written out, with masks."""

    def __post_init__(self) -> None:
        """Hook the model."""
        super().__post_init__()
        self._course = self.plan.course
        self._masks = Masks(self.model, self._course.subnets)

    def begin(self, item: Item, micro: int) -> None:
        """Look the row of the micro-batch up."""
        self._masks.row = self._course.subnet_operations_of(item.owner, item.batch)[micro]


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("adapter", ["seq_bn", "full"])
def test_subnets_with_several_items_in_flight_equal_masks(inputs: Any, adapter: str) -> None:
    """Under PipeAdapter parts of a block wait for their backward while newer versions of it train."""
    folder = inputs("bert")
    case = case_of(folder, subnets=4, adapter=adapter, method="pipeadapter", num_steps=6, local_iterations=3)
    wanted = StaleWithMasks(case.job, case.plan(SPLITS["four"]), folder / "model", case.datasets()).train()
    assert distance(result_of(case, "four"), wanted.tensors()) < 1e-9


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("method", ["all", "pipeadapter"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.sampled(1)
def test_timing_changes_no_bit_of_a_run_with_subnets(inputs: Any, adapter: str, method: str) -> None:
    """Other delays, so other micro-batches in flight, same bits in float32."""
    case = dataclasses.replace(family_case(inputs, "bert", adapter), dtype="float32", method=method)
    first = result_of(case, "four", seed=1)
    for seed in (2, 3):
        other = result_of(case, "four", seed=seed)
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.sampled(2)
def test_all_full_tables_change_no_bit(inputs: Any, model_type: str) -> None:
    """In float32 the result is that of a run without tables, bit for bit."""
    case = dataclasses.replace(family_case(inputs, model_type, "lora"), dtype="float32", trims=False)
    full = with_codes(with_codes(case, FORWARD_ONLY, FULL), SHORTCUT, FULL)
    found, without = result_of(full), result_of(dataclasses.replace(case, operations=None))
    assert found.keys() == without.keys()
    assert all(torch.equal(found[name], without[name]) for name in found)


# ---- what is refused before anything trains --------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"adapter": "ia3"}, "adapter.config 'ia3' can't be run by head groups"),
        ({"adapter": "dora"}, "DoRA"),
        ({"dropout": 0.1}, "train.dropout = 0.1"),
    ],
)
def test_node_refuses_what_heads_can_not_be_left_out_of(inputs: Any, changes: dict[str, Any], problem: str) -> None:
    """The node says so as it builds its blocks; with whole blocks as subnets it would train."""
    case = case_of(inputs("bert"), subnets=4, **changes)
    with pytest.raises(JobError, match=re.escape(problem)):
        make_carrier(case, case.plan(SPLITS["one"]))
    whole = dataclasses.replace(case_of(inputs("bert"), subnets=1, **changes), dtype="float32", num_steps=1)
    result_of(whole)


def test_node_refuses_subnets_that_do_not_divide_its_heads(inputs: Any) -> None:
    """A table for another model: three subnets of four heads."""
    case = case_of(inputs("bert"), subnets=3)
    with pytest.raises(PlanError, match="3 subnets do not divide 4 key/value heads"):
        make_carrier(case, case.plan(SPLITS["one"]))
