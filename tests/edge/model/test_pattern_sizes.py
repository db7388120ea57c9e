"""What a graph keeps of a part of a block, and besides for scores, against the tensors that torch really keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from edge.profiler import benchmark
from edge.profiler.benchmark import Bench, uneven_mask
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import model_facts
from ringtune.job.job import Adapter, Job, Model
from ringtune.models.adapter_config import trains_own_weights
from ringtune.models.families import FAMILIES
from ringtune.schedule.actions import Op
from ringtune.schedule.operation_tables import BlockCapacity, Choice
from ringtune.schedule.turns import StepKind
from tests.support import tiny_families
from tests.support.hand_ring import make_bench
from tests.support.plans import make_plan

_CAPACITY = BlockCapacity(full=8.0, forward_only=0.0, forward=1.0, backward=1.0)


def wide_model(folder: Path, model_type: str, adapter: str, dropout: float = 0.0) -> tuple[Path, Job]:
    """A folder with a wide model of two blocks, and a job on it."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 128}
    widths: dict[str, dict[str, object]] = {
        "distilbert": {"dim": 256, "hidden_dim": 1024},
        "gpt2": {"n_embd": 256, "n_inner": 1024, "n_positions": 128},
        "llama": {**wide, "intermediate_size": 704},
        "mistral": {**wide, "intermediate_size": 704, "head_dim": None},
        **{name: {**wide, "intermediate_size": 704} for name in tiny_families.PLUGGED},
        "vit": {"hidden_size": 256, "intermediate_size": 1024, "image_size": 28},
    }
    sizes: dict[str, Any] = dict(widths.get(model_type, wide))
    if model_type in tiny_families.PLUGGED and "head_dim" in FAMILIES[model_type].config_keys:
        sizes["head_dim"] = 64
    folder = tiny_families.write_family(folder, model_type, num_blocks=2, **sizes)
    task = FAMILIES[model_type].tasks[0]
    job = Job(model=Model(path=str(folder), task=task), adapter=Adapter(config=adapter)).with_overrides(
        {"train.max_length": 50, "train.batch_size": 8, "train.microbatches": 1, "train.dropout": dropout}
    )
    return folder, job


def kept_bytes(bench: Bench, *, is_part: bool, kind: StepKind = StepKind.TRAIN) -> float:
    """Bytes per padded token that one block's graph keeps."""
    size, item = bench.sizes[0], bench._item(lowest=False, is_part=is_part, kind=kind)
    bench._put_hidden(item, bench._random(size), uneven_mask(size))
    bench._run(Op.FORWARD_FREE, item)
    before = bench._executor.live_bytes()
    bench._run(Op.FORWARD, item)
    found = bench._executor.live_bytes() - before
    bench._executor.forget_turn(item)
    return found / (size.rows * size.tokens)


@pytest.mark.parametrize(
    ("adapter", "dropout"), [*((name, 0.0) for name in ("seq_bn", "lora", "full")), ("lora", 0.1), ("full", 0.1)]
)
@pytest.mark.parametrize("model_type", tiny_families.MODEL_TYPES)
@pytest.mark.sampled(2)
def test_half_of_a_block_keeps_at_most_what_is_counted(
    tmp_path: Path, model_type: str, adapter: str, dropout: float
) -> None:
    """A graph with half of the subnets is counted as all of it without half of what subnets keep.

    That is at most 20 % too much. The mask, which a micro-batch has once, may be in either; so may a number a head.
    """
    half_of_a_block_keeps_what_is_counted(*wide_model(tmp_path, model_type, adapter, dropout))


def half_of_a_block_keeps_what_is_counted(folder: Path, job: Job, most: float = 1.2) -> None:
    """Compare what graphs of a whole block and of half of it keep with the sizes of a plan, up to a factor."""
    facts = model_facts(folder, job)
    whole, half = (kept_bytes(make_bench(folder, job, subnets=2), is_part=is_part) for is_part in (False, True))
    plan = make_plan([("a", 0, 2)], ["a"], num_blocks=2, hidden_size=facts.hidden_size)
    sizes = Sizes(
        plan.course, facts, optimizer="sgd", dtype="float32", activation_token_bytes=whole,
        trains_own_weights=trains_own_weights(job.adapter.config),
    )  # fmt: skip
    counted = sizes.kept_bytes(1) - sizes.kept_in_subnets_bytes(1) / 2
    shape = make_bench(folder, job).sizes[0]
    mask = sizes.mask_bytes(shape.rows, shape.tokens) / (shape.rows * shape.tokens)
    assert half <= 1.005 * counted + mask
    assert counted <= most * half


@pytest.mark.parametrize("adapter", ["seq_bn", "lora", "full"])
@pytest.mark.parametrize("model_type", tiny_families.MODEL_TYPES)
@pytest.mark.sampled(2)
def test_graphs_of_scores_keep_at_most_what_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, adapter: str
) -> None:
    """Linear layers whose weights get a gradient keep their inputs, each once; own weights that train do so anyway."""
    chosen = Choice(policy="two-stage", subnets=2, capacities=(_CAPACITY,), backward_score="fisher")
    monkeypatch.setattr(benchmark, "_any_table", lambda subnets: chosen)
    folder, job = wide_model(tmp_path, model_type, adapter)
    facts = model_facts(folder, job)
    bench = make_bench(folder, job, subnets=2)
    step, score = (kept_bytes(bench, is_part=False, kind=kind) for kind in (StepKind.TRAIN, StepKind.SCORE))
    course = dataclasses.replace(bench._plan.course, choice=chosen)
    sizes = Sizes(
        course, facts, optimizer="sgd", dtype="float32", activation_token_bytes=step,
        trains_own_weights=trains_own_weights(adapter),
    )  # fmt: skip
    counted = sizes.kept_bytes(1) + sizes.kept_for_scores_bytes(1)
    assert (score > step) == (adapter != "full")
    assert score <= counted <= 1.2 * score
    weights = [parameter for _, parameter in bench._executor._hosted.skeleton.blocks[bench._block].named_parameters()]
    assert max(parameter.numel() for parameter in weights) * 4 <= sizes.gradient_bytes
