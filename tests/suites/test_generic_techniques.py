"""Techniques on families that run by their architecture's own forward; ``--all`` takes every family."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from edge.model.heads import task_of
from edge.model.owner import owner_units
from edge.model.skeleton import build_skeleton
from edge.model.slice import BlockRunner
from edge.techniques.activation_checkpointing import saved_tensors, storage_bytes
from edge.techniques.micro_batches import tensors_in
from edge.techniques.offload.sites import sites_of
from edge.techniques.velora import Projections
from ringtune.costs.activation_costs import graph_terms, projected_blocks
from ringtune.costs.memory_sizes import DTYPE_BYTES, Sizes, projected_values, score_token_bytes
from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.costs.profile import ModelFacts
from ringtune.errors import JobError
from ringtune.job.job import Job
from ringtune.models.auxiliary_models import LETTERS
from ringtune.models.families import FAMILIES
from ringtune.models.family import LANGUAGE_TASKS
from ringtune.models.folder import NO_WEIGHTS, read_config
from ringtune.models.kept_inputs import with_shared_inputs
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import Score
from ringtune.schedule.saved_activations import ADAPTER_DOWN, LAYERS, Velora
from ringtune.schedule.units import Range
from ringtune.techniques.activation_checkpointing import check_layers, proposed_velora
from tests.edge.model.test_pattern_sizes import half_of_a_block_keeps_what_is_counted
from tests.edge.techniques.test_operations import check_equal, choice_of, make_ring, score, score_turn
from tests.edge.techniques.test_operations import one_process as scores_of_one_process
from tests.features.feature import Feature, Run, Wanted, carry_out, on_one_node, planned
from tests.features.memory import AUTOCAST, literally
from tests.features.models import of_family
from tests.features.offload import ON_THEIR_OWN, SLICES, helped_plan, users
from tests.features.operations import RealScores, masked, random_table
from tests.suites.test_generic_decoders import ROUNDING, all_adapters, require_equal
from tests.suites.test_generic_decoders import generic as decoder
from tests.suites.test_generic_encoders import ALL as LORA_AT_ALL
from tests.suites.test_generic_encoders import generic as encoder
from tests.support import hift_reference
from tests.support.choosing import make_choice
from tests.support.hand_ring import make_bench
from tests.support.live_bytes import LiveBytes
from tests.support.operation_masks import mixed_table
from tests.support.operation_masks import one_process as masked_process
from tests.support.plans import make_plan
from tests.support.tiny_families import (
    DIVIDED,
    ENCODERS,
    GEMMA4_ALONE,
    GENERIC,
    IN_FLOAT32,
    VERSION,
    sizes_of,
    write_family,
)
from tests.support.torch_ring import Case, distance
from tests.support.whole_models import built

ROWS = (*GENERIC, *ENCODERS)
SPLITS = ("one", "three")
ALONE = [name for name in ROWS if name != "gemma3n_text"]
"""Families with models whose blocks pass on the hidden state alone."""
OF_ALONE: dict[str, Any] = {"gemma4_text": {"config": GEMMA4_ALONE}}
"""Changes of a feature with such a model."""

ROUNDED = (
    *(*ROUNDING, "cohere2", "deepseek_v2", "diffllama", "exaone_moe", "glm4_moe_lite", "helium", "hy_v3", "lfm2_moe"),
    *("mimo_v2_flash", "minimax_m2", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "solar_open"),
)
"""Families with steps in float32 before weights that train here: norms, routers, and factors of attention."""


def generic(model_type: str, adapter: str = "lora", **changes: Any) -> Feature:
    """A short run; where steps of the library round, without an optimizer that makes a rounded zero large."""
    values = {"optimizer": "sgd"} if model_type in (*IN_FLOAT32, *ROUNDING) else {}
    if model_type in ENCODERS:
        return encoder(model_type, "sequence-classification", adapter, **values | changes)
    found = decoder(model_type, adapter, **values | changes)
    return dataclasses.replace(found, bound=1e-6) if model_type in ROUNDED else found


def wide(folder: Path, model_type: str, sizes: Any = None, **changes: Any) -> tuple[Path, Job]:
    """A model of wide blocks and a job for it, in which norms count as little as in a large one."""
    keys = ("hidden_size", "intermediate_size") if model_type in ENCODERS else ("size", "n_embd", "d_model", "head_dim")
    wider = {key: 8 * value for key, value in sizes_of(model_type).items() if any(part in key for part in keys)}
    model = write_family(folder / "model", model_type, **{**wider, "vocab_size": 300, **(sizes or {})})
    job = generic(model_type, "full").case.job
    changes = {"model.dtype": "float32", "train.max_length": 50, "train.microbatches": 1, **changes}
    return model, job.with_overrides(changes)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("model_type", ROWS)
@pytest.mark.sampled(1)
def test_own_weights_of_a_generic_family_equal_one_process(model_type: str, split: str) -> None:
    """All parameters of each block train, those of experts and routers too, under their names in plain transformers."""
    require_equal(generic(model_type, "full", num_steps=6), split)


def groupwise(case: Case, run: Run) -> Wanted:
    """One process that trains a group at a step; all that its model saves."""
    plan = case.plan((("a", 0, 4),))
    found = hift_reference.train_hift(case.job, plan, case.folder / "model", case.datasets())
    state = {name: value for name, value in found.model.state_dict().items() if not name.endswith(NO_WEIGHTS)}
    if case.task in LANGUAGE_TASKS and found.model.config.tie_word_embeddings:
        del state[f"{FAMILIES[found.model.config.model_type].head}.weight"]
    return Wanted(tensors=state, losses=found.losses, evaluations=dict(found.evaluations))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("model_type", ALONE)
@pytest.mark.sampled(1)
def test_hift_of_a_generic_family_equals_one_process(model_type: str, split: str) -> None:
    """Embedding, blocks and head in turn; the result has every tensor of the model, also those that stay frozen."""
    changes = {"method": "hift", "hift": "group_size = 2", "num_steps": 4, "checkpoint_every": 0}
    changes |= OF_ALONE.get(model_type, {})
    feature = dataclasses.replace(generic(model_type, "full", **changes), reference=groupwise)
    require_equal(feature, split)


@pytest.mark.parametrize(
    ("model_type", "adapter", "config"),
    [
        *((name, adapter, None) for name in ROWS for adapter in ("all", "full")),
        *(
            (name, "full", own)
            for name in OF_ALONE
            for own in (GEMMA4_ALONE, {"num_kv_shared_layers": 0})
            if name in GENERIC
        ),
    ],
)
@pytest.mark.sampled(4)
def test_memory_of_a_generic_family_is_not_below_what_a_block_keeps(
    tmp_path: Path, model_type: str, adapter: str, config: Mapping[str, Any] | None
) -> None:
    """The bound from widths holds for inputs of all matrices, norms, gates, experts and scores, and is not far away."""
    adapters = LORA_AT_ALL if model_type in ENCODERS else all_adapters(model_type)
    model, job = wide(tmp_path, model_type, config, **{"adapter.config": adapters if adapter == "all" else adapter})
    kept = make_bench(model, job).activation_token_bytes()
    most = 2.0 if model_type in ENCODERS and adapter == "all" else 2.5
    assert kept <= computed_token_bytes(model_facts(model, job), job) <= most * kept


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mixtral", "modernbert"])
@pytest.mark.sampled(1)
def test_long_rows_keep_what_is_planned_and_share_one_mask(tmp_path: Path, model_type: str) -> None:
    """Scores of each token for all others are planned where values have another width than keys; elsewhere are none."""
    planned, kept = dict[int, float](), dict[int, float]()
    for tokens in (64, 256):
        sizes, changes = {"max_position_embeddings": 256}, {"adapter.config": "lora", "train.max_length": tokens}
        model, job = wide(tmp_path / str(tokens), model_type, sizes, **changes)
        planned[tokens] = computed_token_bytes(model_facts(model, job), job)
        kept[tokens] = make_bench(model, job).activation_token_bytes()
    assert planned[256] - planned[64] == pytest.approx(kept[256] - kept[64], abs=0.1)
    assert kept[256] <= planned[256]


DELTA_NETS = [name for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") if name in GENERIC]


@pytest.mark.parametrize("tokens", [40, 64, 130])
@pytest.mark.parametrize("model_type", ["albert", "lfm2", "mixtral", "olmo", *DELTA_NETS])
@pytest.mark.sampled(4)
def test_planned_bytes_of_a_running_block_are_not_below_its_peak(tmp_path: Path, model_type: str, tokens: int) -> None:
    """Of a forward without graph, and of forward and backward with it; of a delta net not far above it."""
    heads = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    wide_heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 64, **heads} if model_type in DELTA_NETS else {}
    sizes = {"max_position_embeddings": 256, **wide_heads}
    model, job = wide(tmp_path, model_type, sizes=sizes, **{"adapter.config": "lora", "train.max_length": tokens})
    rows, facts = 2, model_facts(model, job)
    skeleton = built(model, job, range(1))
    for name, value in skeleton.blocks[0].named_parameters():
        value.requires_grad_(".ringtune." in name)
    runner, mask = BlockRunner(skeleton, dropout=0.0, seed=0), torch.ones(rows, tokens, dtype=torch.int64)
    x = torch.randn(rows, tokens, skeleton.base.config.hidden_size, requires_grad=True)
    context = runner.context(x, mask)
    given = [value for value in tree_leaves([list(each) for each in context.values()]) if torch.is_tensor(value)]
    count = LiveBytes([*skeleton.base.parameters(), *skeleton.base.buffers(), *given, x, mask])
    with torch.no_grad():
        free = count.peak_of(lambda: runner.run(x, mask, context, 0, 1).sum())[1]
    y, forward = count.peak_of(lambda: runner.run(x, mask, context, 0, 1))
    kept, dy = count.live_bytes, torch.randn_like(y)
    peak = max(forward, kept + count.peak_of(lambda: y.backward(dy))[1], free)
    course = make_plan([("a", 0, 4)], ["a"]).course
    measured, planned = (
        Sizes(
            dataclasses.replace(course, max_length=tokens),
            facts,
            optimizer="sgd",
            dtype="float32",
            activation_token_bytes=each,
        )
        for each in (kept / rows / tokens, computed_token_bytes(facts, job))
    )
    assert free <= measured.work_bytes(rows * tokens) and peak <= kept + measured.work_bytes(rows * tokens)
    if model_type in DELTA_NETS and (model_type != "qwen3_next" or VERSION == 4):  # of which 5 keeps less
        both = planned.kept_bytes(rows * tokens) + planned.work_bytes(rows * tokens)
        assert peak <= both <= 2.7 * peak


@pytest.mark.parametrize(
    ("model_type", "changes", "count"),
    [
        *((name, {}, 2) for name in ("cohere2", "gemma2", "gpt_oss", "llama4_text", "qwen2")),
        *((name, {}, 1) for name in ("lfm2", "mixtral")),
        ("qwen2", {"max_window_layers": 4}, 1),
        ("qwen2", {"max_window_layers": 0}, 1),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}, 2 if VERSION == 5 else 1),
    ],
)
@pytest.mark.sampled(3)
def test_planned_masks_are_those_that_blocks_read(
    tmp_path: Path, model_type: str, changes: dict[str, Any], count: int
) -> None:
    """One, and one more where some blocks have a window; those without attention read none."""
    model, job = write_family(tmp_path, model_type, **changes), generic("olmo", "lora").case.job
    skeleton = built(model, job, range(4), dtype=torch.float32)
    x, mask = torch.randn(2, 16, skeleton.base.config.hidden_size), torch.ones(2, 16, dtype=torch.int64)
    mask[0, 12:] = 0
    context = BlockRunner(skeleton, dropout=0.0, seed=0).context(x, mask)
    read = [value for value in tree_leaves(context) if torch.is_tensor(value)]
    assert {*map(id, read)} == {*map(id, tensors_in(context))}, "a node's live bytes have all of them"
    masks = {value.data_ptr() for value in read if value.dim() == 4}
    assert len(masks) == count
    planned = 1 + FAMILIES[model_type].dimensions(read_config(model)).more_masks
    assert planned == (2 if model_type == "qwen2_moe" else count)  # as transformers 5 has it


@pytest.mark.parametrize("method", ["all", "hift"])
@pytest.mark.parametrize("model_type", ALONE)
@pytest.mark.sampled(1)
def test_planned_bytes_of_own_weights_are_those_that_train(model_type: str, method: str) -> None:
    """Of a block, and where all parameters train of embedding and head too, counted without torch."""
    feature = generic(model_type, "full", method=method, **OF_ALONE.get(model_type, {}))
    job, labels = feature.case.job, len(feature.case.labels)
    facts, item = model_facts(feature.case.folder / "model", job), DTYPE_BYTES[job.model.dtype]
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(feature.case.folder / "model", job)
        units = owner_units(skeleton, task_of(job.model.task).add(skeleton.model, feature.case.labels))
    blocks = [sum(value.numel() for value in block.parameters() if value.requires_grad) for block in skeleton.blocks]
    assert facts.adapter_block_bytes == item * max(blocks)
    ends = {unit: item * sum(value.numel() for value in values.values()) for unit, values in units.items()}
    if model_type in GENERIC and (method == "all" or facts.is_tied):  # a skeleton's decoder is neither frozen nor tied
        ends[4] -= item * sum(value.numel() for value in skeleton.model.head.parameters())
    assert (facts.embedding_train_bytes, facts.head_bytes + facts.head_class_bytes * labels) == (ends[-1], ends[4])


def test_block_that_only_a_file_has_is_not_counted(tmp_path: Path) -> None:
    """Those of DeepSeek V3 and GLM-4 MoE end with one that predicts further tokens."""
    folder, job = write_family(tmp_path, "deepseek_v3"), generic("deepseek_v3", "full").case.job
    facts, path = model_facts(folder, job), folder / "model.safetensors"
    more = {"model.layers.4.eh_proj.weight": torch.zeros(300, 300)}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    assert model_facts(folder, job) == facts


def adapters_at_all(model_type: str) -> str:
    """LoRA beside all matrices that have a name and multiply hidden states alone."""
    letters = [letter for letter in "qkv" if LETTERS[letter] not in FAMILIES[model_type].twice]
    more = ",intermediate_lora=True,output_lora=True" if FAMILIES[model_type].layout.up else ""
    return f"lora[r=4,attn_matrices={letters}{more}]".replace('"', "'")


def projected(model_type: str, adapter: str) -> Velora:
    """VeLoRA in all blocks, at every layer that trains and whose input nobody else keeps."""
    feature = generic(model_type, adapter)
    inputs = model_facts(feature.case.folder / "model", feature.case.job).all_inputs
    layers = with_shared_inputs([layer for layer in LAYERS if layer != ADAPTER_DOWN], inputs)
    return Velora(blocks=(Range(0, 4),), layers=layers, parts=5)


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("model_type", ROWS)
@pytest.mark.sampled(1)
def test_velora_of_a_generic_family_equals_the_paper(model_type: str, adapter: str) -> None:
    """The paper's formulas word by word, at the matrices that the family's row names."""
    config = adapter if adapter == "full" else adapters_at_all(model_type)
    feature = generic(model_type, config, eval_every=0)
    velora = projected(model_type, config)
    feature = dataclasses.replace(feature, plan=planned(velora=velora), reference=literally)
    run = carry_out(feature, feature.plan_on("three"))
    wanted = literally(feature.case, run)
    assert distance(run.tensors, wanted.tensors) <= feature.bound
    assert wanted.losses is not None and run.losses == pytest.approx(wanted.losses, rel=max(feature.bound, 1e-9))


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("model_type", ROWS)
@pytest.mark.sampled(1)
def test_velora_of_a_generic_family_saves_what_the_plan_says(tmp_path: Path, model_type: str, adapter: str) -> None:
    """At least that, at the layers that the paper's authors take."""
    config = adapter if adapter == "full" else adapters_at_all(model_type)
    model, job = wide(tmp_path, model_type, **{"adapter.config": config})
    facts = model_facts(model, job)
    course = generic(model_type, config).plan_on("one").course
    ways = [proposed_velora(job, course, facts)]
    if facts.unlike_inputs:
        ways.append(Velora(blocks=(Range(0, 2),), layers=projected(model_type, config).layers, parts=8))
    for velora in filter(None, ways):
        planned_values = projected_values(dataclasses.replace(course, velora=velora), facts, has_dropout=False)
        for block in range(2 if facts.unlike_inputs else 1):
            before, after = (kept_values(model, job, one, block=block) for one in (None, velora))
            assert before - after >= 0.98 * planned_values[block] >= 0
        if model_type == "qwen3_next" and adapter == "full":  # the other blocks have a delta net
            assert [bool(values) for values in planned_values] == [False, True] * 2
            require_planned_by_block(dataclasses.replace(course, velora=velora), facts, planned_values)


def require_planned_by_block(course: Course, facts: ModelFacts, saved: Sequence[int]) -> None:
    """The graphs of each kind of block are a term of their own."""
    sizes = Sizes(course, facts, optimizer="adamw", dtype="float32", activation_token_bytes=1e6)
    terms = [term for term in graph_terms(course, (), (0, 4), sizes, 1) if "projections" in term.what]
    projected = projected_blocks(course, range(4))
    tokens, count = course.microbatch_sizes()[0] * course.max_length, len(course.microbatch_sizes())
    each_bytes = [round(tokens * (1e6 - 4 * saved[block])) for block in projected]
    assert len(terms) == 2 and sum(term.total_bytes for term in terms) == count * sum(each_bytes)


def kept_values(folder: Path, job: Job, velora: Velora | None = None, *, block: int = 0, scored: bool = False) -> float:
    """Values per token of the saved tensors of a block, parameters included; all of these train where it is scored."""
    skeleton = built(folder, job, [block])
    for parameter in skeleton.blocks[block].parameters() if scored else ():
        parameter.requires_grad_(True)
    runner, used = BlockRunner(skeleton, dropout=0.0, seed=0), dict[str, torch.Tensor]()
    around = None if velora is None else Projections(velora, skeleton, start=block, stop=block + 1, seed=0).block
    mask = torch.ones(4, 40, dtype=torch.int64)
    entering = model_facts(folder, job).entering
    x = torch.randn(4, 40, entering[block] if entering else skeleton.base.config.hidden_size, requires_grad=True)
    context = runner.context(x, mask)
    wrapped = None if around is None else lambda index: around(index, used)
    y = runner.run(x, mask, context, block, block + 1, around=wrapped)
    return sum(storage_bytes(saved_tensors(y)).values()) / 4 / mask.numel()


@pytest.mark.parametrize(
    ("model_type", "adapter", "layer", "message"),
    [
        ("mixtral", "full", "down", "'down', which does not train in this model"),
        ("phi3", "full", "gate", "'gate', which does not train in this model"),
        ("deberta-v2", "full", "value", "'value', but query and key of a deberta-v2 multiply relative positions too"),
        ("deberta-v2", "lora", "adapter_down:query", "'adapter_down:query', but query and key of a deberta-v2"),
        ("opt", "full", "down", "activation function keeps the input"),
    ],
)
def test_layer_that_a_row_lacks_is_refused(
    tmp_path: Path, model_type: str, adapter: str, layer: str, message: str
) -> None:
    """By name, when the run is planned."""
    changes = {"adapter.config": adapter, "memory.activations": "velora", "velora.layers": [layer]}
    model, job = wide(tmp_path, model_type, **changes)
    with pytest.raises(JobError, match=re.escape(message)):
        check_layers(job.velora.layers, model_facts(model, job).kept_inputs, adapter)


@pytest.mark.parametrize("model_type", [name for name in ROWS if name != "albert"])
@pytest.mark.sampled(1)
def test_helpers_of_a_generic_family_train_what_hosts_would(model_type: str) -> None:
    """LoRA beside all matrices and bottlenecks of several hosts, some with a helper."""
    bottlenecks = "double_seq_bn|" if "bottleneck" in FAMILIES[model_type].methods else ""
    config = adapters_at_all(model_type)
    if FAMILIES[model_type].unfitted:
        config = "lora[r=4,attn_matrices=['q','k','v']]"
    feature = generic(model_type, bottlenecks + config, method="all")
    way = "some-of-several-hosts"
    plan = functools.partial(helped_plan, way=way)
    require_equal(dataclasses.replace(feature, splits={way: SLICES[way]}, plan=plan), way)
    model, job = feature.case.folder / "model", feature.case.job
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(model, job)
    sites = [sites_of(skeleton, block) for block in range(4)]
    values = [sum(site.outputs + site.inputs * (site.source == site.name) for site in block) for block in sites]
    assert model_facts(model, job).pair_token_bytes == max(values) * DTYPE_BYTES[job.model.dtype]


SHORT: dict[str, Any] = {"optimizer": "sgd", "num_steps": 2, "eval_every": 0, "checkpoint_every": 0}


@pytest.mark.parametrize("model_type", ["lfm2", "bert"])
def test_users_of_other_kinds_train_as_in_plain_loops(model_type: str) -> None:
    """Modules of a kind have arguments of their own; products in bfloat16 are those of every kind."""
    arguments, changes, bound = of_family("", "lfm2"), SHORT, 1e-9
    more, others = {"folder": arguments["folder"], **arguments["changes"]}, {"ben": "lora[r=8]"}
    if model_type == "bert":
        more, others = {}, {"anna": "linear", "ben": "linear"}
        changes, bound = SHORT | {"dtype": "float32", "compute": "bfloat16"}, AUTOCAST
    feature = users("-other-kinds", ON_THEIR_OWN, others, **{**more, **changes, "adapter": "lora[r=4]"})
    run = carry_out(feature, feature.plan_on("three"))
    assert distance(run.tensors, feature.reference(feature.case, run).tensors) <= bound


def test_adapters_of_single_users_have_the_sizes_of_unlike_blocks() -> None:
    """LFM2's convolutions have wider matrices than its config says of attention."""
    feature, config = generic("lfm2"), "lora[attn_matrices=['q','k','v']]"
    folder, job = feature.case.folder / "model", feature.case.job
    own = {"data.user": "user", "offload.mode": "auto", "offload.users": "alone", "offload.adapters": {"anna": config}}
    (kind,) = model_facts(folder, job.with_overrides(own)).kinds
    alone = model_facts(folder, job.with_overrides({"adapter.config": config}))
    assert (kind.adapter_block_bytes, kind.pair_token_bytes) == (alone.adapter_block_bytes, alone.pair_token_bytes)


@pytest.mark.parametrize("model_type", ALONE)
@pytest.mark.sampled(1)
def test_operations_of_whole_blocks_of_a_generic_family_equal_one_process(model_type: str) -> None:
    """A block is computed without gradient or passed by, whatever is in it."""
    table = random_table(3, ("a", "b"), "11123", num_batches=2)
    changes: dict[str, Any] = {"optimizer": "sgd", "microbatches": 4, "eval_every": 0, **OF_ALONE.get(model_type, {})}
    feature = generic(model_type, method="all", operations=table, **changes)
    run = carry_out(feature, feature.plan_on("three"))
    trained = {name: value for name, value in run.tensors.items() if ".ringtune." in name}
    wanted = masked(feature.case, run).tensors
    assert distance(trained, {name: wanted[name] for name in trained}) <= feature.bound


def divided(model_type: str, adapter: str, split: str, velora: Velora | None = None) -> None:
    """A run with tables of two subnets, of a family's 4 heads over 2, equals one process with masks."""
    values: dict[str, Any] = {"method": "all", "microbatches": 4, "num_steps": 3, "eval_every": 0, "optimizer": "sgd"}
    values |= {"local_iterations": 1, "checkpoint_every": 2, "operations": mixed_table(7, ("a", "b"), 2)}
    feature = dataclasses.replace(generic(model_type, adapter, **values), plan=planned(velora=velora))
    run = carry_out(feature, feature.plan_on(split))
    trained = {name: value for name, value in run.tensors.items() if adapter == "full" or ".ringtune." in name}
    wanted = masked_process(feature.case, velora)
    assert distance(trained, {name: wanted[name] for name in trained}) <= feature.bound


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("adapter", ["lora", "full", "all"])
@pytest.mark.parametrize("model_type", DIVIDED)
@pytest.mark.sampled(1)
def test_subnets_of_a_generic_family_equal_one_process(model_type: str, adapter: str, split: str) -> None:
    """Subnets are computed with and without gradient and passed by in one block, which runs by its own forward."""
    divided(model_type, all_adapters(model_type) if adapter == "all" else adapter, split)


@pytest.mark.parametrize("model_type", DIVIDED)
@pytest.mark.sampled(1)
def test_projected_inputs_of_subnets_of_a_generic_family_equal_the_paper(model_type: str) -> None:
    """The paper's formulas where the inputs of other subnets than full ones are zeros."""
    divided(model_type, "full", "three", velora=projected(model_type, "full"))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("model_type", "subnets", "scored"),
    [*((name, 1, "base") for name in ALONE), *((name, 2, of) for name in DIVIDED for of in ("base", "adapter"))],
)
@pytest.mark.sampled(2)
def test_scores_of_a_generic_family_equal_one_process(model_type: str, subnets: int, scored: str, split: str) -> None:
    """Of whole blocks, with norms, routers and experts, of which one without tokens has no gradient.

    Of two subnets the rows and columns of each; norms and biases of output matrices belong to none.
    """
    adapter = "lora[init_weights='bert']" if scored == "adapter" else "lora"
    feature = generic(model_type, adapter, **(OF_ALONE.get(model_type, {}) if subnets == 1 else {}))
    hand = make_ring(feature.case, feature.splits[split], choice_of(Score.TAYLOR, Score.FISHER, subnets, scored=scored))
    turn = score_turn(hand.plan, "b")
    bound = feature.bound if feature.bound < 1e-5 else 1e-3
    check_equal(score(hand, turn), scores_of_one_process(feature.case, hand.plan, turn), bound)


@pytest.mark.parametrize("adapter", ["lora", "full"])
@pytest.mark.parametrize("model_type", DIVIDED)
@pytest.mark.sampled(1)
def test_half_of_a_block_of_a_generic_family_keeps_at_most_what_is_counted(
    tmp_path: Path, model_type: str, adapter: str
) -> None:
    """As of other families: without half of what its subnets keep, at most a quarter too much (nanochat 21 %)."""
    model, job = wide(tmp_path, model_type, **{"adapter.config": adapter, "train.batch_size": 8})
    half_of_a_block_keeps_what_is_counted(model, job, most=1.25)


@pytest.mark.parametrize("model_type", ["gpt_neox", "granite", "lfm2", "mixtral", "modernbert"])
@pytest.mark.sampled(1)
def test_operations_of_a_generic_family_are_chosen_by_scores(model_type: str) -> None:
    """Two refreshes on three hosts give what one node alone computes; blocks that can be divided have two subnets."""
    subnets = 2 if model_type in DIVIDED else 1
    choice = make_choice(subnets=subnets, refresh_steps=2, backward_score=Score.TAYLOR.value, forward_score="fisher")
    feature = generic(model_type, method="all", num_steps=4, eval_every=0, optimizer="sgd", microbatches=4)
    feature = dataclasses.replace(
        feature,
        plan=planned(choice=choice),
        ring=lambda plan, carrier: {"chooser": RealScores(plan, carrier)},
        reference=on_one_node,
    )
    run = carry_out(feature, feature.plan_on("three"))
    assert distance(run.tensors, feature.reference(feature.case, run).tensors) <= feature.bound


@pytest.mark.parametrize("model_type", ALONE)
@pytest.mark.sampled(1)
def test_memory_of_scores_is_not_below_what_a_block_keeps_more(tmp_path: Path, model_type: str) -> None:
    """Inputs of all matrices, norms and experts, beside what it keeps for its adapter."""
    sizes = OF_ALONE.get(model_type, {}).get("config")
    model, job = wide(tmp_path, model_type, sizes, **{"adapter.config": "lora"})
    scored = kept_values(model, job, scored=True)
    more = scored - kept_values(model, job)
    assert more <= score_token_bytes(model_facts(model, job), 1) <= max(10 * more, scored)
