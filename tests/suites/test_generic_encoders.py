"""Generic encoders equal plain transformers with adapters, on one and on three hosts; ``--all`` takes every family."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from edge.model.heads import task_of
from edge.model.skeleton import build_skeleton
from edge.model.slice import module_bytes
from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.errors import ModelError
from ringtune.models.architecture_heads import architecture_head
from ringtune.models.families import FAMILIES
from ringtune.models.folder import base_tensors, read_config, select_tensors
from tests.features.feature import ONE, THREE, Feature, carry_out, run_of
from tests.features.models import loaded_merged, loaded_plainly, of_family
from tests.laws.test_result_folder import require_loads
from tests.suites.test_generic_decoders import require_equal
from tests.support.plans import make_plan
from tests.support.tiny_families import ENCODERS, HIDDEN, PLUGGED, write_family
from tests.support.torch_ring import Case, make_executor
from tests.support.whole_models import built

TASKS = ("sequence-classification", "regression", "token-classification", "question-answering")
ROUNDING = ("deberta", *PLUGGED)
"""Families whose norms have steps in float32 inside any type."""
ALL = "lora[r=4,attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]"
SPLITS = {"one": ONE, "three": THREE}


def generic(model_type: str, task: str, adapter: str = "lora", **changes: Any) -> Feature:
    """A short run of two owners with two micro-batches, in float64."""
    values = {"adapter": adapter, "dtype": "float64", "microbatches": 2, "owners": ("a", "b"), **changes}
    arguments = of_family(f"generic/{model_type}-{task}-{adapter}", model_type, task, **values)
    return Feature(**{**arguments, "splits": SPLITS}, bound=1e-6 if model_type in ROUNDING else 1e-9)


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


@pytest.mark.parametrize(
    ("model_type", "task"),
    [*((name, task) for name in ENCODERS for task in TASKS), *((name, TASKS[0]) for name in PLUGGED)],
)
@pytest.mark.sampled(2)
def test_dropout_draws_the_numbers_of_the_architecture(model_type: str, task: str) -> None:
    """Before the blocks, in relative positions, and in the head of a model without a class in AdapterHub."""
    require_equal(generic(model_type, task, dropout=0.2), "three")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("deberta", {"pos_att_type": "p2c", "max_relative_positions": 7, "position_biased_input": False}),
        ("deberta", {"relative_attention": False, "pos_att_type": None}),
        ("deberta-v2", {"share_att_key": False, "norm_rel_ebd": "none", "position_buckets": -1, "type_vocab_size": 2}),
        ("deberta-v2", {"relative_attention": False, "pos_att_type": None, "position_biased_input": True}),
        ("ernie", {"use_task_id": True}),
        ("modernbert", {"classifier_pooling": "cls", "local_rope_theta": None, "global_rope_theta": 90.0}),
        ("modernbert", dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)),
        ("mpnet", {"hidden_act": "relu", "relative_attention_num_buckets": 40}),
        ("albert", {"embedding_size": HIDDEN, "hidden_act": "gelu"}),
    ],
)
@pytest.mark.sampled(2)
def test_option_of_an_encoder_is_carried_out(model_type: str, config: dict[str, Any]) -> None:
    """Another computation than the usual one equals that of one process, and the head's bytes are those of the plan."""
    feature = generic(model_type, "sequence-classification", config=config)
    require_equal(feature, "three")
    facts, labels = model_facts(feature.case.folder / "model", feature.case.job), len(feature.case.labels)
    head = {name: value for name, value in run_of(feature, "three").tensors.items() if ".ringtune." not in name}
    assert facts.head_bytes + facts.head_class_bytes * labels == 8 * sum(value.numel() for value in head.values())


@pytest.mark.parametrize("model_type", ENCODERS)
def test_config_that_names_every_key_is_read_as_the_class_has_it(tmp_path: Path, model_type: str) -> None:
    """All keys of the class are known, and those that are left out have its values."""
    config = transformers.CONFIG_MAPPING[model_type]()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    found = read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert found == read_config(tmp_path)
    known = {key for key in found if hasattr(config, key)}
    of_checkpoints = {"position_buckets", "norm_rel_ebd", "share_att_key"}  # the class has no attribute for them
    of_4 = {"position_embedding_type", "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}
    assert found.keys() - known <= of_checkpoints | (of_4 if transformers.__version__ >= "5" else set())
    assert {key: getattr(config, key) for key in known} == {key: found[key] for key in known}


def test_head_of_a_modernbert_begins_as_torch_makes_it(tmp_path: Path) -> None:
    """With either version of transformers, of which 5 would draw matrices of its own."""
    folder = write_family(tmp_path / "model", "modernbert", num_blocks=1)
    job = Case(folder=tmp_path, task="token-classification", adapter="lora", dtype="float32").job
    with torch.random.fork_rng(devices=[]):
        model = build_skeleton(folder, job).model
        torch.manual_seed(5)
        head = task_of(job.model.task).add(model, ("a", "b", "c"))
        torch.manual_seed(5)
        wanted = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False), torch.nn.Linear(HIDDEN, 3))
    values = head.state_dict()
    assert torch.equal(values["0.weight"], wanted[0].weight) and torch.equal(values["4.weight"], wanted[1].weight)


def test_config_of_transformers_5_is_that_of_4(tmp_path: Path) -> None:
    """Kinds of layers and rotary parameters by kind become a period and two bases."""
    theta = {"full_attention": {"rope_theta": 9e4}, "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"}}
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    values = {"model_type": "modernbert", "num_hidden_layers": 4, "layer_types": kinds, "rope_parameters": theta}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = read_config(tmp_path)
    assert (found["global_attn_every_n_layers"], found["global_rope_theta"], found["local_rope_theta"]) == (2, 9e4, 5e3)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "modernbert", "local_rope_theta": None}))
    assert read_config(tmp_path)["local_rope_theta"] == 160000.0  # null is no base in 5


@pytest.mark.parametrize("model_type", ["deberta", "deberta-v2", "mpnet"])
@pytest.mark.sampled(1)
def test_every_host_holds_relative_positions_as_the_plan_says(model_type: str) -> None:
    """A host that owns no rows has them once beside its blocks, and its estimate counts them."""
    feature = generic(model_type, "sequence-classification")
    plan = feature.plan_on("three").parts[0]
    piece, facts = plan.slice_of("c"), model_facts(feature.case.folder / "model", feature.case.job)
    held = module_bytes(make_executor(feature.case, plan, "c")._hosted.skeleton.base)
    blocks = piece.stop - piece.start
    config, known = read_config(feature.case.folder / "model"), FAMILIES[model_type]
    shapes = {name: stored.shape for name, stored in base_tensors(feature.case.folder / "model", config).items()}
    absent = next(name for name in shapes if name.startswith(known.shared_paths))
    left = {name: shape for name, shape in shapes.items() if name != absent}
    with pytest.raises(ModelError, match=f"has no tensor '{absent}'"):
        select_tensors(left, config, where="m", blocks=range(4), is_owner=True, with_decoder=False)
    assert held == blocks * (facts.block_bytes + facts.adapter_block_bytes) + facts.shared_bytes
    needs = node_memory(plan, "c", facts, optimizer="adamw", dtype="float64", activation_token_bytes=1.0)
    weights = sum(term.number * term.each_bytes for term in needs.terms if term.part == "weights")
    assert weights == blocks * facts.block_bytes + facts.shared_bytes


@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.sampled(2)
def test_inputs_that_all_blocks_read_are_in_the_plan(tmp_path: Path, model_type: str) -> None:
    """Masks, biases of heads and relative positions of a padded micro-batch take no more than its masks do."""
    folder = write_family(tmp_path / "model", model_type)
    job = Case(folder=tmp_path, task="sequence-classification", adapter="lora", dtype="float32").job
    facts, rows, tokens = model_facts(folder, job), 3, 40
    skeleton = built(folder, job, range(4))
    own = {value.untyped_storage().data_ptr() for value in skeleton.base.parameters()}
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[1, 30:] = 0
    context = skeleton.family.context(skeleton.base, torch.randn(rows, tokens, HIDDEN), mask)
    values = [value for each in context.values() for value in (*each.args, *each.kwargs.values())]
    storages = {s.data_ptr(): s.nbytes() for v in values if isinstance(v, torch.Tensor) for s in [v.untyped_storage()]}
    found = sum(size for pointer, size in storages.items() if pointer not in own)
    course = make_plan([("a", 0, 4)], ["a"]).course
    sizes = Sizes(course, facts, optimizer="sgd", dtype="float32", activation_token_bytes=1.0)
    assert found - 8 * tokens <= sizes.mask_bytes(rows, tokens) <= max(4 * found, rows * tokens**2 * 4)  # positions
