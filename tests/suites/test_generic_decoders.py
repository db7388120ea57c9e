"""Generic decoders equal plain transformers with adapters, on one and on three hosts; ``--all`` takes every family."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from edge.model.merge import merged_files
from edge.model.skeleton import build_skeleton, library_config_of
from ringtune.costs.model_facts import check_job, model_facts
from ringtune.errors import JobError, ModelError
from ringtune.job.job import load_job
from ringtune.models.families import FAMILIES
from ringtune.models.folder import base_tensors, read_config, read_headers
from tests.features.feature import ONE, THREE, Feature, carry_out, run_of
from tests.features.models import loaded_plainly, of_family, write_result
from tests.support import whole_models as whole
from tests.support.reference import adapter_of
from tests.support.tiny_families import (
    ENCODERS,
    GEMMA4_ALONE,
    GENERIC,
    IN_FLOAT32,
    LONGEST,
    VERSION,
    write_family,
)
from tests.support.torch_ring import Case, distance
from tests.support.whole_models import lora_run

ROUNDING = ("codegen", "gpt_neo", "gptj", "granitemoe", "granitemoeshared", "vaultgemma")
"""Families whose attention or experts have steps in float32 inside any type."""
SCORED = {"operations.policy": "two-stage", "operations.compute": 0.6}
LORA_32 = {"adapter.config": "lora", "model.dtype": "float32"}
SPLITS = {"one": ONE, "three": THREE}


def generic(model_type: str, adapter: str = "lora", **changes: Any) -> Feature:
    """A short run of two owners with two micro-batches, in float64 if transformers can."""
    dtype = "float32" if model_type in IN_FLOAT32 else "float64"
    values = {"adapter": adapter, "dtype": dtype, "microbatches": 2, "owners": ("a", "b"), **changes}
    arguments = of_family(f"generic/{model_type}-{adapter}", model_type, "causal-lm", **values)
    is_single = dtype == "float32" or model_type in (
        "gemma3n_text",
        "gemma4_text",
    )  # whose norms are in float32 inside any type
    bound = 1e-5 if is_single else 1e-6 if model_type in ROUNDING else 1e-9
    return Feature(**{**arguments, "splits": SPLITS}, bound=bound)


def require_equal(feature: Feature, split: str) -> None:
    """Trained tensors, losses and evaluations of a split are those of one process."""
    run = carry_out(feature, feature.plan_on(split))
    wanted = feature.reference(feature.case, run)
    assert distance(run.tensors, wanted.tensors) <= feature.bound
    assert run.losses == pytest.approx(wanted.losses, rel=max(feature.bound, 1e-6))
    assert wanted.evaluations
    for step, sums in wanted.evaluations.items():
        assert run.evaluations[step] == pytest.approx(sums, rel=max(feature.bound, 1e-6))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("model_type", GENERIC)
@pytest.mark.sampled(2)
def test_lora_of_a_generic_family_equals_one_process(model_type: str, split: str) -> None:
    """Plain transformers, adapters and autograd on the whole model; an owner that hosts nothing is among three."""
    require_equal(generic(model_type), split)


def all_adapters(model_type: str) -> str:
    """LoRA beside all matrices that have a name, after bottlenecks if the family has them."""
    family = FAMILIES[model_type]
    more = ",intermediate_lora=True,output_lora=True" if family.layout.up else ""
    bottlenecks = "double_seq_bn|" if "bottleneck" in family.methods else ""
    return f"{bottlenecks}lora[r=4,attn_matrices=['q','k','v']{more}]"


@pytest.mark.parametrize("model_type", GENERIC)
@pytest.mark.sampled(1)
def test_all_adapters_of_a_generic_family_equal_one_process(model_type: str) -> None:
    """Also those of the feed-forward part."""
    require_equal(generic(model_type, all_adapters(model_type)), "three")


@pytest.mark.parametrize("model_type", GENERIC)
@pytest.mark.sampled(1)
def test_dropout_of_a_generic_family_draws_the_same_numbers(model_type: str) -> None:
    """Before the blocks too, whose modules are called by the architecture's own forward."""
    require_equal(generic(model_type, dropout=0.2), "three")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("glm4_moe", {"first_k_dense_replace": 1}),
        ("dots1", {"first_k_dense_replace": 2}),
        ("ernie4_5_moe", {"moe_layer_start_index": 1}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
    ],
)
@pytest.mark.sampled(1)
def test_mixture_may_have_blocks_without_experts(model_type: str, config: dict[str, int]) -> None:
    """The plan takes the largest block for all."""
    feature = generic(model_type, config=config)
    require_equal(feature, "three")
    folder, sizes = feature.case.folder / "model", dict[str, int]()
    for name, tensor in read_headers(folder).items():
        if name.startswith("model.layers."):
            block = name.split(".")[2]
            sizes[block] = sizes.get(block, 0) + math.prod(tensor.shape)
    assert len(set(sizes.values())) > 1
    item = {"float32": 4, "float64": 8}[feature.case.dtype]
    facts = model_facts(folder, feature.case.job)
    assert facts.block_bytes == item * max(sizes.values())
    inside = [tensor.shape for name, tensor in read_headers(folder).items() if name.startswith("model.layers.")]
    assert facts.largest_matrix_params == max(math.prod(shape) for shape in inside if len(shape) == 2)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("opt", {"word_embed_proj_dim": 16}),
        ("mpt", {"logit_scale": 0.5}),
        ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 1}),
        ("gptj", {"tie_word_embeddings": True}),
        *(
            [
                ("gemma4_text", GEMMA4_ALONE),
                ("gemma4_text", {"num_kv_shared_layers": 0}),
                ("gemma3n_text", {"intermediate_size": (48, 48, 40, 48), "num_kv_shared_layers": 0}),
            ]
            if "gemma4_text" in GENERIC
            else []
        ),
    ],
)
def test_form_of_an_architecture_equals_one_process(model_type: str, config: dict[str, Any]) -> None:
    """OPT-350M's token table, a key that MPT's class does not read, DeepSeek-V2-Lite's queries, a tied head's bias.

    Gemma 4 with experts, and small models with inputs of blocks and no shared keys.
    """
    require_equal(generic(model_type, config=config), "three")


def test_weights_without_a_block_are_refused(tmp_path: Path) -> None:
    """A generic family's shapes are those of the file, but each block has to be in it."""
    folder = write_family(tmp_path, "olmo", num_blocks=1)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="no tensor of block 1"):
        base_tensors(folder, read_config(folder))


@pytest.mark.parametrize("model_type", [name for name in GENERIC if FAMILIES[name].packs])
@pytest.mark.sampled(1)
def test_packed_rows_of_a_generic_family_equal_single_ones(model_type: str) -> None:
    """The library makes masks of packed rows by their positions."""
    feature = generic(model_type, packing=True, max_length=40)
    require_equal(feature, "three")


def numbers_in(blocks: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Number of all values in each block, and under an empty name outside of blocks."""
    found = dict[str, int]()
    for name, shape in shapes.items():
        block = name.removeprefix(blocks).partition(".")[0] if name.startswith(blocks) else ""
        found[block] = found.get(block, 0) + math.prod(shape)
    return found


@pytest.mark.parametrize("model_type", GENERIC)
@pytest.mark.sampled(2)
def test_planned_bytes_of_a_generic_family_are_those_of_its_tensors(model_type: str) -> None:
    """Bytes of a block, of its LoRA and of all else are counted from config and headers, without torch."""
    feature = generic(model_type, all_adapters(model_type))
    run = carry_out(feature, feature.plan_on("one"))
    facts = model_facts(feature.case.folder / "model", feature.case.job)
    item = {"float32": 4, "float64": 8}[feature.case.dtype]
    blocks = FAMILIES[model_type].prefix + FAMILIES[model_type].block_prefix
    trained = numbers_in(blocks, {name: tensor.shape for name, tensor in run.tensors.items()})
    assert facts.adapter_block_bytes == item * max(trained.values())
    headers = read_headers(feature.case.folder / "model")
    stored = numbers_in(blocks, {name: tensor.shape for name, tensor in headers.items()})
    assert facts.embedding_bytes == item * stored.pop("")
    masks = LONGEST**2 if model_type == "gpt_neo" else 0  # a buffer of each block
    assert facts.block_bytes == item * max(stored.values()) + masks


@pytest.mark.parametrize("model_type", ["phi3", "gpt_neox"])
@pytest.mark.sampled(1)
def test_result_of_a_generic_family_loads_by_its_interface(tmp_path: Path, model_type: str) -> None:
    """The stock library loads LoRA beside one matrix of queries, keys and values."""
    feature = generic(model_type, dtype="float32", owners=("a",))
    feature = dataclasses.replace(feature, load=loaded_plainly, bound=1e-6)
    run = run_of(feature, "three")
    model = loaded_plainly(feature.case, write_result(run, tmp_path / "got"))
    assert not distance(adapter_of(model), run.tensors)
    assert all("qkv_proj" in name or "query_key_value" in name for name in run.tensors)


@pytest.mark.parametrize(
    ("model_type", "config"), [("glm4_moe", {}), ("gptj", {"tie_word_embeddings": True})], ids=["buffers", "tied"]
)
def test_merged_model_has_all_that_files_have(tmp_path: Path, model_type: str, config: dict[str, Any]) -> None:
    """GLM-4's routers are corrected by numbers that are no parameters; a tied head may have a bias of its own."""
    run, skeleton = lora_run(tmp_path, model_type, "causal-lm", "lora[r=2,alpha=6]", **config)
    (tmp_path / "merged").mkdir()
    for name, content in merged_files(load_job(run / "job.toml"), tmp_path / "base", run / "adapter", ()).items():
        (tmp_path / "merged" / name).write_bytes(bytes(content))
    merged, inputs = AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged")).eval(), whole.inputs_of("llama")
    with torch.no_grad():
        found, wanted = merged(**inputs).logits, whole.as_model(skeleton)(**inputs)["logits"]
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("phi3", {"adapter.config": "seq_bn"}, "a phi3 takes lora only"),
        ("granite", {"adapter.config": "loreft"}, "a granite takes bottleneck and lora only"),
        ("phi3", {"adapter.config": "lora[attn_matrices=['q']]"}, "one matrix, self_attn.qkv_proj, which 'v'"),
        ("mixtral", {"adapter.config": "lora[output_lora=True]"}, "experts of a mixtral stay frozen"),
        ("gptj", {"adapter.config": "lora", "train.packing": True}, "a row of a gptj attend to others"),
        ("gptj", {"adapter.config": "lora", "generation.rows": 1}, "behind which a gptj can't compute a token"),
        ("dots1", {**LORA_32, "train.compute": "bfloat16"}, "a dots1 joins numbers of two types"),
        (
            "opt",
            {"adapter.config": "lora[output_lora=True]", "offload.mode": {"a": "b"}},
            "can't fit LoRA beside fc2 of a opt",
        ),
        (
            "gpt_neox",
            {"adapter.config": "lora", **SCORED},
            "values of a gpt_neox block are one matrix",
        ),
        ("mixtral", {"adapter.config": "lora", **SCORED}, "experts of a mixtral block have no heads"),
        ("olmo2", {"adapter.config": "lora", **SCORED}, "a olmo2 block can't compute some of its heads alone"),
        (
            "olmo",
            {"adapter.config": "lora", "train.dropout": 0.1, **SCORED},
            "parts of a olmo block draw other",
        ),
        ("albert", {"adapter.config": "lora", "offload.mode": {"a": "b"}}, "beside albert_layers.0.attention.query"),
        ("deberta-v2", {"adapter.config": "seq_bn"}, "a deberta-v2 takes lora only"),
        ("deberta", {"adapter.config": "lora[attn_matrices=['q']]"}, "one matrix, attention.self.in_proj, which 'v'"),
        ("deberta", {"adapter.config": "lora", "model.dtype": "float32", "train.compute": "bfloat16"}, "two types"),
        ("mpnet", {"adapter.config": "lora", "train.max_length": 63}, "the model takes 62 tokens at most"),
    ],
)
def test_what_a_generic_family_has_not_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    """By name, before anything is planned."""
    write_family(tmp_path / "model", model_type, num_blocks=1)
    task = "sequence-classification" if model_type in ENCODERS else "causal-lm"
    job = Case(folder=tmp_path, task=task, adapter="lora").job.with_overrides(changes)
    with pytest.raises(JobError, match=re.escape(message)):
        check_job(job, read_config(tmp_path / "model"))
    if model_type == "opt":  # the planner may leave helpers out, and knows that it has to
        may = job.with_overrides({"offload.mode": "auto"})
        check_job(may, read_config(tmp_path / "model"))
        assert not model_facts(tmp_path / "model", may).pair_token_bytes


def test_experts_of_gpt_oss_read_their_own_tokens_alone(tmp_path: Path) -> None:
    """Out of training mode each one would read all tokens, on an accelerator."""
    folder = write_family(tmp_path / "model", "gpt_oss", num_blocks=1)
    job = Case(folder=tmp_path, task="causal-lm", adapter="lora", dtype="float32").job
    with torch.random.fork_rng(devices=[]):
        (block,) = build_skeleton(folder, job).blocks
    block.eval()
    assert block.get_submodule("mlp.experts").training and not block.get_submodule("mlp.router").training


def test_one_rotary_base_holds_for_blocks_with_a_window_too(tmp_path: Path) -> None:
    """Transformers 5 alone would take its default for OLMo 3's."""
    config = {"model_type": "olmo3", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300, "rope_theta": 1e4}))
    found = library_config_of(read_config(tmp_path))
    tables = getattr(found, "rope_parameters", None) or {"all": {"rope_theta": found.rope_theta}}
    assert {table["rope_theta"] for table in tables.values()} == {1e4}


@pytest.mark.skipif(FAMILIES["qwen3_5_text"].since <= VERSION, reason="this transformers has it")
def test_family_of_a_later_transformers_is_refused_with_its_version(tmp_path: Path) -> None:
    """A plan needs no library; a node says which version it needs."""
    config = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text", **config}))
    with pytest.raises(ModelError, match=r"has no qwen3_5_text; install version 5 or later"):
        library_config_of(read_config(tmp_path))
