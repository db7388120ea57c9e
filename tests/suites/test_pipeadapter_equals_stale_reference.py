"""PipeAdapter in the ring gives the adapters and head of its rule written out in one process.

The rule and its reference stand in ``tests.support.stale_reference``.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.turns import StartPoint, StepKind, turn_sequence
from tests.suites.test_ring_equals_one_process import distance_to_reference, run
from tests.support.resumed import holder_of, rebuilt, same_bits
from tests.support.resumed import run as run_plan
from tests.support.stale_reference import Tensors, train_stale
from tests.support.torch_ring import Case, distance, make_carrier, reference_of, write_family_inputs, write_inputs

Slices = tuple[tuple[str, int, int], ...]

TWO: Slices = (("b", 0, 2), ("a", 2, 4))
THREE: Slices = (("a", 0, 1), ("b", 1, 3), ("c", 3, 4))
SPLITS = {"two": TWO, "three": THREE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def stale_case(folder: Path, **changes: Any) -> Case:
    """Two owners, one of which hosts nothing in ``TWO``; three turns, the last one short."""
    values: dict[str, Any] = {"owners": ("a", "c"), "num_steps": 13, "local_iterations": 5, "microbatches": 2}
    return Case(folder=folder, method="pipeadapter", **{**values, **changes})


@functools.lru_cache(maxsize=32)
def stale_reference(case: Case, slices: Slices) -> tuple[Tensors, list[float]]:
    """Adapters with head, and losses, of the rule written out; once per case."""
    return train_stale(case.job, case.plan(slices), case.folder / "model", case.datasets())


@functools.lru_cache(maxsize=32)
def ring_result(case: Case, slices: Slices, *, seed: int = 0) -> tuple[Tensors, list[float], dict[str, dict[str, int]]]:
    """Adapters and head, losses of the steps, and figures of the versions, after a run with random delays; once."""
    result, carrier = run(case, slices, seed=seed)
    plan = case.plan(slices)
    holder = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN][-1].owner
    steps = [entry for entry in result.logged if isinstance(entry, rd.LogStep) and entry.turn.kind is StepKind.TRAIN]
    losses = [dict(entry.values)["loss_sum"] / dict(entry.values)["count"] for entry in steps]
    figures = {node: executor.run_figures for node, executor in carrier.executors.items()}
    assert {executor.live_bytes() for executor in carrier.executors.values()} == {0}
    return carrier.collected(plan, holder), losses, figures


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.sampled(1)
def test_pipeadapter_equals_the_stale_reference(folder: Path, split: str, microbatches: int, optimizer: str) -> None:
    """Three turns of two owners: every tensor and every loss to 1e-9 in float64."""
    case = stale_case(folder, microbatches=microbatches, optimizer=optimizer)
    wanted, losses = stale_reference(case, SPLITS[split])
    got, found, _ = ring_result(case, SPLITS[split])
    assert distance(got, wanted) < 1e-9
    assert found == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(
    ("slices", "changes"),
    [
        ((("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4)), {"local_iterations": 3, "eval_every": 6}),
        ((("d", 0, 1), ("b", 1, 1), ("c", 1, 3), ("e", 3, 4)), {"owners": ("b", "c")}),
        ((("b", 1, 2), ("a", 2, 3), ("d", 3, 4)), {"private_blocks": 1}),
        ((("a", 1, 2), ("c", 2, 4)), {"private_blocks": 1}),
    ],
    ids=["more-hosts-than-steps-of-a-turn", "empty-slice", "private-block", "private-block-joins-a-slice"],
)
@pytest.mark.sampled(1)
def test_pipeadapter_of_other_shapes_equals_the_stale_reference(
    folder: Path, slices: Slices, changes: dict[str, Any]
) -> None:
    """Short turns, evaluations between them, owners anywhere, frozen private blocks: the same rule."""
    case = stale_case(folder, **changes)
    assert distance(ring_result(case, slices)[0], stale_reference(case, slices)[0]) < 1e-9


def test_pipeadapter_comparison_can_fail(folder: Path) -> None:
    """Negative control: one host more, or no staleness at all, is far outside the bound."""
    case = stale_case(folder)
    wanted, _ = stale_reference(case, THREE)
    assert distance(stale_reference(case, TWO)[0], wanted) > 1e-4
    fresh = reference_of(dataclasses.replace(case, method="all"))
    assert distance({**fresh.adapter(), **fresh.head()}, wanted) > 1e-4


@pytest.mark.parametrize("changes", [{"local_iterations": 1, "num_steps": 6}, {}], ids=["one-step-turns", "one-host"])
def test_pipeadapter_that_cannot_be_stale_equals_all(folder: Path, changes: dict[str, Any]) -> None:
    """Turns of one step, or one host: the result of one process that trains everything."""
    case = stale_case(folder, **changes)
    slices = THREE if changes else (("a", 0, 4),)
    assert distance_to_reference(case, slices, dataclasses.replace(case, method="all")) < 1e-9
    assert {figures["peak_versions"] for figures in ring_result(case, slices)[2].values()} <= {0, 1}


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.sampled(1)
def test_pipeadapter_delays_never_change_a_bit(folder: Path, seed: int) -> None:
    """With dropout in float32, other delays give the very bits, and the very numbers of versions."""
    case = stale_case(folder, dtype="float32", dropout=0.1, num_steps=10)
    first, losses, figures = ring_result(case, THREE, seed=0)
    again, found, also = ring_result(case, THREE, seed=seed)
    assert same_bits(again, first)
    assert (found, also) == (losses, figures)


def test_pipeadapter_stores_as_many_versions_as_items_in_flight(folder: Path) -> None:
    """Hosts of three store 3, 2 and 1 versions; an owner without blocks has none."""
    case = stale_case(folder, owners=("a", "d"))
    figures = ring_result(case, THREE)[2]
    assert {node: found["peak_versions"] for node, found in figures.items()} == {"a": 3, "b": 2, "c": 1, "d": 0}
    # the slice of b is twice as large as that of a
    assert figures["a"]["peak_version_bytes"] == figures["b"]["peak_version_bytes"] > 0
    assert figures["c"]["peak_version_bytes"] == 0


def test_pipeadapter_other_methods_make_no_copy(folder: Path) -> None:
    """RingAda stores one version of everything, as the paper says."""
    case = Case(folder=folder, owners=("a", "c"), every_steps=2, num_steps=10, microbatches=2)
    figures = ring_result(case, THREE)[2]
    assert {found["peak_versions"] for found in figures.values()} == {1}
    assert {found["peak_version_bytes"] for found in figures.values()} == {0}


@pytest.mark.parametrize("adapter", ["lora[r=4]", "loreft", "mlp[hidden=8,alpha=2]"])
@pytest.mark.sampled(1)
def test_pipeadapter_of_other_adapters_equals_the_stale_reference(
    tmp_path_factory: pytest.TempPathFactory, adapter: str
) -> None:
    """Versions are tensors put into modules, whatever the modules are; ReFT runs in float32 only."""
    inputs = write_family_inputs(tmp_path_factory.mktemp("family"), "bert", "sequence-classification")
    dtype = "float32" if adapter == "loreft" else "float64"
    case = stale_case(inputs, adapter=adapter, dtype=dtype, num_steps=8)
    got = ring_result(case, THREE)[0]
    wanted = stale_reference(case, THREE)[0]
    assert distance(got, wanted) < (1e-5 if dtype == "float32" else 1e-9)


def test_pipeadapter_resumed_run_gives_the_bits_of_the_whole_run(folder: Path) -> None:
    """Checkpoints see flushed weights, so a resumed run ends with the very bits."""
    case = stale_case(folder, checkpoint_every=3, eval_every=4, dropout=0.1)
    plan = case.plan(THREE)
    whole = make_carrier(case, plan)
    result = run_plan(plan, whole, 0)
    wanted = whole.collected(plan, holder_of(plan, result))
    saved = [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
    assert [entry.step for entry in saved] == [5, 10, 13]
    for checkpoint in saved[:2]:
        start = StartPoint.of(plan.course, step=checkpoint.step, holder=checkpoint.holder)
        carrier = rebuilt(case, plan, whole.shards[checkpoint.step], checkpoint)
        rest = run_plan(plan, carrier, random.Random(checkpoint.step).randint(1, 99), start=start)
        assert rest.finish == rd.Finish("", "")
        assert same_bits(carrier.collected(plan, holder_of(plan, rest)), wanted)
