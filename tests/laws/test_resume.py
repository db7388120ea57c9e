"""A run that is rebuilt from the shards of a checkpoint ends with the very bits of the uninterrupted one."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.run_control import events as rd
from tests.features.catalog import ALL
from tests.features.feature import Feature, Run, carry_out, each, each_technique, run_of
from tests.features.full_parameters import HIFT
from tests.features.methods import DRAWN, PIPEADAPTER, SHAPE
from tests.support.resumed import same_bits

CHECKPOINTS = [feature for feature in ALL if feature.changes.get("checkpoint_every", 4)]


def continued(run: Run, saved: rd.LogCheckpoint, *, seed: int = 2) -> Run:
    """The rest of a run from one of its checkpoints."""
    return carry_out(run.feature, run.plan, seed, saved=saved, shards=run.notes.shards[saved.step])


@each_technique(CHECKPOINTS)
def test_resumed_run_equals_the_whole(feature: Feature) -> None:
    """What trains, evaluations and later checkpoints."""
    run = run_of(feature, feature.split)
    saved = run.logged(rd.LogCheckpoint)[0]
    assert 0 < saved.step < feature.case.num_steps
    rest = continued(run, saved)
    assert same_bits(rest.tensors, run.tensors)
    assert rest.losses == run.losses[saved.step :]
    assert rest.evaluations == {step: run.evaluations[step] for step in rest.evaluations}
    assert rest.notes.shards == {step: shards for step, shards in run.notes.shards.items() if step > saved.step}
    assert list(rest.logged(rd.LogOperations)) == [
        entry for entry in run.logged(rd.LogOperations) if entry.step >= saved.step
    ]


def test_comparison_of_a_resumed_run_can_fail() -> None:
    """Negative control: nodes that load no shard end with other weights."""
    run = run_of(DRAWN, DRAWN.split)
    fresh = carry_out(DRAWN, run.plan, saved=run.logged(rd.LogCheckpoint)[0])
    assert not same_bits(fresh.tensors, run.tensors)


@pytest.mark.parametrize("drain_at_s", [5.0, pytest.param(2.0, marks=pytest.mark.thorough)])
@each_technique([*SHAPE, *HIFT, *PIPEADAPTER])
def test_drained_run_goes_on_with_the_same_bits(feature: Feature, drain_at_s: float) -> None:
    """Ctrl-C at any moment: the rest gives what the whole run gives; before the first turn is through, it is all."""
    run = run_of(feature, feature.split)
    stopped = carry_out(feature, run.plan, 3, drain_at_s=drain_at_s, items_ahead=2)
    saved = next(reversed(stopped.logged(rd.LogCheckpoint)), None)
    assert (saved is None) == (not stopped.logged(rd.LogTurn))
    assert saved.step < feature.case.num_steps if saved else drain_at_s == 2.0
    rest = carry_out(feature, run.plan, 4, saved=saved, shards=stopped.notes.shards[saved.step] if saved else None)
    assert same_bits(rest.tensors, run.tensors)


@each(SHAPE)
def test_run_that_is_made_longer_equals_the_longer_run(feature: Feature) -> None:
    """From the checkpoint at its end: as if it had had two steps more from the start."""
    steps, values = (
        2 * feature.case.local_iterations,
        {"lr_schedule": "constant", "eval_every": 0, "checkpoint_every": 0},
    )
    first = dataclasses.replace(
        feature, changes=feature.changes | values | {"num_steps": steps, "checkpoint_every": steps}
    )
    longer = dataclasses.replace(feature, changes=feature.changes | values | {"num_steps": steps + 2})
    short = carry_out(first, first.plan_on(feature.split))
    saved = short.logged(rd.LogCheckpoint)[-1]
    assert saved.step == steps
    plan = longer.plan_on(feature.split)
    whole = carry_out(longer, plan)
    rest = carry_out(longer, plan, 1, saved=saved, shards=short.notes.shards[steps])
    assert same_bits(rest.tensors, whole.tensors)
