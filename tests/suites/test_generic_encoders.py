"""Generic encoders equal plain transformers with adapters, on one and on three hosts; ``--all`` takes every family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.models.architecture_heads import architecture_head
from ringtune.models.families import FAMILIES
from ringtune.models.folder import base_tensors, read_config
from tests.features.feature import ONE, THREE, Feature, carry_out, one_process
from tests.features.models import loaded_merged, loaded_plainly, of_family
from tests.laws.test_result_folder import require_loads
from tests.support.hand_ring import make_bench
from tests.support.tiny_families import ENCODERS, HIDDEN, sizes_of, write_family
from tests.support.torch_ring import Case, distance

TASKS = ("sequence-classification", "regression", "token-classification", "question-answering")
ROUNDING = ("deberta",)
"""Families whose norms have steps in float32 inside any type."""
ALL = "lora[r=4,attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]"
SPLITS = {"one": ONE, "three": THREE}


def generic(model_type: str, task: str, adapter: str = "lora", **changes: Any) -> Feature:
    """A short run of two owners with two micro-batches, in float64."""
    values = {"adapter": adapter, "dtype": "float64", "microbatches": 2, "owners": ("a", "b"), **changes}
    arguments = of_family(f"generic/{model_type}-{task}-{adapter}", model_type, task, **values)
    return Feature(**{**arguments, "splits": SPLITS}, bound=1e-6 if model_type in ROUNDING else 1e-9)


def require_equal(feature: Feature, split: str) -> None:
    """Trained tensors, losses and evaluations of a split are those of one process."""
    run = carry_out(feature, feature.plan_on(split))
    wanted = one_process(feature.case, run)
    assert distance(run.tensors, wanted.tensors) <= feature.bound
    assert run.losses == pytest.approx(wanted.losses, rel=max(feature.bound, 1e-6))
    assert wanted.evaluations
    for step, sums in wanted.evaluations.items():
        assert run.evaluations[step] == pytest.approx(sums, rel=max(feature.bound, 1e-6))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.sampled(2)
def test_lora_of_a_generic_encoder_equals_one_process(model_type: str, task: str, split: str) -> None:
    """Plain transformers, adapters and autograd on the whole model; an owner that hosts nothing is among three."""
    require_equal(generic(model_type, task), split)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.sampled(1)
def test_planned_bytes_of_a_generic_encoder_are_those_of_its_tensors(model_type: str, task: str) -> None:
    """Bytes of a block, its LoRA, what hosts share, the head and all else are counted without torch."""
    feature = generic(model_type, task, ALL)
    run = carry_out(feature, feature.plan_on("one"))
    facts, labels = model_facts(feature.case.folder / "model", feature.case.job), len(feature.case.labels)
    adapter = {name: value.numel() for name, value in run.tensors.items() if ".ringtune." in name}
    head = {name: value.numel() for name, value in run.tensors.items() if name not in adapter}
    assert 4 * facts.adapter_block_bytes == 8 * sum(adapter.values())
    assert facts.head_bytes + facts.head_class_bytes * labels == 8 * sum(head.values())
    config = read_config(feature.case.folder / "model")
    whole = sum(math.prod(tensor.shape) for tensor in base_tensors(feature.case.folder / "model", config).values())
    whole += HIDDEN if model_type == "modernbert" else 0  # block 0 has no first norm
    assert 4 * facts.block_bytes + facts.embedding_bytes + facts.shared_bytes == 8 * whole
    assert bool(facts.shared_bytes) is (model_type in ("deberta", "deberta-v2", "mpnet"))


@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.sampled(2)
def test_memory_of_a_generic_encoder_is_not_below_what_a_block_keeps(tmp_path: Path, model_type: str) -> None:
    """The bound from widths, scores and relative positions holds for any of them, and is not far away."""
    sizes = {
        key: 8 * value for key, value in sizes_of(model_type).items() if key in ("hidden_size", "intermediate_size")
    }
    folder = write_family(tmp_path / "model", model_type, **{**sizes, "vocab_size": 300})
    job = Case(folder=tmp_path, task="sequence-classification", adapter=ALL, dtype="float32").job
    job = job.with_overrides({"train.max_length": 50, "train.microbatches": 1})
    kept = make_bench(folder, job).activation_token_bytes()
    assert kept <= computed_token_bytes(model_facts(folder, job), job) <= 2.0 * kept


@pytest.mark.parametrize("load", [loaded_plainly, loaded_merged])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.sampled(2)
def test_result_of_a_generic_encoder_loads_with_nothing_of_ours(
    tmp_path: Path, model_type: str, task: str, load: Callable[[Case, Path], Any]
) -> None:
    """By AdapterHub's lines into the class of the task, and merged as a model of that class alone."""
    feature = dataclasses.replace(generic(model_type, task, owners=("a",)), load=load)
    plain = require_loads(feature, tmp_path, load)
    assert type(plain).__name__ == architecture_head(model_type, task).architecture


@pytest.mark.parametrize("model_type", [name for name in ENCODERS if "bottleneck" in FAMILIES[name].methods])
@pytest.mark.sampled(1)
def test_bottlenecks_of_a_generic_encoder_equal_one_process(model_type: str) -> None:
    """Beside LoRA on all matrices, where norms come first."""
    require_equal(generic(model_type, "sequence-classification", f"double_seq_bn|{ALL}"), "three")


@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.sampled(2)
def test_dropout_of_a_generic_encoder_draws_the_same_numbers(model_type: str) -> None:
    """Before the blocks, in relative positions and in the head, which are called by the architecture's own forward."""
    require_equal(generic(model_type, "token-classification", dropout=0.2), "three")
