"""Tables that are chosen by real scores are those of any split, timing and resumption, and so is what is trained."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ringtune.run_control import events as rd
from ringtune.schedule.operation_tables import BlockScores, Choice, Operations, Score
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from ringtune.storage.pieces import Pieces
from ringtune.techniques.knapsacks import choose_table
from sim.ring import RingResult, VirtualRing
from tests.support.choosing import make_choice
from tests.support.plans import changed
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, shard_metadata, write_inputs

Slices = tuple[tuple[str, int, int], ...]
ONE: Slices = (("a", 0, 4),)
TWO: Slices = (("a", 0, 1), ("b", 1, 4))
FOUR: Slices = (("d", 0, 1), ("a", 1, 2), ("b", 2, 3), ("c", 3, 4))
TAYLOR = make_choice(subnets=2, refresh_steps=4, backward_score=Score.TAYLOR.value, forward_score=Score.FISHER.value)
CHOICES: dict[str, Choice] = {
    "two-stage": TAYLOR,
    "joint": make_choice("joint", subnets=4, backward_score=Score.GRADIENT_MAGNITUDE.value),
    "magnitude-gradient": make_choice("magnitude-gradient", subnets=4, refresh_steps=4),
    "random": make_choice("random", subnets=2, refresh_steps=4),
}


class RealScores:
    """Scores of the executors, and the tables that the coordinator would choose."""

    def __init__(self, plan: Plan, carrier: TorchCarrier) -> None:
        self._plan, self._carrier = plan, carrier

    def scores(self, node: str, turn: Turn) -> tuple[BlockScores, ...]:
        """What the node has gathered."""
        return self._carrier.executors[node].take_scores(turn.index)

    def table(self, step: int, scores: Sequence[BlockScores]) -> Operations:
        """What comes of it."""
        return choose_table(self._plan.course, scores, step=step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and two batches of rows for each owner, the second of which is short; all of them are scored."""
    return write_inputs(tmp_path_factory.mktemp("choices"), num_rows=29)


def case_of(folder: Path, adapter: str = "seq_bn", **values: object) -> Case:
    """Eight steps of two owners, in turns of two steps, each batch in four micro-batches."""
    return Case(
        folder=folder,
        adapter=adapter,
        **{  # type: ignore[arg-type]
            "owners": ("a", "b"),
            "num_steps": 8,
            "every_steps": 3,
            "local_iterations": 2,
            "microbatches": 4,
            "eval_every": 4,
            "checkpoint_every": 4,
            **values,
        },
    )


def run(plan: Plan, carrier: TorchCarrier, seed: int = 0, start: StartPoint | None = None) -> RingResult:
    """Run with random delays."""
    rng = random.Random(seed)
    result = VirtualRing(
        plan,
        carrier=carrier,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.random(),
        control_s=lambda node: rng.random(),
        start=start,
        chooser=RealScores(plan, carrier),
        choose_s=lambda: 5 * rng.random(),
    ).run()
    assert result.finish == rd.Finish("", "")
    return result


def trained(plan: Plan, carrier: TorchCarrier, result: RingResult) -> dict[str, torch.Tensor]:
    """All that was trained, by name."""
    last = [entry for entry in result.logged if isinstance(entry, rd.LogTurn)][-1]
    return carrier.collected(plan, last.turn.owner)


def tables(result: RingResult) -> list[rd.LogOperations]:
    """The tables that were chosen, in order."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogOperations)]


def are_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two results have the same bits."""
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(
    ("policy", "adapter"),
    [
        ("two-stage", "seq_bn"),
        ("two-stage", "full"),
        ("joint", "lora"),
        ("magnitude-gradient", "full"),
        ("random", "seq_bn"),
    ],
)
@pytest.mark.sampled(1)
def test_choice_of_real_scores_is_that_of_any_split(folder: Path, policy: str, adapter: str) -> None:
    """One node and four choose the same tables and train the same weights; another timing gives the same bits."""
    case = case_of(folder, adapter)
    found = {}
    for slices in (ONE, FOUR):
        plan = changed(case.plan(slices), choice=CHOICES[policy])
        carrier = make_carrier(case, plan)
        result = run(plan, carrier)
        found[slices] = (tables(result), trained(plan, carrier, result))
        if slices is FOUR:
            again = make_carrier(case, plan)
            other = run(plan, again, seed=9)
            assert tables(other) == tables(result)
            assert are_equal(trained(plan, again, other), found[slices][1])
    chosen, weights = found[ONE]
    assert len(set("".join(chosen[0].operations.batches[0].rows))) > 1, "nothing was chosen"
    assert found[FOUR][0] == chosen
    assert distance(found[FOUR][1], weights) < 1e-9


@pytest.mark.parametrize("policy", ["two-stage", "random"])
@pytest.mark.sampled(1)
def test_choice_of_real_scores_goes_on_from_any_checkpoint(folder: Path, policy: str) -> None:
    """New executors from the shards score again what is due, and end with the bits of the whole run."""
    case = case_of(folder)
    plan = changed(case.plan(TWO), choice=CHOICES[policy])
    carrier = make_carrier(case, plan)
    whole = run(plan, carrier)
    weights = trained(plan, carrier, whole)
    saved = [entry for entry in whole.logged if isinstance(entry, rd.LogCheckpoint)]
    assert [entry.step for entry in saved] == [4, 8]
    for at in saved:
        again = make_carrier(case, plan)
        for node, executor in again.executors.items():
            shard = Pieces.of(carrier.shards[at.step][node])
            executor.load_shard(shard, shard_metadata(node, at.step), with_head=node == at.holder)
        start = StartPoint.of(plan.course, step=at.step, holder=at.holder, operations=at.operations)
        rest = run(plan, again, seed=3, start=start)
        assert tables(rest) == [entry for entry in tables(whole) if entry.step >= at.step]
        assert are_equal(trained(plan, again, rest), weights)


def test_choice_of_once_trains_what_its_table_does_in_a_plan(folder: Path) -> None:
    """A run that chooses at its start equals one whose plan has that table, which masks are tested against."""
    case = case_of(folder)
    once = make_choice(subnets=2, backward_score=Score.TAYLOR.value)
    plan = changed(case.plan(TWO), choice=once)
    carrier = make_carrier(case, plan)
    chosen = run(plan, carrier)
    (table,) = tables(chosen)
    assert StepKind.SCORE in {entry.turn.kind for entry in chosen.logged if isinstance(entry, rd.LogTurn)}
    fixed = changed(case.plan(TWO), operations=table.operations)
    again = make_carrier(case, fixed)
    assert are_equal(trained(fixed, again, run(fixed, again)), trained(plan, carrier, chosen))


def test_choice_changes_what_is_trained(folder: Path) -> None:
    """Negative control: without a choice other weights come out."""
    case = case_of(folder)
    results = []
    for plan in (case.plan(ONE), changed(case.plan(ONE), choice=TAYLOR)):
        carrier = make_carrier(case, plan)
        results.append(trained(plan, carrier, run(plan, carrier)))
    assert distance(*results) > 1e-3
