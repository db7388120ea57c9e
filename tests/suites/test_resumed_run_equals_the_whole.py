"""A run that is rebuilt from the shards of any checkpoint ends with the very bits of the uninterrupted one."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint
from tests.support.resumed import holder_of, rebuilt, run, same_bits
from tests.support.torch_ring import (
    Case,
    distance,
    make_carrier,
    reference_of,
    write_inputs,
)

Slices = tuple[tuple[str, int, int], ...]
THREE: Slices = (("a", 0, 2), ("b", 2, 2), ("c", 2, 3), ("d", 3, 4))
EMPTY_OWNER: Slices = (("b", 0, 3), ("c", 3, 4))
CASES: dict[str, tuple[Slices, dict[str, object]]] = {
    "adamw": (THREE, {}),
    "sgd": (THREE, {"optimizer": "sgd", "microbatches": 4}),
    "dropout": (THREE, {"dropout": 0.2, "microbatches": 2}),
    "several-owners": (THREE, {"owners": ("b", "d", "a"), "microbatches": 2, "dropout": 0.1}),
    "turns-by-rows": (THREE, {"owners": ("b", "d", "a"), "split": "dirichlet:0.4", "turns": "rows", "microbatches": 2}),
    "owner-hosts-nothing": (EMPTY_OWNER, {"owners": ("a", "c")}),
    "private-blocks": ((("a", 1, 3), ("b", 3, 4)), {"private_blocks": 1, "owners": ("a", "b")}),
    "all": (THREE, {"method": "all", "owners": ("d",)}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("resume"))


def case_of(folder: Path, changes: dict[str, object], **values: object) -> Case:
    """A run of these values and changes, in turns of 2 steps."""
    return Case(folder=folder, **{"local_iterations": 2, "eval_every": 5, **values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1)
def test_resumed_run_gives_the_bits_of_the_whole_run_from_any_checkpoint(folder: Path, name: str) -> None:
    """Whichever checkpoint: adapters, head and evaluations are those of the run that was never stopped."""
    slices, changes = CASES[name]
    case = case_of(folder, changes, num_steps=12, every_steps=3, checkpoint_every=3)
    plan = case.plan(slices)
    whole = make_carrier(case, plan)
    result = run(plan, whole, 0)
    wanted = whole.collected(plan, holder_of(plan, result))
    trained = reference_of(case)
    assert distance(wanted, trained.adapter() | trained.head()) < 1e-9
    saved = [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
    assert [entry.step for entry in saved] == [4, 6, 10, 12]
    evaluations = [entry for entry in result.logged if isinstance(entry, rd.LogEvaluation)]
    for checkpoint in random.Random(name).sample(saved, 2):
        start = StartPoint.of(plan.course, step=checkpoint.step, holder=checkpoint.holder)
        carrier = rebuilt(case, plan, whole.shards[checkpoint.step], checkpoint)
        rest = run(plan, carrier, 1, start=start)
        assert rest.finish == rd.Finish("", "")
        assert same_bits(carrier.collected(plan, holder_of(plan, rest)), wanted), checkpoint
        again = [entry for entry in rest.logged if isinstance(entry, rd.LogEvaluation)]
        assert again == evaluations[-len(again) :]
        assert {step: carrier.shards[step] for step in carrier.shards} == {
            step: shards for step, shards in whole.shards.items() if step > checkpoint.step
        }


@pytest.fixture(scope="module")
def drained(folder: Path) -> tuple[Case, Plan, dict[str, torch.Tensor]]:
    """A run without checkpoints, and what it ends with if nobody stops it."""
    case = Case(folder=folder, owners=("b", "d"), num_steps=12, every_steps=4, dropout=0.1, microbatches=2)
    plan = case.plan(THREE)
    whole = make_carrier(case, plan)
    return case, plan, whole.collected(plan, holder_of(plan, run(plan, whole, 0)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_drained_run_goes_on_with_the_same_bits(drained: tuple[Case, Plan, dict[str, torch.Tensor]], seed: int) -> None:
    """Ctrl-C at any moment: the rest gives what the whole run would have given."""
    case, plan, wanted = drained
    carrier = make_carrier(case, plan)
    stopped = run(plan, carrier, seed, drain_at_s=10.0 + 20 * seed)
    (checkpoint,) = [entry for entry in stopped.logged if isinstance(entry, rd.LogCheckpoint)]
    start = StartPoint.of(plan.course, step=checkpoint.step, holder=checkpoint.holder)
    carrier = rebuilt(case, plan, carrier.shards[checkpoint.step], checkpoint)
    rest = run(plan, carrier, seed, start=start)
    assert same_bits(carrier.collected(plan, holder_of(plan, rest)), wanted)


LONGER: dict[str, tuple[Slices, dict[str, object]]] = {
    "deeper-in-the-longer-run": (THREE, {"dropout": 0.1, "microbatches": 2}),
    "several-owners": (THREE, {"owners": ("b", "d"), "microbatches": 2}),
    "all": (THREE, {"method": "all", "owners": ("d",)}),
    "pipeadapter": (THREE, {"method": "pipeadapter", "owners": ("b", "d"), "microbatches": 2}),
}


@pytest.mark.parametrize("name", LONGER)
@pytest.mark.sampled(1)
def test_run_that_is_made_longer_gives_the_bits_of_the_longer_run(folder: Path, name: str) -> None:
    """From the last checkpoint of 8 steps to step 12: as if it had had 12 steps from the start."""
    slices, changes = LONGER[name]
    short, long = (
        case_of(folder, changes, num_steps=steps, every_steps=4, checkpoint_every=4, lr_schedule="constant")
        for steps in (8, 12)
    )
    plan = short.plan(slices)
    made = dataclasses.replace(plan, course=dataclasses.replace(plan.course, num_steps=12))
    whole = make_carrier(long, made)
    wanted = whole.collected(made, holder_of(made, run(made, whole, 0)))
    first = make_carrier(short, plan)
    saved = [entry for entry in run(plan, first, 2).logged if isinstance(entry, rd.LogCheckpoint)][-1]
    assert saved.step == 8
    carrier = rebuilt(long, made, first.shards[8], saved)
    rest = run(made, carrier, 1, start=StartPoint.of(made.course, step=8, holder=saved.holder))
    assert same_bits(carrier.collected(made, holder_of(made, rest)), wanted)
