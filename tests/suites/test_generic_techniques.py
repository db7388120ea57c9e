"""Techniques on families that run by their architecture's own forward; ``--all`` takes every family."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.model.heads import task_of
from edge.model.owner import owner_units
from edge.model.skeleton import build_skeleton
from ringtune.costs.memory_sizes import DTYPE_BYTES
from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.job.job import Job
from ringtune.models.families import FAMILIES
from ringtune.models.family import LANGUAGE_TASKS
from ringtune.models.folder import NO_WEIGHTS
from tests.features.feature import Feature, Run, Wanted
from tests.suites.test_generic_decoders import ROUNDING, require_equal
from tests.suites.test_generic_decoders import generic as decoder
from tests.suites.test_generic_encoders import generic as encoder
from tests.support import hift_reference
from tests.support.hand_ring import make_bench
from tests.support.tiny_families import ENCODERS, GENERIC, IN_FLOAT32, sizes_of, write_family
from tests.support.torch_ring import Case

ROWS = (*GENERIC, *ENCODERS)
SPLITS = ("one", "three")


ROUNDED = (*ROUNDING, "cohere2", "diffllama", "helium")
"""Families with steps in float32 before weights that train here: norms, and factors of attention."""


def generic(model_type: str, adapter: str = "lora", **changes: Any) -> Feature:
    """A short run; where steps of the library round, without an optimizer that makes a rounded zero large."""
    values = {"optimizer": "sgd"} if model_type in (*IN_FLOAT32, *ROUNDING) else {}
    if model_type in ENCODERS:
        return encoder(model_type, "sequence-classification", adapter, **values | changes)
    found = decoder(model_type, adapter, **values | changes)
    return dataclasses.replace(found, bound=1e-6) if model_type in ROUNDED else found


def wide(folder: Path, model_type: str, **changes: Any) -> tuple[Path, Job]:
    """A model of wide blocks and a job for it, in which norms count as little as in a large one."""
    keys = ("hidden_size", "intermediate_size") if model_type in ENCODERS else ("size", "n_embd", "d_model", "head_dim")
    sizes = {key: 8 * value for key, value in sizes_of(model_type).items() if any(part in key for part in keys)}
    model = write_family(folder / "model", model_type, **{**sizes, "vocab_size": 300})
    job = generic(model_type, "full").case.job
    changes = {"model.dtype": "float32", "train.max_length": 50, "train.microbatches": 1, **changes}
    return model, job.with_overrides(changes)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("model_type", ROWS)
@pytest.mark.sampled(2)
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
@pytest.mark.parametrize("model_type", ROWS)
@pytest.mark.sampled(2)
def test_hift_of_a_generic_family_equals_one_process(model_type: str, split: str) -> None:
    """Embedding, blocks and head in turn; the result has every tensor of the model, also those that stay frozen."""
    changes = {"method": "hift", "hift": "group_size = 2", "num_steps": 4, "checkpoint_every": 0}
    feature = dataclasses.replace(generic(model_type, "full", **changes), reference=groupwise)
    require_equal(feature, split)


@pytest.mark.parametrize("model_type", ROWS)
@pytest.mark.sampled(1)
def test_memory_of_own_weights_is_not_below_what_a_block_keeps(tmp_path: Path, model_type: str) -> None:
    """The bound holds with inputs of all matrices and norms, and is not far away."""
    model, job = wide(tmp_path, model_type)
    kept = make_bench(model, job).activation_token_bytes()
    assert kept <= computed_token_bytes(model_facts(model, job), job) <= 2.5 * kept


@pytest.mark.parametrize("method", ["all", "hift"])
@pytest.mark.parametrize("model_type", ROWS)
@pytest.mark.sampled(2)
def test_planned_bytes_of_own_weights_are_those_that_train(model_type: str, method: str) -> None:
    """Of a block, and where all parameters train of embedding and head too, counted without torch."""
    feature = generic(model_type, "full", method=method)
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
