"""How long forwards and backwards take under each policy for activations."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.activation_costs import mean_gain, projected_gains, trained_parts
from ringtune.costs.profile import Work
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.turns import StepKind
from ringtune.schedule.units import Range, Units
from ringtune.techniques.activation_checkpointing import VELORA_EXTRA
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, profile_of

PLAN = make_plan([("a", 0, 4)], ["a"], microbatches=1, method="all")
GRAPH, LOW = (TIMES[work] for work in (Work.GRAPH, Work.GRAPH_LOWEST))
BACK, BACK_LOW = TIMES[Work.BACKWARD], TIMES[Work.BACKWARD_LOWEST]
LONGER = 1 + VELORA_EXTRA


def seconds(
    op: Op,
    start: int,
    stop: int,
    *,
    recompute: tuple[int, int] | None = None,
    projected: tuple[int, int] | None = None,
    kind: StepKind = StepKind.TRAIN,
    inputs: tuple[KeptInput, ...] = (),
    parts: int = 32,
) -> float:
    """Seconds of an action where block 0 is the lowest that trains."""
    velora = Velora(blocks=(Range(*projected),), layers=("down",), parts=parts) if projected else None
    course = dataclasses.replace(PLAN.course, velora=velora)
    again = (Range(*recompute),) if recompute else ()
    profile = profile_of(PLAN)
    facts = profile.nodes[0]
    model = dataclasses.replace(facts.model, kept_inputs=inputs, hidden_size=32, intermediate_size=128)
    profile = dataclasses.replace(profile, nodes=(dataclasses.replace(facts, model=model),))
    costs = CourseCosts(course, profile, recompute=again)
    return costs.action_s("a", Action(op, 0, 0, start, stop), size=0.0, lowest=0, kind=kind)


@cases(
    ("recompute", "projected", "forward_s", "backward_s"),
    [
        (None, None, LOW + 3 * GRAPH, BACK_LOW + 3 * BACK),
        ((0, 4), None, LOW + 3 * GRAPH, LOW + 3 * GRAPH + BACK_LOW + 3 * BACK),
        ((0, 1), None, LOW + 3 * GRAPH, LOW + BACK_LOW + 3 * BACK),
        ((2, 3), None, LOW + 3 * GRAPH, GRAPH + BACK_LOW + 3 * BACK),
        (None, (0, 4), LONGER * (LOW + 3 * GRAPH), LONGER * (BACK_LOW + 3 * BACK)),
        (None, (1, 2), LOW + (2 + LONGER) * GRAPH, BACK_LOW + (2 + LONGER) * BACK),
        ((0, 4), (0, 4), LONGER * (LOW + 3 * GRAPH), LONGER * (LOW + 3 * GRAPH + BACK_LOW + 3 * BACK)),
        ((0, 2), (1, 3), LOW + (1 + 2 * LONGER) * GRAPH, LOW + LONGER * GRAPH + BACK_LOW + (1 + 2 * LONGER) * BACK),
    ],
)
def test_seconds_of_each_policy(
    recompute: tuple[int, int] | None, projected: tuple[int, int] | None, forward_s: float, backward_s: float
) -> None:
    """A block that runs again goes forward with a graph before its backward too."""
    assert seconds(Op.FORWARD, 0, 4, recompute=recompute, projected=projected) == pytest.approx(forward_s)
    assert seconds(Op.BACKWARD, 0, 4, recompute=recompute, projected=projected) == pytest.approx(backward_s)


def test_seconds_of_scores_are_without_projections() -> None:
    """A pass that gathers scores keeps whole inputs."""
    whole = seconds(Op.FORWARD, 0, 4, kind=StepKind.SCORE)
    assert seconds(Op.FORWARD, 0, 4, projected=(0, 4), kind=StepKind.SCORE) == whole


OWN = (
    KeptInput(layers=("query", "key", "value"), width=384),
    KeptInput(layers=("attention_out",), width=384),
    KeptInput(layers=("up",), width=384),
    KeptInput(layers=("down",), width=1536),
)
WIDE = dataclasses.replace(PLAN.course, hidden_size=384)
MINILM = dataclasses.replace(profile_of(PLAN).nodes[0].model, hidden_size=384, intermediate_size=1536, kept_inputs=OWN)


def test_gain_is_of_the_blocks_own_weights_only() -> None:
    """Adapters' matrices take next to no time; without VeLoRA there is no gain."""
    course = dataclasses.replace(WIDE, velora=Velora(blocks=(Range(0, 4),), layers=("adapter_down",)))
    adapters = dataclasses.replace(MINILM, kept_inputs=(KeptInput(layers=("adapter_down",), width=384),))
    assert projected_gains(course, adapters) == projected_gains(WIDE, MINILM) == (0.0,) * 4


def test_seconds_of_own_weights_with_projections_are_shorter() -> None:
    """Half of all multiplications for weights, of which 8 numbers for 128 stay: a forward's share less, each block."""
    inputs = (KeptInput(layers=("up",), width=32), KeptInput(layers=("down",), width=128))
    given = {"projected": (1, 3), "inputs": inputs, "parts": 8}
    shorter = 0.77 * 0.5 * (1 - 8 / 128) * 2 * GRAPH
    found = seconds(Op.BACKWARD, 0, 4, **given)  # type: ignore[arg-type]
    assert found == pytest.approx(BACK_LOW + (1 + 2 * LONGER) * BACK - shorter)
    assert seconds(Op.FORWARD, 0, 4, **given) == pytest.approx(LOW + (1 + 2 * LONGER) * GRAPH)  # type: ignore[arg-type]


def test_seconds_of_unlike_blocks_are_each_blocks_own() -> None:
    """Of four blocks only the last projects what its matrices read; it alone is shorter."""
    reads = (KeptInput(layers=("up",), width=32), KeptInput(layers=("down",), width=128))
    course = dataclasses.replace(PLAN.course, velora=Velora(blocks=(Range(0, 4),), layers=("down",), parts=8))
    profile = profile_of(PLAN)
    model = dataclasses.replace(
        profile.nodes[0].model, hidden_size=32, intermediate_size=128, unlike_inputs=((), (), (), reads)
    )
    gain = 0.77 * 0.5 * (1 - 8 / 128)
    gains = projected_gains(course, model)
    assert gains == pytest.approx((0, 0, 0, gain))
    assert [mean_gain(gains, *piece) for piece in ((0, 3), (2, 4), (4, 4))] == pytest.approx([0, gain / 2, 0])
    profile = dataclasses.replace(profile, nodes=(dataclasses.replace(profile.nodes[0], model=model),))
    costs = CourseCosts(course, profile)
    for start, shorter in ((1, gain * GRAPH), (0, gain * (LOW + 3 * GRAPH) / 4)):
        back_s = costs.action_s("a", Action(Op.BACKWARD, 0, 0, start, 4), size=0.0, lowest=0, kind=StepKind.TRAIN)
        whole_s = 3 * BACK + (0 if start else BACK_LOW)
        assert back_s == pytest.approx(LONGER * whole_s - shorter)


def test_projections_are_of_the_group_that_trains() -> None:
    """HiFT goes back through blocks that do not train, and projects nothing there."""
    ranges, units = (Range(0, 2), Range(3, 4)), Units.of(4, [1, 2, 3])
    hift = dataclasses.replace(PLAN.course, method=Hift())
    assert trained_parts(PLAN.course, ranges, units) == ranges
    assert list(trained_parts(hift, ranges, units)) == [Range(1, 2), Range(3, 4)]
