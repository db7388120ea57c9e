"""What an invertible adapter is besides its laws: when it trains, who has it, its bytes, and jobs without it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.planner.make_plan import courses_to_try
from edge.techniques.activation_checkpointing import saved_tensors, storage_bytes
from ringtune.config.optimizers import factor_numbers
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.model_facts import check_job, model_facts
from ringtune.errors import JobError, PlanError
from ringtune.models.folder import read_config
from ringtune.schedule.course import ALONE, HelperSettings
from ringtune.schedule.methods import Hift
from ringtune.schedule.turns import items, turn_sequence
from ringtune.schedule.units import EMBEDDING, Range
from tests.features.feature import carry_out, inputs
from tests.features.models import invertible
from tests.support import reference
from tests.support.cases import cases
from tests.support.plans import changed
from tests.support.tiny_families import write_family
from tests.support.torch_ring import Case, make_executor


@cases(("num_steps", "trains"), [(3, False), (4, True)])
def test_it_trains_from_the_step_on_at_which_block_0_does(num_steps: int, trains: bool) -> None:
    """Before, it keeps the bits with which it began; it is in the result in any case."""
    feature = invertible("steps", num_steps=num_steps, eval_every=0, checkpoint_every=0)
    plan = feature.plan_on("two")
    before = reference.whole_model(feature.case.job, plan, feature.case.folder / "model").state_dict()
    after = {name: value for name, value in carry_out(feature, plan).tensors.items() if ".invertible_adapters." in name}
    assert len(after) == 8
    assert [torch.equal(value, before[name]) for name, value in after.items()] == [not trains] * 8


@cases(
    ("model_type", "task", "config"),
    [
        ("electra", "sequence-classification", "seq_bn_inv[inv_adapter_reduction_factor=1]"),
        ("bert", "sequence-classification", "double_seq_bn_inv"),
        ("gpt2", "causal-lm", "seq_bn_inv[inv_adapter_reduction_factor=4]"),
    ],
)
def test_its_bytes_are_those_that_were_planned(model_type: str, task: str, config: str) -> None:
    """Weights, Adafactor's rows and columns, a hand-over, and what a graph keeps; only an owner has any of it."""
    changes: dict[str, Any] = {"adapter": config, "optimizer": "adamw", "microbatches": 2, "dtype": "float32"}
    case = Case(folder=inputs(model_type, task), task=task, **changes)
    plan = case.plan((("b", 0, 4),))
    owner, host = make_executor(case, plan, "a")._hosted, make_executor(case, plan, "b")._hosted
    assert owner.owner is not None and owner.skeleton.invertible is not None and host.skeleton.invertible is None
    assert not any("invertible" in name for name, _ in host.skeleton.model.named_parameters())
    facts, parameters = model_facts(case.folder / "model", case.job), owner.owner.units[EMBEDDING].values()
    assert facts.embedding_train_bytes == sum(value.nbytes for value in parameters)
    assert facts.embedding_factor_bytes == 4 * factor_numbers(tuple(value.shape) for value in parameters)

    sizes = Sizes(plan.course, facts, optimizer="adamw", dtype="float32", activation_token_bytes=0)
    for value in owner.owner.parameters.values():
        value.grad = torch.ones_like(value)
    for unit in owner.owner.units:
        owner.owner.optimizers.update([unit], 0.1)
    header_bytes = 6000
    assert 0 <= owner.owner.to_blob().size_bytes - sizes.handed_over_bytes < header_bytes

    batch = case.datasets()["a"].batch(plan.course, next(iter(items(plan.course, next(turn_sequence(plan.course))))))
    output = owner.owner.embed_to_train(batch, None)
    frozen = storage_bytes(owner.weights())
    kept = storage_bytes([*saved_tensors(output), output])
    found, planned = (
        sum(size for at, size in kept.items() if at not in frozen),
        sizes.invertible_bytes(batch.ids.numel()),
    )
    assert 0.4 * planned < found <= planned


def planned(case: Case, keys: dict[str, Any]) -> None:
    """Read the job, its model's sizes and its course, as planning does."""
    job, folder = case.job.with_overrides(keys), case.folder / "model"
    check_job(job, read_config(folder))
    model_facts(folder, job)
    course = Case(folder=inputs()).plan((("a", 0, 4),)).course
    courses_to_try(job, dataclasses.replace(course, method=job.method), ())


@cases(
    ("model_type", "changes", "keys", "message"),
    [
        ("vit", {}, {}, "AdapterHub has no invertible adapters for vit; leave inv_adapter out, as in seq_bn"),
        ("qwen2", {}, {}, "AdapterHub has no invertible adapters for qwen2"),
        ("bert", {"method": "pipeadapter"}, {}, "has several items in flight, an invertible adapter has one set"),
        ("bert", {"method": "hift"}, {}, "the method trains all parameters and has no adapters"),
        (
            "bert",
            {"offload": 'mode = "auto"\nusers = "alone"'},
            {},
            "has an invertible adapter, which is one for all users",
        ),
        ("bert", {"adapter": "seq_bn_inv[inv_adapter_reduction_factor=17]"}, {}, "leaves no channel of 16; lower it"),
    ],
)
def test_job_that_can_not_have_one_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    """When the job is read, or its model is known, or its course is made: before anything is started."""
    write_family(tmp_path / "model", model_type)
    task = {"vit": "image-classification"}.get(model_type, "sequence-classification")
    with pytest.raises(JobError, match=message):
        planned(Case(folder=tmp_path, task=task, **{"adapter": "seq_bn_inv", **changes}), keys)


def test_course_that_can_not_have_one_is_refused() -> None:
    """A given plan is not made by a job of this version."""
    plan = Case(folder=inputs(), adapter="seq_bn_inv").plan((("a", 0, 4),))
    offload = HelperSettings(users=ALONE).of_blocks([Range(0, 4)])
    for values, message in (({"method": Hift()}, "has no adapters"), ({"offload": offload}, "is one for all")):
        with pytest.raises(PlanError, match=message):
            changed(plan, **values)
