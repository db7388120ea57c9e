"""A method that nobody knew before needs its own file and nothing else: it is trained, planned, simulated and resumed.

Its rule is odd on purpose: at even steps two blocks in the middle train without the head, at odd steps everything does.
So what trains is no top of the model, a gradient passes blocks that do not train, and the head skips every other step.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.planner.make_plan import make_plan
from ringtune.config.sections import learning_rate
from ringtune.errors import JobError
from ringtune.job.job import parse_job
from ringtune.schedule.actions import Op
from ringtune.schedule.methods import Method, RingAda, base
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.turns import StepKind, items, turn_sequence
from ringtune.schedule.units import Units
from ringtune.schedule.versions import depth, weight_version
from sim.prediction import predict
from tests.features.feature import Feature, Run, Wanted, each, each_split, new_folder
from tests.laws import test_frozen_is_free, test_resume, test_timing
from tests.laws.test_partition_invariance import require_equal
from tests.support.fake_agents import facts, job
from tests.support.moves import Slices
from tests.support.plans import changed
from tests.support.plans import make_plan as plan_by_hand
from tests.support.profiles import all_pairs, profile_of
from tests.support.reference import inputs_of, micro_batches, targets_of, update, whole_model
from tests.support.torch_ring import Case, write_inputs

NUM_BLOCKS = 6
SPLITS: dict[str, Slices] = {
    "one": (("a", 0, 6),),
    "two": (("b", 0, 3), ("a", 3, 6)),
    "three": (("a", 0, 1), ("b", 1, 2), ("c", 2, 6)),
    "four": (("d", 0, 2), ("c", 2, 3), ("b", 3, 4), ("a", 4, 6)),
    "owner-hosts-nothing": (("c", 0, 3), ("d", 3, 6)),
}


@dataclass(frozen=True)
class MiddleOut(Method):
    """At even steps blocks 2 and 3, at odd steps everything."""

    name = "middle-out"

    def trained(self, extent: Extent, step: int) -> Units:
        """The two blocks, or all units."""
        return extent.trainable if step % 2 else Units.of(extent.num_blocks, (2, 3))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method is known while a test runs; as ``@method`` makes it known for good."""
    monkeypatch.setitem(base._METHODS, MiddleOut.name, MiddleOut)


@functools.cache
def folder() -> Path:
    """The tiny model and its rows."""
    return write_inputs(new_folder(), num_blocks=NUM_BLOCKS)


def one_process(case: Case, run: Run) -> Wanted:
    """The rule as anybody would write it: one model, one optimizer, ``requires_grad`` by hand."""
    plan = run.plan
    datasets = case.datasets()
    model = whole_model(case.job, plan, case.folder / "model").eval()
    blocks = [list(block.parameters()) for _, block in model.iter_layers()]
    adapters = [[value for value in block if value.requires_grad] for block in blocks]
    head = list(model.heads[model.active_head].parameters())
    optimizer = torch.optim.AdamW([*itertools.chain(*adapters), *head], lr=1.0, weight_decay=case.weight_decay)
    train_items = [item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)]
    for item in train_items:
        if item.kind is not StepKind.TRAIN:
            continue
        everything = item.step % 2 == 1
        for index, parameters in enumerate(adapters):
            for value in parameters:
                value.requires_grad_(everything or index in (2, 3))
        for value in head:
            value.requires_grad_(everything)
        batch = datasets[item.owner].batch(plan.course, item)
        for rows in micro_batches(plan, item, batch):
            targets, _ = targets_of(case.task, rows)
            (model(**inputs_of(model, rows), **targets).loss / case.microbatches).backward()
        update(optimizer, learning_rate(case.job.train, item.step, case.num_steps))
    return Wanted(tensors={name: value for name, value in model.state_dict().items() if ".ringtune." in name})


def feature_with(name: str, **changes: Any) -> Feature:
    """AdamW steps of the method with two owners and two micro-batches."""
    values = {"method": MiddleOut.name, "num_blocks": NUM_BLOCKS, "owners": ("a", "b"), "eval_every": 0, **changes}
    return Feature(name=f"new-method/{name}", changes=values, folder=folder, splits=SPLITS, reference=one_process)


FEATURES = [feature_with(adapter, adapter=adapter, num_steps=6, checkpoint_every=4) for adapter in ("seq_bn", "lora")]


@pytest.mark.promise("1 partition invariance")
@each_split(FEATURES)
def test_new_method_on_a_ring_equals_a_literal_loop(feature: Feature, split: str) -> None:
    """In float64: 1e-9."""
    require_equal(feature, split)


@each(FEATURES)
def test_laws_hold_for_a_new_method(feature: Feature) -> None:
    """Other delays, resumption, and what is kept and sent; shards carry what a unit has had of updates."""
    test_timing.test_other_delays_and_recomputed_blocks_give_the_same_bits(feature)
    test_resume.test_resumed_run_equals_the_whole(feature)
    test_frozen_is_free.test_nothing_is_kept_or_sent_below_what_trains(feature)


def plan_by_hand_of(slices: Slices) -> Plan:
    """A plan of the method without tensors."""
    values: dict[str, Any] = {"num_steps": 9, "checkpoint_every": 4, "method": MiddleOut()}
    return changed(plan_by_hand([("a", 0, NUM_BLOCKS)], ["a", "b"], num_blocks=NUM_BLOCKS, **values), slices=slices)


def test_new_method_is_planned_from_a_job() -> None:
    """Its name in the job is enough; the plan is read back equal, and nobody hosts too much."""
    wanted = job(train__method=MiddleOut.name)
    made = make_plan(wanted, {name: facts(name) for name in ("alice", "bob", "carol")}).plan
    assert made.course.method == MiddleOut()
    assert [piece.num_blocks for piece in made.placement.slices] == [2, 1, 1]
    assert Plan.from_json(made.to_json()) == made
    assert [depth(made.course, step) for step in range(4)] == [2, 4, 2, 4]
    assert [weight_version(made.course, made.course.head, step) for step in range(5)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("split", SPLITS)
def test_new_method_is_simulated(split: str) -> None:
    """The prediction of each split runs to its end and counts the actions of the method."""
    plan = plan_by_hand_of(SPLITS[split])
    profile = profile_of(plan, links=all_pairs(plan.nodes, 1e6, 0.01))
    found = predict(plan, profile, keep_spans=True)
    backwards = [action for _, action, _, _ in found.spans if action.op is Op.BACKWARD]
    assert sum(action.stop - action.start for action in backwards) == 2 * (5 * 4 + 4 * 6)
    assert found.wall_s > 0


def test_settings_of_another_method_are_refused_with_both_names() -> None:
    """``[unfreeze]`` belongs to RingAda; the message names it and the method that was asked for."""
    with pytest.raises(JobError) as caught:
        parse_job(
            f"""
            [model]
            path = "model"
            [train]
            method = "{MiddleOut.name}"
            [unfreeze]
            every_steps = 3
            """,
            source="test",
        )
    assert "[unfreeze]" in str(caught.value)
    assert RingAda.name in str(caught.value)
    assert MiddleOut.name in str(caught.value)
