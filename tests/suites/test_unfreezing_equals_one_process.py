"""Unfreezing by given steps and by the losses, with real tensors: the ring gives what one process gives.

A run that decides is compared with the reference of the steps that it decided, and repeated with them bit for bit.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch

from ringtune.run_control import events as rd
from ringtune.schedule.course import HelperSettings
from ringtune.schedule.methods import RingAda
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind
from ringtune.schedule.versions import unfreezing_steps
from ringtune.storage.pieces import Pieces
from ringtune.techniques.offload import helped
from sim.ring import RingResult, VirtualRing
from tests.support import reference
from tests.support.plans import changed
from tests.support.resumed import rebuilt, same_bits
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, shard_metadata, write_inputs

Slices = tuple[tuple[str, int, int], ...]
ONE: Slices = (("a", 0, 4),)
THREE: Slices = (("a", 0, 2), ("b", 2, 2), ("c", 2, 3), ("d", 3, 4))
EMPTY_OWNER: Slices = (("b", 0, 3), ("c", 3, 4))
SPLITS = {"one": ONE, "three": THREE, "owner-hosts-nothing": EMPTY_OWNER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("unfreezing"))


def case_of(folder: Path, **changes: object) -> Case:
    """A run of turns of two steps."""
    values: dict[str, object] = {"folder": folder, "owners": ("a", "c"), "microbatches": 2, "local_iterations": 2}
    return Case(**{**values, **changes})  # type: ignore[arg-type]


def auto(plan: Plan, patience_steps: int = 5) -> Plan:
    """The plan, left to the losses: a turn that does not halve the loss is too little."""
    patience = Patience(patience_steps=patience_steps, min_improvement=0.5)
    return changed(plan, method=RingAda(every_steps=0, auto=patience))


def at(plan: Plan, steps: tuple[int, ...]) -> Plan:
    """The plan with these steps."""
    return changed(plan, method=RingAda(every_steps=0, at=steps))


def run(plan: Plan, carrier: TorchCarrier, seed: int, start: StartPoint | None = None) -> RingResult:
    """Run with random delays."""
    rng = random.Random(seed)
    result = VirtualRing(
        plan,
        carrier=carrier,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 2.0]) * rng.random(),
        control_s=lambda node: rng.random(),
        start=start,
    ).run()
    assert result.finish == rd.Finish("", "")
    return result


def decided(plan: Plan, result: RingResult) -> tuple[int, ...]:
    """The steps of the run's report."""
    turns = [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]
    return unfreezing_steps(
        plan.course.decided([turn for turn in turns if turn.kind is StepKind.TRAIN][-1].unfreeze_at)
    )


def holder_of(result: RingResult) -> str:
    """Who has the head at the end."""
    return [entry.turn.owner for entry in result.logged if isinstance(entry, rd.LogTurn)][-1]


def trained(plan: Plan, carrier: TorchCarrier, result: RingResult) -> dict[str, torch.Tensor]:
    """Adapters and head."""
    return carrier.collected(plan, holder_of(result))


@functools.lru_cache(maxsize=8)
def reference_at(case: Case, steps: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """One process with these steps."""
    found = reference.train(case.job, at(case.plan(ONE), steps), case.folder / "model", case.datasets())
    return found.adapter() | found.head()


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("steps", [(), (3, 9, 10)])
@pytest.mark.sampled(1)
def test_unfreezing_at_given_steps_equals_one_process(folder: Path, split: str, steps: tuple[int, ...]) -> None:
    """Steps anywhere in a turn: 1e-9 in float64 after 14 AdamW steps."""
    case = case_of(folder, num_steps=14)
    plan = at(case.plan(SPLITS[split]), steps)
    carrier = make_carrier(case, plan)
    result = run(plan, carrier, 0)
    assert distance(trained(plan, carrier, result), reference_at(case, steps)) < 1e-9
    assert distance(trained(plan, carrier, result), reference_at(case, (3, 9) if steps else (12,))) > 1e-4


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.sampled(1)
def test_unfreezing_by_the_losses_equals_one_process_with_its_steps(folder: Path, split: str, dropout: float) -> None:
    """What the run decided is all that the reference needs to know; the steps are those of every split."""
    case = case_of(folder, dropout=dropout, num_steps=24)
    plan = auto(case.plan(SPLITS[split]), patience_steps=3)
    carrier = make_carrier(case, plan)
    result = run(plan, carrier, 1)
    steps = decided(plan, result)
    assert steps == (10, 16, 22)
    assert distance(trained(plan, carrier, result), reference_at(case, steps)) < 1e-9


@pytest.fixture(scope="module")
def first(folder: Path) -> tuple[Case, Plan, RingResult, dict[str, torch.Tensor]]:
    """A run that is left to the losses, and what it trains."""
    case = case_of(folder, dropout=0.1, num_steps=24)
    plan = auto(case.plan(THREE))
    carrier = make_carrier(case, plan)
    result = run(plan, carrier, 0)
    return case, plan, result, trained(plan, carrier, result)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_unfreezing_by_the_losses_can_be_repeated_bit_for_bit(
    first: tuple[Case, Plan, RingResult, dict[str, torch.Tensor]], seed: int
) -> None:
    """Other delays decide the same; the form ``at`` with those steps gives the very weights."""
    case, plan, result, wanted = first
    other = make_carrier(case, plan)
    assert decided(plan, run(plan, other, seed + 1)) == decided(plan, result) != ()
    settled = at(plan, decided(plan, result))
    repeated = make_carrier(case, settled)
    again = run(settled, repeated, seed + 2)
    assert same_bits(trained(plan, other, result), wanted)
    assert same_bits(trained(settled, repeated, again), wanted)


@pytest.mark.thorough
def test_unfreezing_by_the_losses_goes_on_from_a_checkpoint_bit_for_bit(folder: Path) -> None:
    """Shards, and what the manifest knows of the losses, are all that the rest of the run needs."""
    case = case_of(folder, dropout=0.1, num_steps=24, checkpoint_every=5)
    plan = auto(case.plan(THREE))
    whole = make_carrier(case, plan)
    result = run(plan, whole, 0)
    saved = [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
    assert len(saved) == 5 and decided(plan, result) == (12, 20)
    for checkpoint in saved[:-1]:
        carrier = make_carrier(case, plan)
        for node, executor in carrier.executors.items():
            executor.load_shard(
                Pieces.of(whole.shards[checkpoint.step][node]),
                shard_metadata(node, checkpoint.step),
                with_head=node == checkpoint.holder,
            )
        start = StartPoint.of(
            plan.course, step=checkpoint.step, holder=checkpoint.holder, unfreezing=checkpoint.unfreezing
        )
        rest = run(plan, carrier, checkpoint.step, start)
        assert decided(plan, rest) == decided(plan, result)
        assert same_bits(trained(plan, carrier, rest), trained(plan, whole, result)), checkpoint.step


@pytest.mark.thorough
def test_unfreezing_by_the_losses_with_helpers_is_repeated_and_goes_on_bit_for_bit(folder: Path) -> None:
    """Blocks begin to train within intervals, and hosts do not wait: versions count what the run has decided."""
    case = case_of(folder, dropout=0.1, num_steps=17, checkpoint_every=6, microbatches=8, adapter="lora[r=4]")
    plan = auto(
        helped(case.plan(THREE), {"a": "z", "c": "a"}, HelperSettings(interval=3, overlap=True)), patience_steps=3
    )
    whole = make_carrier(case, plan)
    result = run(plan, whole, 0)
    steps, wanted = decided(plan, result), trained(plan, whole, result)
    assert steps
    settled = at(plan, steps)
    repeated = make_carrier(case, settled)
    assert same_bits(trained(settled, repeated, run(settled, repeated, 1)), wanted)
    saved = next(entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint))
    again = rebuilt(case, plan, whole.shards[saved.step], saved)
    start = StartPoint.of(plan.course, step=saved.step, holder=saved.holder, unfreezing=saved.unfreezing)
    assert same_bits(trained(plan, again, run(plan, again, 2, start)), wanted)
